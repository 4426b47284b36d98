"""One model: its operations counted, its moments computed, and every layer compared with Monte Carlo."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varprop as vp

from .causes import GOOD, Layer, cause
from .inputs import Inputs, described, drawn, has_positions, moments
from .models import ROOT, build

Record = dict[str, Any]


def study(model_name: str, samples: int) -> Iterator[Record]:
    """Everything about one model (without samples only its operations); what fails is said under `error`.

    Where the positions of an image taken as alike leave more than `GOOD`, a second record follows, with every position
    by itself.
    """
    model, inputs = build(model_name)
    size = sum(p.numel() for p in model.parameters())
    record: Record = {"model": model_name, "parameters": size, "input": described(inputs)}
    try:
        with torch.no_grad():
            for found in measure(model, inputs, samples):
                yield record | found
    except vp.VarpropError as error:
        first = str(error).splitlines()[0].replace(f"{ROOT}/", "")
        yield record | {"status": type(error).__name__, "error": first}


def said(record: Record) -> str:
    """A record in a few words."""
    text = f"{record.get('exact')} exact, {record.get('approximate')} approximate"
    missing, median, apart = record.get("missing"), record.get("median_error"), record.get("apart", {})
    text += f", missing {missing}" if missing else f", median error {median:.1%}" if median is not None else ""
    return text + (f", positions apart {apart['median_error']:.1%}" if "median_error" in apart else "")


def measure(model: nn.Module, inputs: Inputs, samples: int) -> Iterator[Record]:
    """Times, counts of operations, and the distance from Monte Carlo."""
    example = drawn(inputs)
    program, capture = timed(lambda: vp.capture(model, example))
    counted = vp.coverage(program, example)
    record: Record = {
        "exact": len(counted.exact),
        "approximate": len(counted.approximate),
        "missing": dict(Counter(entry.op for entry in counted.missing)),
        "capture_s": capture,
    }
    if counted.missing or not samples:
        yield record | {"status": "missing" if counted.missing else "counted"}
        return
    result, seconds = timed(lambda: vp.propagate(program, moments(inputs)))
    sums = monte_carlo(model, result, inputs, samples)
    record |= {"status": "done", "propagate_s": seconds, "samples": samples}
    record |= summary(result, ratios(result, {path: result[path] for path in sums}, sums))
    yield record
    if record["median_error"] is not None and record["median_error"] > GOOD and has_positions(inputs):
        apart, seconds = timed(lambda: vp.propagate(program, moments(inputs, apart=True)))
        pooled = {path: at_a_random_position(apart[path], result[path].shape) for path in sums}
        yield record | {"apart": {"propagate_s": seconds} | summary(apart, ratios(apart, pooled, sums))}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the wall time."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def summary(result: vp.Result, layers: list[Layer]) -> Record:
    """The median error over layers, how many are good, every ratio, and where it goes wrong."""
    errors = [abs(ratio - 1) for *_, ratio in layers]
    return {
        "layers": len(layers),
        "good_layers": sum(error <= GOOD for error in errors),
        "median_error": statistics.median(errors) if errors else None,
        "ratios": layers,
        "cause": cause(result, layers),
    }


def monte_carlo(model: nn.Module, result: vp.Result, inputs: Inputs, samples: int) -> dict[str, list[Tensor]]:
    """Count, sum and sum of squares of every module called once, over samples and uniform axes, as they are called."""
    torch.manual_seed(1)
    sums: dict[str, list[Tensor]] = {}
    modules = named_once(model)
    paths = [path for path, calls in result.calls.items() if len(calls) == 1 and path in modules]
    hooks = [modules[path].register_forward_hook(recorder(sums, path, result[path])) for path in paths]
    for _ in range(samples):
        example = drawn(inputs)
        model(**example) if isinstance(example, dict) else model(*example)
    for hook in hooks:
        hook.remove()
    return {path: sums[path] for path in paths if path in sums}


def ratios(result: vp.Result, found: dict[str, vp.Moments], sums: dict[str, list[Tensor]]) -> list[Layer]:
    """Path, class and std analytic / std Monte Carlo, where there is enough to tell."""
    all_of_them = [(path, result.classes[path], std_ratio(found[path], *sums[path])) for path in sums]
    return [(path, kind, ratio) for path, kind, ratio in all_of_them if ratio is not None]


def at_a_random_position(found: vp.Moments, stored: torch.Size) -> vp.Moments:
    """Moments with some axes pooled to extent 1: of an element drawn along them, which adds the spread of the means."""
    axes = [axis for axis, extent in enumerate(stored) if extent == 1]
    mean, var = (part.double() for part in (found.dense().mean, found.dense().var))
    centre = mean.mean(axes, keepdim=True) if axes else mean
    spread = var + (mean - centre).square()
    return vp.Moments(centre, spread.mean(axes, keepdim=True) if axes else spread)


def named_once(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by path, without those that stand at several places (a hook could not tell their calls apart)."""
    named = list(model.named_modules(remove_duplicate=False))
    times = Counter(id(module) for _, module in named)
    return {path: module for path, module in named if times[id(module)] == 1}


def recorder(sums: dict[str, list[Tensor]], path: str, found: vp.Moments) -> Callable[..., None]:
    """Adds up values and squares of a module's output, over the uniform axes too; other outputs are left out."""
    pooled = [axis for axis, stored in enumerate(found.shape) if stored == 1]

    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        value = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if value is None or value.shape != found.full or not value.is_floating_point():
            return
        wide = value.double()
        count = torch.tensor(wide.numel() / max(1, found.mean.numel()), dtype=torch.float64)
        parts = [count, *(t.sum(pooled, keepdim=True) if pooled else t for t in (wide, wide.square()))]
        sums[path] = [a + b for a, b in zip(sums[path], parts, strict=True)] if path in sums else parts

    return record


def std_ratio(found: vp.Moments, count: Tensor, total: Tensor, squares: Tensor) -> float | None:
    """Root mean squares over the units of both stds, or None where nothing varies or there is too little to tell."""
    if count < 2:
        return None
    measured = ((squares - total.square() / count) / (count - 1)).clamp_min(0).mean()
    return float((found.var.double().mean() / measured).sqrt()) if measured > 1e-12 else None
