"""Gradients back through operations that are linear in each of their random arguments."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..engine.walk import Walk, apply
from ..graph.node import Node, resolve
from ..moments import Moments, trusted
from ..rules.registry import Rule
from .common import CONVOLUTIONS, TRANSPOSED, WINDOWS, Flow, averages_all, positions
from .factors import through_factor, through_term
from .taps import through_taps

aten = torch.ops.aten
Part = tuple[Node, int]  # a node, and which of its results
EQUAL = "an average gives all its positions one gradient, which the layers before it see as independent within a window"

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

RESIZED = {op for op in LINEAR if "upsample" in str(op)}
DROPPED = {aten.dropout, aten.native_dropout}  # a zero here and there, on average all of it
MIXED = {aten.cumsum, aten.col2im, aten.bilinear, aten.einsum, aten.tensordot, aten.addcmul}
PRODUCTS = {
    aten.matmul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, aten.addmm, aten.baddbmm, aten.addmv, aten.outer,
}  # fmt: skip
SUMS = {aten.add, aten.sub, aten.rsub}

AVERAGES = {
    aten.sum, aten.mean, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten.adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d, aten.adaptive_avg_pool3d, aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d,
}  # fmt: skip


def multiplicity(moments: Moments) -> float:
    """How many elements of the model each stored one stands for."""
    return math.prod(moments.full) / max(1, moments.mean.numel())


def packet(node: Node) -> Any:
    """The operation of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def through_linear(walk: Walk, node: Node, rule: Rule, arrived: dict[Part, Flow]) -> tuple[dict[Node, Flow], str]:
    """Back to the operands of a linear operation, and why that is approximate, if it is."""
    if packet(node) in AVERAGES:
        return _through_average(walk, node, rule, next(iter(arrived.values())))
    return _through_others(walk, node, rule, arrived), ""


def _through_others(walk: Walk, node: Node, rule: Rule, arrived: dict[Part, Flow]) -> dict[Node, Flow]:
    """The transpose of the map of variances for what is independent; for the common part as the operation has it."""
    op, first = packet(node), next(iter(arrived.values()))
    totals = {part: flow.total for part, flow in arrived.items()}
    if all(flow.common is None for flow in arrived.values()):
        return {operand: Flow(total) for operand, total in _transposed(walk, node, rule, totals).items()}
    if op in CONVOLUTIONS | TRANSPOSED:
        return _through_convolution(walk, node, rule, first)
    if op in RESIZED:
        return _through_resizing(walk, node, rule, first)
    passed = _transposed(walk, node, rule, totals)
    if op in MIXED or (op in PRODUCTS and len(passed) > 1):
        return {operand: Flow(total) for operand, total in passed.items()}
    if op in DROPPED:
        return {operand: Flow(total, first.common) for operand, total in passed.items()}
    if op is aten.mul:
        return {operand: _through_product(walk, node, operand, first, total) for operand, total in passed.items()}
    common = {part: flow.common for part, flow in arrived.items() if flow.common is not None}
    shared = _transposed(walk, node, rule, common)
    flows = {operand: Flow(total, shared.get(operand)) for operand, total in passed.items()}
    if op in SUMS:
        return {operand: through_term(walk.value(operand), walk.value(node), node, f) for operand, f in flows.items()}
    return flows


def _through_average(walk: Walk, node: Node, rule: Rule, flow: Flow) -> tuple[dict[Node, Flow], str]:
    """All positions that went into one number get one gradient."""
    result = walk.value(node)
    if packet(node) in WINDOWS and flow.common is not None and positions(result, node) > 1:
        return _through_convolution(walk, node, rule, flow), EQUAL
    passed = _transposed(walk, node, rule, {(node, 0): flow.total})
    if all(averages_all(walk.value(operand), operand, result) for operand in passed):
        return {operand: Flow(total, total) for operand, total in passed.items()}, ""
    shared = {} if flow.common is None else _transposed(walk, node, rule, {(node, 0): flow.common})
    return {operand: Flow(total, shared.get(operand)) for operand, total in passed.items()}, EQUAL


def _through_convolution(walk: Walk, node: Node, rule: Rule, flow: Flow) -> dict[Node, Flow]:
    passed = _transposed(walk, node, rule, {(node, 0): flow.own()})
    args = resolve(node.args, lambda operand: walk.value(operand) if walk.plan.random(operand) else walk.env[operand])
    assert flow.common is not None
    together = through_taps(node, args, walk.value(node), flow.common)
    if together is None or len(passed) > 1:
        passed = _transposed(walk, node, rule, {(node, 0): flow.total})
        return {operand: Flow(total) for operand, total in passed.items()}
    return {operand: Flow(total) + together for operand, total in passed.items()}


def _through_resizing(walk: Walk, node: Node, rule: Rule, flow: Flow) -> dict[Node, Flow]:
    """In a picture made larger every place adds to the common part of where it came from."""
    ((operand, own),) = _transposed(walk, node, rule, {(node, 0): flow.own()}).items()
    x, result, common = walk.value(operand), walk.value(node), flow.common
    assert common is not None
    growth = math.prod(result.full) / math.prod(x.full)
    channels = common.sum(list(range(2, common.ndim)), keepdim=True)
    spread = (channels * growth / math.prod(x.shape[2:])).expand(x.shape)
    return {operand: Flow(own + spread, spread)}


def _through_product(walk: Walk, node: Node, operand: Node, flow: Flow, total: Tensor) -> Flow:
    """Back to one of two factors."""
    other = next((argument for argument in node.args[:2] if argument is not operand), operand)
    known = (walk.value(other) if walk.plan.random(other) else walk.env[other]) if isinstance(other, Node) else other
    return through_factor(walk.value(operand), known, walk.value(node), node, flow, total)


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
