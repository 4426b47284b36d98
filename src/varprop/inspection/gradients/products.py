"""Gradients with a common part back through sums and products in which one operand stands for all positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...moments import Moments
from .flow import Flow, shares_positions


def through_term(term: Moments, result: Moments, node: Node, flow: Flow) -> Flow:
    """The flow to a term of a sum; to one that all positions share their common gradients add up, not their squares."""
    if flow.common is None or not shares_positions(term, result, node):
        return flow
    return Flow(flow.total + (math.prod(result.full) / math.prod(term.full) - 1) * flow.common)


def through_factor(factor: Moments, other: Any, result: Moments, node: Node, flow: Flow, total: Tensor) -> Flow:
    """The flow to a factor, `total` of it as for independent gradients.

    With the other factor x of mean m and variance v, and a common gradient u at n positions: to a factor that all
    positions share goes sum u x_p, of mean square u^2 (n^2 m^2 + n v). To one with a value for every position goes
    u x_p, common as far as the mean of x, or all of it where the positions share x.
    """
    assert flow.common is not None
    first, spread = _moments(other, flow.common)
    whole = first.square() + spread
    if not shares_positions(factor, result, node):
        kept = whole if shares_positions(other, result, node) else first.square()
        return Flow(total, (flow.common * kept).sum_to_size(factor.shape))
    count = math.prod(result.full) / math.prod(factor.full)
    more = flow.common * (count - 1) * first.square()
    return Flow(total + more.sum_to_size(factor.shape))


def _moments(value: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(value, Moments):
        return value.mean.double(), value.var.double()
    mean = torch.as_tensor(value, dtype=torch.float64, device=like.device)
    return mean, torch.zeros_like(mean)
