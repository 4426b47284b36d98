"""Gradients back through operations that are linear in each of their random arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...engine.evaluation import Evaluation as Walk
from ...engine.evaluation import apply
from ...graph.node import Node, resolve
from ...moments import Moments, trusted
from ...rules.registry import Rule
from .convolution import through_taps
from .flow import Flow, NodeResult, averages_all, positions, shares_positions

EQUAL = "an average gives all its positions one gradient, which the layers before it see as independent within a window"


def through_linear(walk: Walk, node: Node, rule: Rule, arrived: dict[NodeResult, Flow]) -> tuple[dict[Node, Flow], str]:
    """Back to the operands of a linear operation, and why that is approximate, if it is."""
    if rule.averages:
        return _through_average(walk, node, rule, next(iter(arrived.values())))
    return _through_others(walk, node, rule, arrived), ""


def _through_others(walk: Walk, node: Node, rule: Rule, arrived: dict[NodeResult, Flow]) -> dict[Node, Flow]:
    """The transpose of the map of variances for what is independent; for the common part as the operation has it."""
    first = next(iter(arrived.values()))
    totals = {part: flow.total for part, flow in arrived.items()}
    if all(flow.common is None for flow in arrived.values()):
        return {operand: Flow(total) for operand, total in _transposed(walk, node, rule, totals).items()}
    if rule.convolution is not None:
        return _through_convolution(walk, node, rule, first)
    if rule.resizes:
        return _through_resizing(walk, node, rule, first)
    passed = _transposed(walk, node, rule, totals)
    if rule.product and rule.kind == "elementwise":
        return {operand: _through_factor(walk, node, operand, first, total) for operand, total in passed.items()}
    if rule.mixes_positions or (rule.product and len(passed) > 1):
        return {operand: Flow(total) for operand, total in passed.items()}
    if rule.noise:
        return {operand: _through_noise(walk, node, rule, operand, first, total) for operand, total in passed.items()}
    common = {part: flow.common for part, flow in arrived.items() if flow.common is not None}
    shared = _transposed(walk, node, rule, common)
    flows = {operand: Flow(total, shared.get(operand)) for operand, total in passed.items()}
    if rule.signs is not None:
        return {operand: _through_term(walk, node, operand, flow) for operand, flow in flows.items()}
    return flows


def _through_average(walk: Walk, node: Node, rule: Rule, flow: Flow) -> tuple[dict[Node, Flow], str]:
    """All positions that went into one number get one gradient."""
    result = walk.value(node)
    if rule.convolution is not None and flow.common is not None and positions(result, node) > 1:
        return _through_convolution(walk, node, rule, flow), EQUAL
    passed = _transposed(walk, node, rule, {(node, 0): flow.total})
    if all(averages_all(walk.value(operand), operand, result) for operand in passed):
        return {operand: Flow(total, total) for operand, total in passed.items()}, ""
    shared = {} if flow.common is None else _transposed(walk, node, rule, {(node, 0): flow.common})
    return {operand: Flow(total, shared.get(operand)) for operand, total in passed.items()}, EQUAL


def _through_convolution(walk: Walk, node: Node, rule: Rule, flow: Flow) -> dict[Node, Flow]:
    assert flow.common is not None and rule.convolution is not None
    passed = _transposed(walk, node, rule, {(node, 0): flow.own()})
    args, kwargs = _arguments(walk, node, walk.value)
    together = through_taps(rule.convolution(*args, **kwargs), args[0], walk.value(node), flow.common)
    if together is None or len(passed) > 1:
        passed = _transposed(walk, node, rule, {(node, 0): flow.total})
        return {operand: Flow(total) for operand, total in passed.items()}
    return {operand: Flow(total) + together for operand, total in passed.items()}


def _through_noise(walk: Walk, node: Node, rule: Rule, operand: Node, flow: Flow, total: Tensor) -> Flow:
    """What all positions share meets the average of the noise, by which the mean is multiplied too."""
    x = walk.value(operand)
    mean = x.mean.detach().clone().requires_grad_()
    given = Moments(mean, x.var.detach(), x.full)
    args, kwargs = _arguments(walk, node, lambda other: given if other is operand else walk.value(other))
    with torch.enable_grad(), trusted():
        result = apply(rule, node.target, args, kwargs)
        first = result[0] if isinstance(result, (list, tuple)) else result
        (slope,) = torch.autograd.grad(first.mean.sum(), mean)
    return Flow(total, None if flow.common is None else flow.common * slope.double().square())


def _arguments(walk: Walk, node: Node, random: Callable[[Node], Any]) -> tuple[Any, Any]:
    """Arguments of a node, random ones as `random` has them."""

    def value(operand: Node) -> Any:
        return random(operand) if walk.plan.random(operand) else walk.env[operand]

    return resolve(node.args, value), resolve(node.kwargs, value)


def _through_resizing(walk: Walk, node: Node, rule: Rule, flow: Flow) -> dict[Node, Flow]:
    """In a picture made larger every place adds to the common part of where it came from."""
    ((operand, own),) = _transposed(walk, node, rule, {(node, 0): flow.own()}).items()
    x, result, common = walk.value(operand), walk.value(node), flow.common
    assert common is not None
    growth = math.prod(result.full) / math.prod(x.full)
    channels = common.sum(list(range(2, common.ndim)), keepdim=True)
    spread = (channels * growth / math.prod(x.shape[2:])).expand(x.shape)
    return {operand: Flow(own + spread, spread)}


def _through_term(walk: Walk, node: Node, operand: Node, flow: Flow) -> Flow:
    """Back to a term of a sum; to one that all positions share their common gradients add up, not their squares."""
    term, result = walk.value(operand), walk.value(node)
    if flow.common is None or not shares_positions(term, result, node):
        return flow
    return Flow(flow.total + (math.prod(result.full) / math.prod(term.full) - 1) * flow.common)


def _through_factor(walk: Walk, node: Node, operand: Node, flow: Flow, total: Tensor) -> Flow:
    """Back to one of two factors, `total` as for independent gradients.

    With the other factor x of mean m and variance v, and a common gradient u at n positions: to a factor that all
    positions share goes sum u x_p, of mean square u^2 (n^2 m^2 + n v). To one with a value for every position goes
    u x_p, common as far as the mean of x, or all of it where the positions share x.
    """
    assert flow.common is not None
    factor, result = walk.value(operand), walk.value(node)
    other = next((argument for argument in node.args[:2] if argument is not operand), operand)
    x = (walk.value(other) if walk.plan.random(other) else walk.env[other]) if isinstance(other, Node) else other
    mean = x.mean if isinstance(x, Moments) else x
    square = torch.as_tensor(mean, dtype=torch.float64, device=flow.common.device).square()
    if not shares_positions(factor, result, node):
        kept = square + x.var.double() if shares_positions(x, result, node) else square
        return Flow(total, (flow.common * kept).sum_to_size(factor.shape))
    count = math.prod(result.full) / math.prod(factor.full)
    return Flow(total + (flow.common * (count - 1) * square).sum_to_size(factor.shape))


def _transposed(walk: Walk, node: Node, rule: Rule, arrived: dict[NodeResult, Tensor]) -> dict[Node, Tensor]:
    """The transpose of the map of variances, applied to the energies."""
    leaves: dict[Node, Tensor] = {}

    def leaf(operand: Node) -> Any:
        known = walk.value(operand)
        if not isinstance(known, Moments):
            return known
        leaves.setdefault(operand, known.var.detach().clone().requires_grad_())
        return Moments(known.mean.detach(), leaves[operand], known.full)

    with torch.enable_grad(), trusted():
        args, kwargs = _arguments(walk, node, leaf)
        result = apply(rule, node.target, args, kwargs)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        pairs = [(results[index].var, energy) for (_, index), energy in arrived.items()]
        largest = max((float(energy.max()) for _, energy in pairs if energy.numel()), default=0.0) or 1.0
        # in units of the largest, since single precision would overflow where gradients explode
        weighed = [(var * (energy / largest).to(var.dtype)).sum() for var, energy in pairs]
        total = torch.stack(weighed).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()
    return {
        operand: slope.double() * largest
        for operand, slope in zip(leaves, found or [None] * len(leaves), strict=True)
        if slope is not None
    }
