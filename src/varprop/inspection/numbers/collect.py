"""One row a module call or operation: everything that is known of its result."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from ...engine.evaluation import Evaluation as Walk
from ...engine.plan import rule_of
from ...graph.node import Node, resolve
from ...moments import Moments
from ..channels import channel_axis, over_channels, ranges
from ..gradients.backward import GradientScales
from ..gradients.slopes import chance_on, slopes
from ..places import Place, bend_at, first_moments, moments_of, op_name
from ..roles import role_of
from .row import ReportRow
from .statistics import UnitStatistics, effective_rank, numbers, spread_of


def statistics(walk: Walk, gradients: GradientScales, place: Place) -> UnitStatistics:
    """What propagation says of a place's units."""
    moments = moments_of(walk, place.output)
    gradient = gradients.square(place.output, moments)
    flat = on = linear = None
    if bent := bend_at(walk, place):
        bend, argument = bent[0], moments_of(walk, bent[1])
        flat = bend.probability_flat(argument) if bend.saturates else None
        on, linear = bend.probabilities_above(argument) if bend.rectifier is not None else (None, None)
    if place.output in walk.plan.skips:
        on = linear = chance_on(walk.clusters, place.output)
    return UnitStatistics(moments.mean, moments.var, flat, on, linear, gradient)


def make_row(
    walk: Walk,
    gradients: GradientScales,
    place: Place,
    k: float,
    measured: dict[str, dict[str, float]],
    trial: dict[str, dict[str, float]],
) -> ReportRow:
    """Everything about one place."""
    found, moments = statistics(walk, gradients, place), moments_of(walk, place.output)
    layer, before = numbers(found), _input_std(walk, walk.plan.program.inputs)
    maker = _maker(place.output)
    rule = rule_of(maker)
    notes = [note for node in place.nodes for note in walk.notes.get(node, ())]
    sampled = any(node in walk.sampled for node in place.nodes)
    approximate = (place.output, 0) in gradients.approximate
    weighted = place.leaf and _has_weights(walk, maker)
    weight, rank, full_rank = _weight(walk, maker) if weighted else ("", None, 0)
    return ReportRow(
        path=place.path,
        kind=place.kind,
        name=place.name,
        op=op_name(maker),
        moves=rule is not None and (rule.kind == "structural" or rule.copies),
        call=place.call,
        depth=place.depth,
        leaf=place.leaf,
        line=place.output.line,
        extents=tuple(moments.full),
        uniform=tuple(full != own for full, own in zip(moments.full, moments.shape, strict=True)),
        mean=spread_of(moments.mean),
        std=spread_of(moments.std),
        numbers=layer,
        growth=layer["std"] / before if before else None,
        gradient_total=layer["gradient"] * _positions(walk, moments, place) ** 0.5 if "gradient" in layer else None,
        gain=_gain(walk, gradients, place, layer["std"]),
        status="sampled" if sampled else "approximate" if notes else "exact",
        reasons=tuple(dict.fromkeys(notes)),
        gradient_status="" if found.gradient is None else "approximate" if approximate else "exact",
        gradient_reason="; ".join(dict.fromkeys(gradients.notes[n] for n in place.nodes if n in gradients.notes)),
        ranges=ranges(moments, place.output, k),
        measured=measured,
        node=place.output.name,
        constant=_constant_share(moments, place.output),
        weighted=weighted,
        role=role_of(walk, place.output) if place.leaf else "",
        weight=weight,
        rank=rank,
        full_rank=full_rank,
        trial=trial,
        branch=_branch(walk, place.output) if place.leaf else None,
    )


def _has_weights(walk: Walk, node: Node) -> bool:
    rule = walk.plan.rules.get(node)
    return rule is not None and rule.weighted and len(walk.plan.random_operands(node)) == 1


def _weight(walk: Walk, node: Node) -> tuple[str, float | None, int]:
    """Name, effective rank and largest possible rank of a layer's weight, where it is one tensor."""
    rule, weight = walk.plan.rules[node], node.args[1] if len(node.args) > 1 else None
    if not isinstance(weight, Node):
        return "", None, 0
    value = walk.env.get(weight)
    if not rule.linear or not isinstance(value, Tensor) or value.ndim < 2 or not value.numel():
        return "", None, 0
    groups = 1
    if rule.convolution is not None:
        args, kwargs = resolve((node.args, node.kwargs), walk.value)
        groups = rule.convolution(*args, **kwargs).groups
    return walk.plan.program.state.get(weight, ""), *effective_rank(value, groups)


def _branch(walk: Walk, node: Node) -> float | None:
    """Of a sum of a value and of something made of it, the std of the latter over that of the former."""
    rule, terms = walk.plan.rules.get(node), walk.plan.random_operands(node)
    if rule is None or rule.signs is None or len(terms) != 2:
        return None
    for stream, branch in (terms, terms[::-1]):
        if _follows_from(walk, branch, stream):
            before, added = (_input_std(walk, [term]) for term in (stream, branch))
            return added / before if before else None
    return None


def _follows_from(walk: Walk, node: Node, earlier: Node) -> bool:
    """Whether a value is computed from an earlier one."""
    waiting, seen = [node], {node}
    while waiting:
        for operand in walk.plan.random_operands(waiting.pop()):
            if operand is earlier:
                return True
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return False


def _constant_share(moments: Moments, node: Node) -> float:
    most = over_channels(moments.var, channel_axis(moments, node), torch.amax)
    return float((most == 0).double().mean())


def _maker(node: Node) -> Node:
    """The operation whose result, or one of whose results, a node is."""
    return _maker(node.args[0]) if node.target is operator.getitem else node


def _gain(walk: Walk, gradients: GradientScales, place: Place, after: float) -> float | None:
    own = set(place.nodes)
    read = dict.fromkeys(o for node in place.nodes for o in node.operands if o not in own and walk.plan.random(o))
    if len(read) == 1 and (slope := _function_slope(walk, gradients, next(iter(read)), place.output)) is not None:
        return float(slope.mean().sqrt())
    before = _input_std(walk, read)
    return after / before if before else None


def _function_slope(walk: Walk, gradients: GradientScales, start: Node, end: Node) -> Tensor | None:
    """E[(d end / d start)^2] where one is a function of the other, element by element."""
    root = walk.plan.root.get(end)
    if root is None or root is end or walk.plan.root.get(start) is not root:
        return None
    x, shape = first_moments(walk, root), walk.value(end).shape
    if x is None:
        return None
    wide = Moments(x.mean.expand(shape), x.var.expand(shape))
    known = slopes(walk.clusters, end, start, root, wide, gradients.slopes)
    return None if known is None else known[1]


def _input_std(walk: Walk, nodes: Iterable[Node]) -> float:
    values = (first_moments(walk, node) for node in nodes if walk.plan.random(node))
    variances = [float(value.var.double().mean()) for value in values if value is not None]
    return (sum(variances) / len(variances)) ** 0.5 if variances else 0.0


def _positions(walk: Walk, moments: Moments, place: Place) -> float:
    """Elements of one channel in one sample; the batch need not be the first axis inside a model."""
    inputs = [node.form.shape for node in walk.plan.program.inputs if len(node.form.shape)]
    batch = inputs[0][0] if inputs else 1
    channels = moments.full[channel_axis(moments, place.output)] if moments.ndim else 1
    return max(1.0, math.prod(moments.full) / (channels * batch))
