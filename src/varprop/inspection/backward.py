"""How large gradients are, layer by layer: variance propagation in reverse over the captured graph.

For an operation with Jacobian J, independent of what it meets, Var y = J^2 Var x and E[g_x^2] = (J^2)^T E[g_y^2]: the
second moment of the gradient goes back through the transpose of the map of variances. So the forward rule of a linear
operation, differentiated by the variance of its argument, is its backward rule; for a product of independent values
the same derivative is E[other factor^2], which is right too.

What is carried is the sum over all positions a stored element stands for (its *energy*), so that uniform axes, strides
and broadcasts need no further thought. The part of it that the positions of a channel share goes along (`common`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.walk import Walk, apply
from ..graph.node import Node, resolve
from ..moments import Moments, trusted
from .attending import NEARLY_UNIFORM, fits, through_attention
from .common import Flow
from .places import first_moments
from .slopes import Known, behind_skips, slopes, squared_slope
from .steps import multiplicity, through_linear

aten = torch.ops.aten
Part = tuple[Node, int]  # a node, and which of its results
ROUTED = "a maximum passes gradients to one place, taken as any place of the channel alike"
AS_LINEAR = "{op} has no backward rule: taken as linear with the same gain of variance"


@dataclass
class Gradients:
    """Second moments of the gradient at every random value, for a gradient of variance 1 at every output.

    Attributes:
        energy: Sum of E[g^2] over the positions each stored element stands for, by node and result.
        notes: Why the step back through a node is approximate.
        tainted: Values whose gradient came through an approximate step.
        slopes: E[f'] and E[f'^2] of elementwise functions, by their node and their source.
    """

    energy: dict[Part, Tensor] = field(default_factory=dict)
    notes: dict[Node, str] = field(default_factory=dict)
    tainted: set[Part] = field(default_factory=set)
    slopes: Known = field(default_factory=dict)

    def square(self, node: Node, index: int, moments: Moments) -> Tensor | None:
        """E[g^2] of every unit; None where no gradient arrives."""
        energy = self.energy.get((node, index))
        return None if energy is None else energy / multiplicity(moments)


@torch.no_grad()
def gradients(walk: Walk) -> Gradients:
    """Follow a gradient of variance 1 at every output back through a finished walk."""
    found, flowing = Gradients(slopes=behind_skips(walk.clusters)), dict[Part, Flow]()
    for out in walk.plan.program.outputs:
        if isinstance(out, Node) and isinstance(moments := walk.env.get(out), Moments):
            ones = torch.ones(moments.shape, dtype=torch.float64, device=moments.device)
            _arrive(found, flowing, (out, 0), Flow(ones * multiplicity(moments)), False)
    for node in reversed(walk.plan.program.nodes):
        if walk.plan.random(node):
            _step_back(walk, node, found, flowing)
    return found


def _arrive(found: Gradients, flowing: dict[Part, Flow], part: Part, flow: Flow, tainted: bool) -> None:
    flowing[part] = flowing[part] + flow if part in flowing else flow
    _record(found, part, flow.total, tainted)


def _record(found: Gradients, part: Part, energy: Tensor, tainted: bool) -> None:
    found.energy[part] = found.energy[part] + energy if part in found.energy else energy
    if tainted:
        found.tainted.add(part)


def _step_back(walk: Walk, node: Node, found: Gradients, flowing: dict[Part, Flow]) -> None:
    arrived = {part: flow for part, flow in flowing.items() if part[0] is node}
    if not arrived:
        return
    tainted = any(part in found.tainted for part in arrived)
    if node.target is operator.getitem:
        _arrive(found, flowing, (node.args[0], node.args[1]), arrived[node, 0], tainted)
    elif walk.plan.inside_cluster(node):
        _through_function(walk, node, arrived[node, 0], tainted, found, flowing)
    else:
        _through_rule(walk, node, arrived, tainted, found, flowing)
    for part in arrived:
        del flowing[part]


def _through_function(
    walk: Walk, end: Node, flow: Flow, tainted: bool, found: Gradients, flowing: dict[Part, Flow]
) -> None:
    """Back to the source of an elementwise function, and to what lies between for the record."""
    root, x = walk.plan.root[end], walk.env[walk.plan.root[end]]
    if not isinstance(x, Moments):
        return
    shape = flow.total.shape
    wide = Moments(x.mean.expand(shape), x.var.expand(shape))
    known = slopes(walk.clusters, end, root, root, wide, found.slopes)
    if known is None:
        _as_linear(walk, end, {(end, 0): flow}, [root], found, flowing)
        return
    average, square = known
    _arrive(found, flowing, (root, 0), flow.scaled(square, average.square()).summed(x.shape), tainted)
    for node in walk.clusters.path(end, root)[:-1]:
        between = squared_slope(walk.clusters, end, node, root, wide, found.slopes)
        value = walk.value(node)
        if between is not None and isinstance(value, Moments):
            _record(found, (node, 0), Flow(between * flow.total).summed(value.shape).total, tainted)


def _through_rule(
    walk: Walk, node: Node, arrived: dict[Part, Flow], tainted: bool, found: Gradients, flowing: dict[Part, Flow]
) -> None:
    operands = [operand for operand in walk.plan.random_operands(node) if isinstance(walk.value(operand), Moments)]
    rule = walk.plan.rules.get(node)
    if not operands or (rule is not None and rule.kind == "source"):
        return
    if rule is not None and rule.order_statistic and rule.per_channel:
        _routed(walk, node, arrived, operands[0], found, flowing)
        return
    if node.packet is aten.scaled_dot_product_attention and fits(walk, node):
        found.notes[node] = NEARLY_UNIFORM
        for operand, flow in through_attention(walk, node, arrived[node, 0]):
            _arrive(found, flowing, (operand, 0), flow, True)
        return
    if rule is None or not rule.transposable:
        _as_linear(walk, node, arrived, operands, found, flowing)
        return
    flows, note = through_linear(walk, node, rule, arrived)
    if note:
        found.notes[node] = note
    for operand, flow in flows.items():
        _arrive(found, flowing, (operand, 0), flow, tainted or bool(note))


def _routed(
    walk: Walk, node: Node, arrived: dict[Part, Flow], operand: Node, found: Gradients, flowing: dict[Part, Flow]
) -> None:
    """Every gradient goes on to one element of its window: the total of a channel stays, its common part thins out.

    max f(x) = f(max x) for a rectifier and the like: its slope is that at the largest, which is on more often.
    """
    found.notes[node], flow = ROUTED, arrived[node, 0]
    start = _before_monotone(walk, operand)
    if start is not operand:
        _record(found, (operand, 0), _spread_out(flow, walk, node, operand).total, True)
        flow = _through_largest(walk, node, operand, start, flow)
    _arrive(found, flowing, (start, 0), _spread_out(flow, walk, node, start), True)


def _before_monotone(walk: Walk, node: Node) -> Node:
    """The node from which another follows by non-decreasing functions of one value."""
    start = node
    while walk.plan.inside_cluster(start) and walk.plan.rules[start].monotone and len(start.operands) == 1:
        start = start.args[0]
    return start


def _through_largest(walk: Walk, node: Node, end: Node, start: Node, flow: Flow) -> Flow:
    args, kwargs = resolve((node.args, node.kwargs), lambda other: walk.value(start) if other is end else None)
    with trusted():
        largest = apply(walk.plan.rules[node], node.target, args, kwargs)
    x = largest if isinstance(largest, Moments) else largest[0]
    known = slopes(walk.clusters, end, start, start, Moments(x.mean, x.var), {})
    return flow if known is None else flow.scaled(known[1], known[0].square())


def _spread_out(flow: Flow, walk: Walk, node: Node, operand: Node) -> Flow:
    """Evenly over the positions of a channel."""
    x, result = first_moments(walk, operand), first_moments(walk, node)
    assert x is not None and result is not None
    kept = 2 if x.ndim > 2 else 1

    def spread(energy: Tensor) -> Tensor:
        total: Tensor = energy.sum(list(range(kept, energy.ndim)), keepdim=True) / math.prod(x.shape[kept:])
        return total.expand(x.shape)

    thinned = math.prod(result.full) / math.prod(x.full)
    return Flow(spread(flow.total), None if flow.common is None else spread(flow.common) * thinned)


def _as_linear(
    walk: Walk,
    node: Node,
    arrived: dict[Part, Flow],
    operands: list[Node],
    found: Gradients,
    flowing: dict[Part, Flow],
) -> None:
    """As if linear: energy grows in reverse by as much as the variance does forward, and stays as common as it was."""
    found.notes[node] = AS_LINEAR.format(op=getattr(node.target, "__name__", None) or str(node.target))
    value = walk.value(node)
    first = value[0] if isinstance(value, list) else value
    after = _total_variance(first) / math.prod(first.full)
    before = sum(_total_variance(walk.value(operand)) for operand in operands)
    energy = sum(float(flow.total.sum()) for flow in arrived.values())
    common = sum(float(flow.common.sum()) for flow in arrived.values() if flow.common is not None)
    square = energy * after / before if before > 0 else 0.0
    for operand in operands:
        x = walk.value(operand)
        full = torch.full(x.shape, square * multiplicity(x), dtype=torch.float64, device=x.device)
        _arrive(found, flowing, (operand, 0), Flow(full, full * (common / energy) if common else None), True)


def _total_variance(x: Moments) -> float:
    return float(x.var.double().sum()) * multiplicity(x)
