"""One model through `vp.normalize`, `init="preserve"`, `vp.fold` and a step of training, against the original."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import varprop as vp

from .inputs import Inputs, described, drawn, moments
from .models import ROOT, build

Record = dict[str, Any]
RESULTS = ROOT / "docs/results/zoo_normalize.json"
LARGE = 150_000_000  # parameters; larger models are compared in single precision, as their copies would not fit
# What a difference may be, of an output's standard deviation, in either precision; and how many times the difference
# that a change of the input by so much of itself makes, where the model amplifies or rounds by itself.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
CHANGE = {torch.float64: 1e-12, torch.float32: 1e-6}
ROUNDING = {torch.float64: 1.0, torch.float32: 10.0}
LEARNING_RATE = 1e-3
DIFFERENCES = ("preserve", "preserve, fold", "fold", "step, fold")
TOLERANCES = ("tolerance", "tolerance, normalized")
# An error of one of these types is an answer with a sentence; any other is a crash.
ANSWERS = (vp.VarpropError, ValueError, NotImplementedError)


def study(model_name: str) -> Iterator[Record]:
    """The record of one model; see `compare`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float64, torch.float32):
            with default_dtype(dtype):
                model, inputs = build(model_name)
                if dtype == torch.float64 and not _takes_double(model, inputs):
                    continue
                size = sum(p.numel() for p in model.parameters())
                record = {"model": model_name, "parameters": size, "input": described(inputs)}
                yield record | compare(unlike_new_(model), inputs)
                return


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make models and inputs of a dtype inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _takes_double(model: nn.Module, inputs: Inputs) -> bool:
    """False for large models, and for those that have single precision written into their code."""
    if sum(p.numel() for p in model.parameters()) > LARGE:
        return False
    try:
        outputs(model, drawn(inputs))
    except RuntimeError:  # of another precision; what fails in single precision as well is raised there
        return False
    return True


def compare(model: nn.Module, inputs: Inputs) -> Record:
    """How far a model in its forms with the analytic normalization is from itself.

    Returns:
        The largest differences (keys in `DIFFERENCES`), each relative to the standard deviation of the output it was
        found in, the `TOLERANCES` they have to keep (of the model itself and, for folds, of the normalized one), and
        under `step` what is wrong with a step of training, if anything. `status` is "done" if all is well and "differs"
        if not; else the error's class, with its `error`.
    """
    torch.manual_seed(2)
    example = drawn(inputs)
    original = outputs(model, example)
    tolerance = _tolerance(model, example, original)
    record: Record = {"tolerance": tolerance, "dtype": str(torch.get_default_dtype()).removeprefix("torch.")}
    try:
        preserved = vp.normalize(model, moments(inputs), example=example, init="preserve")
        record["preserve"] = difference(outputs(preserved, example), original)
        record["preserve, fold"] = difference(outputs(vp.fold(preserved, inplace=True), example), original)
        del preserved
        gc.collect()  # the sweep switches collecting off
        normalized = vp.normalize(model, moments(inputs), example=example)
        expected = outputs(normalized, example)
        sensitive = _tolerance(normalized, example, expected)
        record["fold"] = difference(outputs(vp.fold(normalized), example), expected)
        record["step"] = step(model, normalized, several(inputs))
        trained = outputs(normalized, example)
        record["tolerance, normalized"] = max(sensitive, _tolerance(normalized, example, trained))
        record["step, fold"] = difference(outputs(vp.fold(normalized), example), trained)
    except ANSWERS as error:
        return record | {"status": type(error).__name__, "error": _sentence(error)}
    return record | {"status": "differs" if record["step"] or beyond(record) else "done"}


def beyond(record: Record) -> list[str]:
    """The differences of a record that are no rounding: above the tolerance of the model that was compared with."""
    limits = {key: record.get("tolerance, normalized", record["tolerance"]) for key in ("fold", "step, fold")}
    return [key for key in DIFFERENCES if record[key] > limits.get(key, record["tolerance"])]


def _sentence(error: Exception) -> str:
    """The beginning of the message in one line, without the machine's folders."""
    text = re.sub(r"/\S*/site-packages/", "", " ".join(str(error).split()).replace(f"{ROOT}/", ""))
    return textwrap.shorten(text, 400, placeholder=" ...")


def _tolerance(model: nn.Module, example: Any, original: list[Tensor]) -> float:
    """How far two ways to compute a model may differ by rounding."""
    dtype = torch.get_default_dtype()
    changed = pytree.tree_map_only(Tensor, lambda x: x * (1 + CHANGE[dtype]) if x.is_floating_point() else x, example)
    return max(TOLERANCE[dtype], ROUNDING[dtype] * difference(outputs(model, changed), original))


@torch.no_grad()
def unlike_new_(model: nn.Module) -> nn.Module:
    """Give a new model parameters and statistics as after training: none is 0 or 1 throughout and hides an error."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.is_floating_point() and parameter.min() == parameter.max():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 100
            parameter.add_(torch.randn_like(parameter) * max(fan_in, 1) ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(torch.randn_like(buffer) / 10)
        elif name.endswith("running_var"):
            buffer.mul_(torch.rand_like(buffer) + 0.5)
    return model


def several(inputs: Inputs, count: int = 2) -> Any:
    """A random batch, on which batch norms that stay can be trained."""
    batches = [drawn(inputs) for _ in range(count)]
    leaves = [pytree.tree_leaves(batch) for batch in batches]
    joined = [torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(joined, pytree.tree_structure(batches[0]))


def _call(model: nn.Module, example: Any) -> list[Tensor]:
    """The floating point tensors among a model's outputs."""
    result = model(**example) if isinstance(example, dict) else model(*example)
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@torch.no_grad()
def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The outputs of a model in evaluation mode, with the same random numbers every time."""
    torch.manual_seed(3)
    return _call(model.eval(), example)


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference between two lists of tensors, relative to the standard deviation of the second's."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return float("inf")
    largest = 0.0
    for x, y in zip(ours, theirs, strict=True):
        if y.numel():
            std = float(y.double().std(correction=0))
            distance = float((x.double() - y.double()).abs().max()) / (std or 1.0)
            largest = max(largest, distance if distance == distance else float("inf"))
    return largest


def gradients(model: nn.Module, batch: Any) -> tuple[float, dict[str, float]]:
    """The loss of a random projection of the outputs in training mode, and the largest gradient of each parameter."""
    torch.manual_seed(4)
    model.train().zero_grad()
    values = [y for y in _call(model, batch) if y.requires_grad]
    torch.manual_seed(5)
    loss = torch.stack([(y * torch.randn_like(y)).mean() for y in values]).sum()
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {name: float(p.grad.abs().max()) for name, p in named if p.grad is not None}


def step(model: nn.Module, normalized: nn.Module, batch: Any) -> str:
    """Take one step of gradient descent with the normalized model; a sentence if it is not as it should be, else ""."""
    _, before = gradients(copy.deepcopy(model), batch)
    loss, after = gradients(normalized, batch)
    if not torch.tensor([loss, *after.values()]).isfinite().all():
        return "The loss or a gradient is not finite."
    parameters = dict(normalized.named_parameters())
    lost = [name for name, size in before.items() if size and name in parameters and not after.get(name)]
    lost = [name for name in lost if _counts(normalized, parameters[name], batch, loss)]
    if lost:
        return f"Without a gradient now: {', '.join(lost)}."
    old = {name: p.detach().clone() for name, p in parameters.items()}
    torch.optim.SGD(parameters.values(), LEARNING_RATE / max(1.0, max(after.values()))).step()
    if all(torch.equal(p, old[name]) for name, p in parameters.items()):
        return "No parameter changed."
    later, _ = gradients(normalized, batch)
    return "" if torch.tensor(later).isfinite() else "The loss after the step is not finite."


def _counts(model: nn.Module, parameter: Tensor, batch: Any, loss: float) -> bool:
    """True if the loss depends on a parameter; an offset of all channels that a normalized layer reads does nothing."""
    old = parameter.detach().clone()
    with torch.no_grad():
        parameter.add_(0.1 * (1.0 + parameter.abs()))
    changed, _ = gradients(model, batch)
    with torch.no_grad():
        parameter.copy_(old)
    return abs(changed - loss) > TOLERANCE[torch.get_default_dtype()] * max(1.0, abs(loss))


def said(record: Record) -> str:
    """A record in a few words."""
    distances = [f"{key} {record[key]:.0e}" for key in (*DIFFERENCES, *TOLERANCES) if key in record]
    return ", ".join(distances) + (f"; {record['step']}" if record.get("step") else "")


def write(names: list[str], measured: dict[str, Record]) -> list[Record]:
    """Write docs/results/zoo_normalize.json; models that were not measured this time keep their records.

    Returns:
        All records, in the order of the names.
    """
    records = {record["model"]: record for record in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for record in measured.values():
        rounded = {key: float(f"{record[key]:.1e}") for key in (*DIFFERENCES, *TOLERANCES) if key in record}
        more = {key: record[key] for key in ("dtype", "step", "error", "torch") if record.get(key)}
        records[record["model"]] = {"model": record["model"], "status": record["status"]} | rounded | more
    ordered = [records[name] for name in names if name in records]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(record) for record in ordered) + "\n]\n")
    return ordered
