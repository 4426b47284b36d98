"""The same numbers from data: the captured graph run on real or Gaussian inputs, with standard errors.

Without data a short trial is run on random inputs, forward alone: it shows from the weights alone where the units of a
layer are far from independent, as training makes them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation
from ..errors import VarpropError
from ..graph.node import Node, resolve
from ..graph.program import Program
from ..moments import Moments, Tokens, autocast_off
from .regions import Region, bend_at, first_result, macs, moments_of
from .rows import UnitStatistics, layer_numbers

INPUT = -1  # stands for the inputs among the indices of regions
GROUPS = 8  # for the jackknife
FEWEST, MOST, AFFORDED = 4, 64, 8e9  # random inputs of a trial, and multiplications with additions for all of them
TOO_MUCH = 1e11  # of these for the fewest inputs: no trial then


@dataclass
class RunSums:
    """Sums over the runs of one group."""

    runs: int = 0
    # by index of the region and quantity: mean, square, count, flat, on, linear, gradient
    totals: dict[tuple[int, str], Any] = field(default_factory=lambda: defaultdict(float))


Estimates = dict[str, dict[str, float]]  # value and standard error of every number


@dataclass(frozen=True)
class MeasuredNumbers:
    """Numbers from data."""

    regions: list[Estimates]  # of every region
    input_std: float  # standard deviation of the inputs


def trial_size(program: Program) -> int:
    """How many random inputs a trial takes: few where one of them is much work, none where it is too much."""
    work = sum(macs(node) for node in program.nodes) / batch_extent(program)
    if FEWEST * work > TOO_MUCH:
        return 0
    return int(min(MOST, max(FEWEST, AFFORDED / max(work, 1.0))))


@autocast_off()
def measure(
    evaluation: Evaluation,
    regions: list[Region],
    data: Any,
    samples: int,
    seed: int,
    ran: Callable[[], None] = lambda: None,
    backward: bool = True,
) -> MeasuredNumbers:
    """The numbers of every region from data.

    Args:
        evaluation: What was propagated.
        regions: Where to measure.
        data: As `inspect` takes it for `check`.
        samples: How many inputs to use at most.
        seed: Of the random draws.
        ran: Called after every run.
        backward: Whether to measure gradients too.
    """
    batch = batch_extent(evaluation.plan.program)
    runs = math.ceil(samples / batch)
    groups = [RunSums() for _ in range(GROUPS)]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for index, inputs in enumerate(_inputs(evaluation, data, runs, batch)):
            _run(evaluation, regions, inputs, groups[index % GROUPS], backward)
            ran()
    used = [group for group in groups if group.runs]
    if len(used) < 2:
        raise VarpropError(f"`check` needs at least two batches of inputs, each as large as the example's: {batch}.")
    input_std = float(_statistics(INPUT, used).var.mean().sqrt()) if (INPUT, "mean") in used[0].totals else 0.0
    return MeasuredNumbers([_estimates(index, used) for index in range(len(regions))], input_std)


def batch_extent(program: Program) -> int:
    """How many inputs one run of the graph takes."""
    shape = program.inputs[0].info.shape
    return int(shape[0]) if len(shape) else 1


def _inputs(evaluation: Evaluation, data: Any, runs: int, batch: int) -> Iterator[list[Any]]:
    program = evaluation.plan.program
    if isinstance(data, str):
        if data != "gaussian":
            raise ValueError(f'check must be "gaussian", a tensor or batches of inputs, not {data!r}.')
        laws = [evaluation.env[node] for node in program.inputs]
        roots = [_root(law.covariance) if isinstance(law, Moments) else None for law in laws]
        for _ in range(runs):
            yield [_drawn(law, root) for law, root in zip(laws, roots, strict=True)]
        return
    random = [node for node in program.inputs if evaluation.plan.random(node)]
    if len(random) != 1:
        raise VarpropError(f'The model has {len(random)} random inputs: `check` takes data for one, or "gaussian".')
    rows = _rows(data)
    for _ in range(runs):
        taken = [row for _, row in zip(range(batch), rows, strict=False)]
        if len(taken) < batch:
            return
        values, info = torch.stack(taken), random[0].info
        if values.shape != info.shape:
            raise VarpropError(
                f"`check` holds inputs of shape {tuple(values.shape[1:])}, but the model sees {tuple(info.shape[1:])}."
            )
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ValueError("`check` holds NaN or infinity.")
        chosen = values.to(info.device, info.dtype)
        yield [chosen if node is random[0] else evaluation.env[node] for node in program.inputs]


def _rows(data: Any) -> Iterator[Tensor]:
    """One input after the other."""
    if isinstance(data, Tensor):
        yield from data
    elif isinstance(data, Iterable):
        for item in data:
            yield from _first_tensor(item)
    else:
        raise TypeError(f'check takes "gaussian", a tensor or an iterable of batches, not {type(data).__name__}.')


def _first_tensor(item: Any) -> Tensor:
    if isinstance(item, Tensor):
        return item
    items = list(item.values()) if isinstance(item, Mapping) else list(item) if isinstance(item, (list, tuple)) else []
    if not items:
        raise TypeError(f"A batch of `check` holds no tensor but {type(item).__name__}.")
    return _first_tensor(items[0])


def _drawn(value: Any, root: Tensor | None) -> Any:
    """A random input; what is no random one as it is."""
    if isinstance(value, Moments):
        if root is not None:
            return value.mean + (root @ torch.randn_like(value.mean).flatten()).view(value.shape)
        mean, std = value.mean.expand(value.full), value.std.expand(value.full)
        return mean + std * torch.randn(value.full, dtype=mean.dtype, device=mean.device)
    if isinstance(value, Tokens):
        count = math.prod(value.full or ())
        return torch.multinomial(value.probabilities, count, replacement=True).view(value.full or ())
    return value


def _root(covariance: Tensor | None) -> Tensor | None:
    """A matrix A with A Aᵀ the covariance, which may be singular; None without one."""
    if covariance is None:
        return None
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * values.clamp_min(0).sqrt()
    return root


def _run(evaluation: Evaluation, regions: list[Region], inputs: list[Any], sums: RunSums, backward: bool) -> None:
    """Run the graph on plain tensors; everything is kept for autograd, or nothing longer than it is read."""
    program = evaluation.plan.program
    values: dict[Node, Any] = {**program.tensors(), **dict(zip(program.inputs, inputs, strict=True))}
    made_by: dict[Node, list[int]] = defaultdict(list)
    for index, region in enumerate(regions):
        made_by[region.output].append(index)
    last_reader = {operand: node for node in program.nodes for operand in node.operands}
    for node in program.inputs:
        moments = evaluation.env[node]
        if values[node].is_floating_point():
            values[node] = values[node].detach().requires_grad_(backward)
            if isinstance(moments, Moments):
                _add_value(sums, INPUT, values[node], torch.Size([1] * values[node].ndim))
    sums.runs += 1
    with torch.set_grad_enabled(backward):
        for node in program.nodes:
            args, kwargs = resolve((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
            for index in made_by.get(node, ()):
                _add_value(sums, index, values[node], moments_of(evaluation, node).shape)
                _add_bend(evaluation, regions[index], sums, index, values)
            for operand in () if backward else node.operands:
                if last_reader[operand] is node:
                    del values[operand]
    if backward:
        gradients = _differentiated(program, values, [region.output for region in regions])
        for index, gradient in gradients.items():
            shape = moments_of(evaluation, regions[index].output).shape
            sums.totals[index, "gradient"] += _pooled(gradient.double().square(), shape)


def _add_value(sums: RunSums, index: int, value: Any, shape: torch.Size) -> None:
    """Add one run of a value, stored as `shape` by the propagation."""
    result = first_result(value).detach().double()
    sums.totals[index, "mean"] += _pooled(result, shape)
    sums.totals[index, "square"] += _pooled(result.square(), shape)
    sums.totals[index, "count"] += result.numel() / max(1, sums.totals[index, "mean"].numel())


def _add_bend(evaluation: Evaluation, region: Region, sums: RunSums, index: int, values: dict[Node, Any]) -> None:
    """How often the activation that makes a region's result was flat, on, or passed everything."""
    if not (bent := bend_at(evaluation, region)):
        return
    bend, argument = bent[0], first_result(values[bent[1]]).detach()
    inner = moments_of(evaluation, bent[1]).shape
    if bend.saturates:
        sums.totals[index, "flat"] += _pooled(bend.is_flat(argument).double(), inner)
    if bend.rectifier is not None:
        for what, above in zip(("on", "linear"), bend.is_above(argument), strict=True):
            sums.totals[index, what] += _pooled(above.double(), inner)


def _differentiated(program: Program, values: dict[Node, Any], at: list[Node]) -> dict[int, Tensor]:
    """Gradients by index of the region, for a random gradient of variance 1 at every output."""
    ends = [first_result(values[out]) for out in program.outputs if isinstance(out, Node)]
    ends = [end for end in ends if isinstance(end, Tensor) and end.requires_grad]
    wanted = {index: first_result(values[node]) for index, node in enumerate(at)}
    able = {index: tensor for index, tensor in wanted.items() if isinstance(tensor, Tensor) and tensor.requires_grad}
    if not ends or not able:
        return {}
    starts = [torch.randn_like(end) for end in ends]
    gradients = torch.autograd.grad(ends, list(able.values()), starts, allow_unused=True)
    return {index: gradient for index, gradient in zip(able, gradients, strict=True) if gradient is not None}


def _pooled(values: Tensor, shape: torch.Size) -> Tensor:
    """Averaged over the batch and over uniform axes."""
    if not values.ndim:
        return values
    axes = [axis for axis, extent in enumerate(shape) if (axis == 0 or extent == 1) and values.shape[axis] != 1]
    return values.mean(axes, keepdim=True) if axes else values  # for a batch of one most often there are none


def _estimates(index: int, groups: list[RunSums]) -> Estimates:
    """Values over all groups; standard errors by leaving out one group at a time (jackknife)."""
    values = layer_numbers(_statistics(index, groups))
    without = [layer_numbers(_statistics(index, groups[:i] + groups[i + 1 :])) for i in range(len(groups))]
    share = (len(groups) - 1) / len(groups)
    estimates = {}
    for what, value in values.items():
        left_out = [numbers_without[what] for numbers_without in without]
        middle = sum(left_out) / len(left_out)
        estimates[what] = {"value": value, "error": math.sqrt(share * sum((v - middle) ** 2 for v in left_out))}
    return estimates


def _statistics(index: int, groups: list[RunSums]) -> UnitStatistics:
    runs = sum(group.runs for group in groups)

    def average(what: str) -> Tensor | None:
        sums = [group.totals[index, what] for group in groups if (index, what) in group.totals]
        return torch.stack(sums).sum(0) / runs if sums else None

    mean, square = average("mean"), average("square")
    assert mean is not None and square is not None
    count = sum(group.totals[index, "count"] for group in groups)  # of values behind every mean
    var = (square - mean.square()).clamp_min(0) * (count / (count - 1) if count > 1 else 1.0)
    return UnitStatistics(mean, var, average("flat"), average("on"), average("linear"), average("gradient"))
