"""Gradients back through attention, as far as its weights are those of a network that has not learned to look.

With y_i = sum_j A_ij v_j, A = softmax(s q k' + m), r = sum_j A_ij^2 (which the forward rule knows as Var y / Var v):
to v_j goes sum_i A_ij g_i, of energy r times that of g, or all of it for the part that all i share, since sum_i A_ij is
1 on average. To q_i goes s sum_j A_ij (g_i v_j) (k_j - mean k), to k_j goes s sum_i A_ij g_i (v_j - y_i) q_i, and to
a mask m_ij that is random goes A_ij g_i (v_j - y_i); the mean taken off leaves 1 - r of the variance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...engine.evaluation import Evaluation as Walk
from ...graph.node import Node
from ...moments import Moments
from .flow import Flow

NEARLY_UNIFORM = "gradients of attention are those of weights that do not depend on the values"


def fits(walk: Walk, node: Node) -> bool:
    """Whether queries, keys and values are random tensors with the same heads."""
    operands = node.args[:3]
    if len(operands) < 3 or not all(isinstance(o, Node) and walk.plan.random(o) for o in operands):
        return False
    q, k, v = (walk.value(operand) for operand in operands)
    return isinstance(q, Moments) and q.full[:-2] == k.full[:-2] == v.full[:-2]


def through_attention(walk: Walk, node: Node, flow: Flow) -> list[tuple[Node, Flow]]:
    """The flows to queries, keys and values, and to a random mask."""
    q, k, v = (walk.value(operand) for operand in node.args[:3])
    kept = min(1.0, _average(walk.value(node).var) / max(_average(v.var), 1e-300))
    ratio = q.full[-2] / k.full[-2]
    to_scores = _average(v.var) * (1 - kept)
    given = node.kwargs.get("scale")
    scale = (1 / math.sqrt(q.full[-1]) if given is None else given) ** 2 * v.full[-1] * to_scores
    means, spread = _average(q.mean.square()), _average(q.var)
    common = torch.zeros_like(flow.total) if flow.common is None else flow.common
    own = flow.own()
    to_v = Flow(_over_tokens(kept * own + ratio * common, v), _over_tokens(ratio * common, v))
    to_q = scale * kept * _average(k.var)
    to_k = scale * (kept * (means + spread) * own + (ratio * means + kept * spread) * common)
    flows = [Flow(_even(to_q * flow.total, q), _even(to_q * common, q)), Flow(_even(to_k, k)), to_v]
    if flow.common is None:
        flows = [Flow(one.total) for one in flows]
    mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    to_mask = [(mask, Flow(_even(to_scores * kept * flow.total, walk.value(mask))))] if walk.plan.random(mask) else []
    return [*zip(node.args[:3], flows, strict=True), *to_mask]


def _average(values: Tensor) -> float:
    return float(values.double().mean())


def _over_tokens(energy: Tensor, x: Moments) -> Tensor:
    """The energies of a channel, spread evenly over the tokens.

    As stored elements: an axis stored once holds the sum, one that the energy has once an equal share.
    """
    energy = energy.sum(-2, keepdim=True) / x.shape[-2]
    for axis, extent in enumerate(x.shape):
        if extent == 1:
            energy = energy.sum(axis, keepdim=True)
        elif energy.shape[axis] == 1 and axis != x.ndim - 2:
            energy = energy / extent
    return energy.expand(x.shape)


def _even(energy: Tensor, x: Moments) -> Tensor:
    """All energy, spread evenly over the elements."""
    return (energy.sum() / x.mean.numel()).expand(x.shape)
