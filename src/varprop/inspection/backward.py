"""How large gradients are, layer by layer: variance propagation in reverse over the captured graph.

For an operation with Jacobian J, independent of what it meets, Var y = J^2 Var x and E[g_x^2] = (J^2)^T E[g_y^2]: the
second moment of the gradient goes back through the transpose of the map of variances. So the forward rule of a linear
operation, differentiated by the variance of its argument, is its backward rule; for a product of independent values
the same derivative is E[other factor^2], which is right too.

What is carried is the sum over all positions a stored element stands for (its *energy*), so that uniform axes, strides
and broadcasts need no further thought.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments, trusted
from ..node import Node, resolve
from ..registry import Rule
from ..walk import Walk, apply
from .slopes import squared_slope

aten = torch.ops.aten
Part = tuple[Node, int]  # a node, and which of its results
ROUTED = "a maximum passes gradients to one place, taken as any place of the channel alike"
EQUAL = "an average gives all its positions one gradient, which the layers before it see as independent ones"
AS_LINEAR = "{op} has no backward rule: taken as linear with the same gain of variance"

# Rules whose derivative by the variance is the mean square of the Jacobian: linear maps, dropout, products.
LINEAR = {
    aten.linear, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten.conv_transpose1d, aten.conv_transpose2d,
    aten.conv_transpose3d, aten.matmul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.addmm, aten.baddbmm,
    aten.addmv, aten.outer, aten.tensordot, aten.einsum, aten.bilinear, aten.dropout, aten.feature_dropout,
    aten.native_dropout, aten._native_batch_norm_legit_no_training, aten.batch_norm, aten.avg_pool1d, aten.avg_pool2d,
    aten.avg_pool3d, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d,
    aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.sum, aten.mean, aten.cumsum, aten.upsample_linear1d,
    aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d, aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d, aten.col2im,
    aten.add, aten.sub, aten.rsub, aten.mul, aten.addcmul, aten.where, aten.masked_fill,
}  # fmt: skip

MAXIMA = {
    aten.max_pool1d, aten.max_pool2d, aten.max_pool3d, aten.max_pool1d_with_indices, aten.max_pool2d_with_indices,
    aten.max_pool3d_with_indices, aten.adaptive_max_pool1d, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d,
}  # fmt: skip

AVERAGES = {
    aten.sum, aten.mean, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten.adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d, aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d,
}  # fmt: skip


@dataclass
class Gradients:
    """Second moments of the gradient at every random value, for a gradient of variance 1 at every output.

    Attributes:
        energy: Sum of E[g^2] over the positions each stored element stands for, by node and result.
        notes: Why the step back through a node is approximate.
        tainted: Values whose gradient came through an approximate step.
        slopes: E[f'^2] of elementwise functions, by their node, over their source.
    """

    energy: dict[Part, Tensor] = field(default_factory=dict)
    notes: dict[Node, str] = field(default_factory=dict)
    tainted: set[Part] = field(default_factory=set)
    slopes: dict[Node, Tensor] = field(default_factory=dict)

    def square(self, node: Node, index: int, moments: Moments) -> Tensor | None:
        """E[g^2] of every unit; None where no gradient arrives."""
        energy = self.energy.get((node, index))
        return None if energy is None else energy / multiplicity(moments)


@torch.no_grad()
def gradients(walk: Walk) -> Gradients:
    """Follow a gradient of variance 1 at every output back through a finished walk."""
    found, flowing = Gradients(), dict[Part, Tensor]()
    for out in walk.plan.program.outputs:
        if isinstance(out, Node) and isinstance(moments := walk.env.get(out), Moments):
            ones = torch.ones(moments.shape, dtype=torch.float64, device=moments.device)
            _arrive(found, flowing, (out, 0), ones * multiplicity(moments), False)
    for node in reversed(walk.plan.program.nodes):
        if walk.plan.random(node):
            _step_back(walk, node, found, flowing)
    return found


def multiplicity(moments: Moments) -> float:
    """How many elements of the model each stored one stands for."""
    return math.prod(moments.full) / max(1, moments.mean.numel())


def _arrive(found: Gradients, flowing: dict[Part, Tensor], part: Part, energy: Tensor, tainted: bool) -> None:
    flowing[part] = flowing[part] + energy if part in flowing else energy
    _record(found, part, energy, tainted)


def _record(found: Gradients, part: Part, energy: Tensor, tainted: bool) -> None:
    found.energy[part] = found.energy[part] + energy if part in found.energy else energy
    if tainted:
        found.tainted.add(part)


def _step_back(walk: Walk, node: Node, found: Gradients, flowing: dict[Part, Tensor]) -> None:
    arrived = {part: energy for part, energy in flowing.items() if part[0] is node}
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
    walk: Walk, end: Node, energy: Tensor, tainted: bool, found: Gradients, flowing: dict[Part, Tensor]
) -> None:
    """Back to the source of an elementwise function, and to what lies between for the record."""
    root, x = walk.plan.root[end], walk.env[walk.plan.root[end]]
    if not isinstance(x, Moments):
        return
    wide = Moments(x.mean.expand(energy.shape), x.var.expand(energy.shape))
    slope = squared_slope(walk.clusters, end, root, root, wide)
    if slope is None:
        _as_linear(walk, end, {(end, 0): energy}, [root], found, flowing)
        return
    found.slopes[end] = slope
    _arrive(found, flowing, (root, 0), _summed(slope * energy, x.shape), tainted)
    for node in walk.clusters._path(end, root)[:-1]:
        between = squared_slope(walk.clusters, end, node, root, wide)
        value = walk.value(node)
        if between is not None and isinstance(value, Moments):
            _record(found, (node, 0), _summed(between * energy, value.shape), tainted)


def _summed(energy: Tensor, shape: torch.Size) -> Tensor:
    return energy.sum_to_size(shape) if energy.shape != shape else energy


def _through_rule(
    walk: Walk, node: Node, arrived: dict[Part, Tensor], tainted: bool, found: Gradients, flowing: dict[Part, Tensor]
) -> None:
    operands = [operand for operand in walk.plan.random_operands(node) if isinstance(walk.value(operand), Moments)]
    rule = walk.plan.rules.get(node)
    if not operands or (rule is not None and rule.kind == "source"):
        return
    if _packet(node) in MAXIMA:
        _routed(walk, node, arrived, operands[0], found, flowing)
        return
    if rule is None or not (rule.kind == "structural" or _packet(node) in LINEAR):
        _as_linear(walk, node, arrived, operands, found, flowing)
        return
    if _packet(node) in AVERAGES:
        found.notes[node] = EQUAL
    for operand, energy in _transposed(walk, node, rule, arrived).items():
        _arrive(found, flowing, (operand, 0), energy, tainted or node in found.notes)


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def _routed(
    walk: Walk, node: Node, arrived: dict[Part, Tensor], operand: Node, found: Gradients, flowing: dict[Part, Tensor]
) -> None:
    """Every gradient goes on to one element of its window: the total of a channel stays."""
    found.notes[node], x, energy = ROUTED, walk.value(operand), arrived[node, 0]
    kept = 2 if x.ndim > 2 else 1
    total = energy.sum(list(range(kept, energy.ndim)), keepdim=True) / math.prod(x.shape[kept:])
    _arrive(found, flowing, (operand, 0), total.expand(x.shape), True)


def _transposed(walk: Walk, node: Node, rule: Rule, arrived: dict[Part, Tensor]) -> dict[Node, Tensor]:
    """The transpose of the map of variances, applied to the energies."""
    leaves: dict[Node, Tensor] = {}

    def value(operand: Node) -> Any:
        known = walk.value(operand) if walk.plan.random(operand) else walk.env[operand]
        if not isinstance(known, Moments):
            return known
        leaves.setdefault(operand, known.var.detach().clone().requires_grad_())
        return Moments(known.mean.detach(), leaves[operand], known.full)

    with torch.enable_grad(), trusted():
        result = apply(rule, node.target, resolve(node.args, value), resolve(node.kwargs, value))
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        pairs = [(results[index].var, energy) for (_, index), energy in arrived.items()]
        largest = max(float(energy.max()) for _, energy in pairs) or 1.0
        # in units of the largest, since single precision would overflow where gradients explode
        weighed = [(var * (energy / largest).to(var.dtype)).sum() for var, energy in pairs]
        total = torch.stack(weighed).sum()
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True) if total.requires_grad else ()
    return {
        operand: slope.double() * largest
        for operand, slope in zip(leaves, found or [None] * len(leaves), strict=True)
        if slope is not None
    }


def _as_linear(
    walk: Walk,
    node: Node,
    arrived: dict[Part, Tensor],
    operands: list[Node],
    found: Gradients,
    flowing: dict[Part, Tensor],
) -> None:
    """As if linear: total energy grows in reverse by as much as the total variance does forward."""
    found.notes[node] = AS_LINEAR.format(op=getattr(node.target, "__name__", None) or str(node.target))
    value = walk.value(node)
    first = value[0] if isinstance(value, list) else value
    after = _total_variance(first) / math.prod(first.full)
    before = sum(_total_variance(walk.value(operand)) for operand in operands)
    energy = sum(float(part.sum()) for part in arrived.values())
    square = energy * after / before if before > 0 else 0.0
    for operand in operands:
        x = walk.value(operand)
        full = torch.full(x.shape, square * multiplicity(x), dtype=torch.float64, device=x.device)
        _arrive(found, flowing, (operand, 0), full, True)


def _total_variance(x: Moments) -> float:
    return float(x.var.double().sum()) * multiplicity(x)
