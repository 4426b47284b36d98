"""The rows of a report: everything that is known of the result of one module call or operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..engine.evaluation import Evaluation
from ..engine.plan import rule_of
from ..engine.slopes import slopes
from ..graph.node import Node, resolve
from ..moments import Moments
from ..text_table import extents_text
from .gradients import GradientScales, average, chance_on
from .regions import Region, bend_at, channel_axis, first_moments, label, moments_of, op_name, over_channels, ranges
from .roles import role_of

DEAD, ALWAYS_ON = 1e-3, 1 - 1e-3  # how often a unit is on
ROWS = 256  # of a weight at most, evenly chosen, by which its effective rank is judged
LARGEST = 2**16  # elements; quantiles of more are those of an even choice


@dataclass(frozen=True)
class UnitSpread:
    """A quantity over the units of a layer; the quartiles are `lower`, `median` and `upper`."""

    least: float
    lower: float
    median: float
    upper: float
    most: float
    average: float


def spread_of(values: Tensor) -> UnitSpread:
    """Extremes, quartiles and average of a tensor."""
    flat = values.detach().flatten().double()
    chosen = flat if flat.numel() <= LARGEST else flat[:: flat.numel() // LARGEST + 1]
    quartiles = torch.quantile(chosen, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=flat.device))
    return UnitSpread(*map(float, (flat.min(), *quartiles, flat.max(), flat.mean())))


@dataclass(frozen=True)
class UnitStatistics:
    """Statistics of the units of one region; tensors have one element a unit."""

    mean: Tensor  # their means
    var: Tensor  # their variances
    flat: Tensor | None = None  # probability that the activation which made them was in a flat part, if it has one
    on: Tensor | None = None  # probability that the rectifier which made them was on, if it is one
    linear: Tensor | None = None  # probability that it passed everything
    gradient: Tensor | None = None  # second moment of the gradient


def layer_numbers(units: UnitStatistics) -> dict[str, float]:
    """Statistics of a layer as a whole.

    ``mean``; ``std`` (root mean square over units); ``shift``, the share of the mean square that is a constant, m^2 /
    (m^2 + v), both averaged over units; and where they apply the shares of units ``flat``, ``saturated``, ``dead`` and
    ``always_on``, and ``gradient``, the root mean square of a single element's.
    """
    square, var = average(units.mean.double().square()), average(units.var)
    total = square + var
    result = {"mean": average(units.mean), "std": var**0.5, "shift": square / total if total > 0 else 0.0}
    if units.flat is not None:
        result |= {"flat": average(units.flat), "saturated": average((units.flat > 0.5).double())}
    if units.on is not None:
        result["dead"] = average((units.on < DEAD).double())
    if units.linear is not None:
        result["always_on"] = average((units.linear > ALWAYS_ON).double())
    if units.gradient is not None:
        result["gradient"] = average(units.gradient) ** 0.5
    return result


def effective_rank(weight: Tensor, groups: int) -> tuple[float, int]:
    """The effective rank of a weight, and the largest that it could have; of several groups those of the first.

    It is exp(H) for the entropy H of the singular values divided by their sum (Roy & Vetterli 2007): as many as there
    are where all are equal, 1 where a single one counts. Of large weights it is that of some of their rows.
    """
    matrix = weight.detach().flatten(1).unflatten(0, (groups, -1))[0].double()
    matrix = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    matrix = matrix[:: -(-matrix.shape[0] // ROWS)]
    if not bool(matrix.isfinite().all()) or not bool(matrix.any()):
        return 0.0, len(matrix)
    singular = torch.linalg.eigvalsh(matrix @ matrix.T / matrix.square().sum()).clamp_min(0).sqrt()
    singular = singular[singular > 1e-7 * singular.max()]  # what is below is rounding of the squares
    shares = singular / singular.sum()
    return float((-(shares * shares.log()).sum()).exp()), len(matrix)


SHARES = ("saturated", "dead", "always_on")  # numbers that are shares of units without effect


@dataclass(frozen=True)
class ReportRow:
    """Statistics of the result of one module call or operation."""

    path: str  # of the module, or of the innermost one around an operation; empty for the model itself
    kind: Literal["module", "operation"]
    name: str  # class of the module, or the operation
    op: str  # the operation that makes the result
    moves: bool  # whether that only moves elements
    call: int  # which call of the module it is, from 0
    depth: int  # in the tree of modules
    leaf: bool  # whether no other row lies inside it
    line: str  # the user's source line
    extents: tuple[int, ...]  # of the result
    uniform: tuple[bool, ...]  # along which axes one unit stands for all
    mean: UnitSpread  # means over the units
    std: UnitSpread  # standard deviations over the units
    numbers: dict[str, float]  # of the whole layer (`layer_numbers`)
    growth: float | None  # std over that of the model's input
    # root mean square over channels of the gradient summed over positions, E[sum g^2]^(1/2), which can be compared
    # between layers of different resolution; `numbers["gradient"]` is that of a single element
    gradient_total: float | None
    gain: float | None  # E[f'^2]^(1/2) of an activation, std out / std in otherwise
    status: str  # ``exact``, ``approximate`` or ``sampled``
    reasons: tuple[str, ...]  # why not exact, forward
    gradient_status: str  # ``exact`` or ``approximate``; empty without gradient
    gradient_reason: str  # why the step back through the row's own operation is approximate
    ranges: dict[str, Any] = field(repr=False)  # low and high end of every channel, mean -+ k std
    node: str  # name of the graph node
    measured: dict[str, dict[str, float]] = field(default_factory=dict)  # the numbers from data, with standard errors
    constant: float = 0.0  # share of the channels that do not vary at any position
    weighted: bool = False  # whether it is a single linear layer or convolution
    role: str = ""  # what becomes of it, where that decides how it is to be judged (`inspection.roles`)
    weight: str = ""  # name of the weight of a linear layer or convolution
    rank: float | None = None  # effective rank of that weight; 0 if it is all zeros, None without one
    full_rank: int = 0  # the largest that it could have
    trial: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # from a few random inputs, where no data was given
    branch: float | None = None  # of a residual sum: std of what is added over that of the stream it is added to
    branch_gain: float | None = None  # by how much the layer at the end of that branch multiplies the std

    @property
    def is_layer(self) -> bool:
        """True if it is a layer of its own: nothing lies inside it, and it does more than move elements."""
        return self.leaf and not self.moves

    @property
    def trial_ratio(self) -> float | None:
        """Standard deviation on the random inputs of the trial over the computed one; None where it says nothing."""
        seen, computed = self.trial.get("std"), self.numbers["std"]
        if not seen or not computed or not seen["value"] or not abs(seen["value"] - computed) >= 3 * seen["error"]:
            return None
        return seen["value"] / computed

    @property
    def class_name(self) -> str:
        """Class of the module; empty for an operation."""
        return self.name if self.kind == "module" else ""

    @property
    def own_name(self) -> str:
        """The last part of a module's path with the number of its call, or the operation in brackets."""
        return label(self.path.rpartition(".")[2], self.call) if self.kind == "module" else f"[{self.name}]"

    @property
    def indented(self) -> str:
        """The name, indented by its depth in the tree of modules."""
        return "  " * self.depth + self.own_name

    @property
    def extents_text(self) -> str:
        """Extents of the result, uniform axes in brackets."""
        return extents_text(self.extents, self.uniform)

    @property
    def label(self) -> str:
        """How messages name it."""
        return label(self.path, self.call, "" if self.kind == "module" else self.name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        lists = {name: list(plain[name]) for name in ("extents", "uniform", "reasons")}
        return plain | lists | {"label": self.label, "mean": asdict(self.mean), "std": asdict(self.std)}

    def flat(self) -> dict[str, Any]:
        """One level of names and numbers."""
        plain = self.to_dict()
        nested = {name: plain.pop(name) for name in ("mean", "std", "numbers", "measured", "ranges", "trial")}
        spreads = {f"{name}_{key}": value for name in ("mean", "std") for key, value in nested[name].items()}
        measured = {f"measured_{key}": seen["value"] for key, seen in nested["measured"].items()}
        errors = {f"measured_{key}_error": seen["error"] for key, seen in nested["measured"].items()}
        return {**plain, **self.numbers, **spreads, **measured, **errors}


def _unit_statistics(evaluation: Evaluation, gradients: GradientScales, region: Region) -> UnitStatistics:
    """Statistics of a region's units from propagation."""
    moments = moments_of(evaluation, region.output)
    flat = on = linear = None
    if bent := bend_at(evaluation, region):
        bend, argument = bent[0], moments_of(evaluation, bent[1])
        flat = bend.probability_flat(argument) if bend.saturates else None
        on, linear = bend.probabilities_above(argument) if bend.rectifier is not None else (None, None)
    if region.output in evaluation.plan.skips:
        on = linear = chance_on(evaluation.clusters, region.output)
    return UnitStatistics(moments.mean, moments.var, flat, on, linear, gradients.square(region.output, moments))


def make_row(
    evaluation: Evaluation,
    gradients: GradientScales,
    region: Region,
    k: float,
    measured: dict[str, dict[str, float]],
    trial: dict[str, dict[str, float]],
) -> ReportRow:
    """The row of a region."""
    units, moments = _unit_statistics(evaluation, gradients, region), moments_of(evaluation, region.output)
    numbers, input_std = layer_numbers(units), std_of(evaluation, evaluation.plan.program.inputs)
    maker = region.output  # the operation whose result it is, or one of whose results
    while maker.target is operator.getitem:
        maker = maker.args[0]
    rule, used_rule = rule_of(maker), evaluation.plan.rules.get(maker)
    single = len(evaluation.plan.random_operands(maker)) == 1
    weighted = region.leaf and used_rule is not None and used_rule.weighted and single
    weight, rank, full_rank = _weight(evaluation, maker) if weighted else ("", None, 0)
    branch, branch_gain = _branch(evaluation, region.output) if region.leaf else (None, None)
    gradient_total = None
    if "gradient" in numbers:
        gradient_total = numbers["gradient"] * _positions(evaluation, moments, region) ** 0.5
    notes = [note for node in region.nodes for note in evaluation.notes.get(node, ())]
    sampled = any(node in evaluation.sampled for node in region.nodes)
    approximate = (region.output, 0) in gradients.approximate
    channels = channel_axis(moments, region.output)
    return ReportRow(
        path=region.path,
        kind=region.kind,
        name=region.name,
        op=op_name(maker),
        moves=rule is not None and (rule.kind == "structural" or rule.copies),
        call=region.call,
        depth=region.depth,
        leaf=region.leaf,
        line=region.output.line,
        extents=tuple(moments.full),
        uniform=tuple(full != stored for full, stored in zip(moments.full, moments.shape, strict=True)),
        mean=spread_of(moments.mean),
        std=spread_of(moments.std),
        numbers=numbers,
        growth=numbers["std"] / input_std if input_std else None,
        gradient_total=gradient_total,
        gain=_gain(evaluation, gradients, region, numbers["std"]),
        status="sampled" if sampled else "approximate" if notes else "exact",
        reasons=tuple(dict.fromkeys(notes)),
        gradient_status="" if units.gradient is None else "approximate" if approximate else "exact",
        gradient_reason="; ".join(dict.fromkeys(gradients.notes[n] for n in region.nodes if n in gradients.notes)),
        ranges=ranges(moments, region.output, k),
        measured=measured,
        node=region.output.name,
        constant=float((over_channels(moments.var, channels, torch.amax) == 0).double().mean()),
        weighted=weighted,
        role=role_of(evaluation, region.output) if region.leaf else "",
        weight=weight,
        rank=rank,
        full_rank=full_rank,
        trial=trial,
        branch=branch,
        branch_gain=branch_gain,
    )


def _weight(evaluation: Evaluation, node: Node) -> tuple[str, float | None, int]:
    """Name, effective rank and largest possible rank of a layer's weight, where it is one tensor."""
    rule, weight = evaluation.plan.rules[node], node.args[1] if len(node.args) > 1 else None
    if not isinstance(weight, Node):
        return "", None, 0
    value = evaluation.env.get(weight)
    if not rule.linear or not isinstance(value, Tensor) or value.ndim < 2 or not value.numel():
        return "", None, 0
    groups = 1
    if rule.convolution is not None:
        args, kwargs = resolve((node.args, node.kwargs), evaluation.value)
        groups = rule.convolution(*args, **kwargs).groups
    return evaluation.plan.program.state.get(weight, ""), *effective_rank(value, groups)


def _branch(evaluation: Evaluation, node: Node) -> tuple[float | None, float | None]:
    """The std of a residual branch over that of the stream that it is added to, and the gain of the layer at its end.

    None for the first if a node is no such sum, and for the second if something else than that layer sets the scale.
    """
    rule, terms = evaluation.plan.rules.get(node), evaluation.plan.random_operands(node)
    if rule is None or rule.signs is None or len(terms) != 2:
        return None, None
    for stream, branch in (terms, terms[::-1]):
        if _follows_from(evaluation, branch, stream):
            before, added = (std_of(evaluation, [term]) for term in (stream, branch))
            return (added / before if before else None), _last_gain(evaluation, branch)
    return None, None


def _last_gain(evaluation: Evaluation, node: Node) -> float | None:
    """The std of a value over that of what a layer reads, if only moves and factors lie between the layer and it."""
    layer = node
    while True:
        rule, operands = evaluation.plan.rules.get(layer), evaluation.plan.random_operands(layer)
        if rule is None or len(operands) != 1:
            return None
        if rule.weighted:
            before, after = (std_of(evaluation, [value]) for value in (operands[0], node))
            return after / before if before else None
        if not (rule.kind == "structural" or rule.copies or rule.noise or rule.product):
            return None
        layer = operands[0]


def _follows_from(evaluation: Evaluation, node: Node, earlier: Node) -> bool:
    """True if a value is computed from an earlier one."""
    waiting, seen = [node], {node}
    while waiting:
        for operand in evaluation.plan.random_operands(waiting.pop()):
            if operand is earlier:
                return True
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return False


def _gain(evaluation: Evaluation, gradients: GradientScales, region: Region, after: float) -> float | None:
    """The root mean square slope of a function of one value; for others, std out over std in."""
    inside, operands = set(region.nodes), dict.fromkeys(operand for node in region.nodes for operand in node.operands)
    read = [operand for operand in operands if operand not in inside and evaluation.plan.random(operand)]
    slope = _function_slope(evaluation, gradients, read[0], region.output) if len(read) == 1 else None
    if slope is not None:
        return float(slope.mean().sqrt())
    before = std_of(evaluation, read)
    return after / before if before else None


def _function_slope(evaluation: Evaluation, gradients: GradientScales, start: Node, end: Node) -> Tensor | None:
    """E[(d end / d start)^2] where one is a function of the other, element by element; None elsewhere."""
    root = evaluation.plan.root.get(end)
    if root is None or root is end or evaluation.plan.root.get(start) is not root:
        return None
    x, shape = first_moments(evaluation, root), evaluation.value(end).shape
    if x is None:
        return None
    wide = Moments(x.mean.expand(shape), x.var.expand(shape))
    slope = slopes(evaluation.clusters, end, start, root, wide, gradients.slopes)
    return None if slope is None else slope[1]


def std_of(evaluation: Evaluation, nodes: Iterable[Node]) -> float:
    """The root of the mean variance of those values that are random."""
    values = (first_moments(evaluation, node) for node in nodes if evaluation.plan.random(node))
    variances = [float(value.var.double().mean()) for value in values if value is not None]
    return (sum(variances) / len(variances)) ** 0.5 if variances else 0.0


def _positions(evaluation: Evaluation, moments: Moments, region: Region) -> float:
    """Elements of one channel in one sample; the batch need not be the first axis inside a model."""
    inputs = [node.info.shape for node in evaluation.plan.program.inputs if len(node.info.shape)]
    batch = inputs[0][0] if inputs else 1
    channels = moments.full[channel_axis(moments, region.output)] if moments.ndim else 1
    return max(1.0, math.prod(moments.full) / (channels * batch))
