"""One model: its operations counted, its moments computed, and every layer compared with Monte Carlo."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varprop as vp

from .causes import GOOD, Layer, cause
from .inputs import Inputs, described, drawn, moments
from .models import ROOT, build


def study(model_name: str, samples: int) -> dict[str, Any]:
    """Everything about one model (without samples only its operations); what fails is said under `error`."""
    model, inputs = build(model_name)
    size = sum(p.numel() for p in model.parameters())
    record: dict[str, Any] = {"model": model_name, "parameters": size, "input": described(inputs)}
    try:
        with torch.no_grad():
            return record | measure(model, inputs, samples)
    except vp.VarpropError as error:
        first = str(error).splitlines()[0].replace(f"{ROOT}/", "")
        return record | {"status": type(error).__name__, "error": first}


def measure(model: nn.Module, inputs: Inputs, samples: int) -> dict[str, Any]:
    """Times, counts of operations, and the distance from Monte Carlo."""
    example = drawn(inputs)
    program, capture = timed(lambda: vp.capture(model, example))
    counted = vp.coverage(program, example)
    record: dict[str, Any] = {
        "exact": len(counted.exact),
        "approximate": len(counted.approximate),
        "missing": dict(Counter(entry.op for entry in counted.missing)),
        "capture_s": capture,
    }
    if counted.missing or not samples:
        return record | {"status": "missing" if counted.missing else "counted"}
    result, seconds = timed(lambda: vp.propagate(program, moments(inputs)))
    layers = layer_ratios(model, result, inputs, samples)
    found = {"status": "done", "propagate_s": seconds, "samples": samples, "cause": cause(result, layers)}
    return record | found | summary(layers)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the wall time."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def summary(layers: list[Layer]) -> dict[str, Any]:
    """The median error over layers, how many are good, and every ratio."""
    errors = [abs(ratio - 1) for *_, ratio in layers]
    return {
        "layers": len(layers),
        "good_layers": sum(error <= GOOD for error in errors),
        "median_error": statistics.median(errors) if errors else None,
        "ratios": layers,
    }


def layer_ratios(model: nn.Module, result: vp.Result, inputs: Inputs, samples: int) -> list[Layer]:
    """Path, class and std analytic / std Monte Carlo of every module called once, in the order of execution."""
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
    found = [(path, result.classes[path], std_ratio(result[path], *sums[path])) for path in paths if path in sums]
    return [(path, kind, ratio) for path, kind, ratio in found if ratio is not None]


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
