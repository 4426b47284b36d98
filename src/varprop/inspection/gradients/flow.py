"""The part of a gradient that all positions of a channel share.

The mean over n positions hands each of them the same gradient. What lies before it then sums equal numbers, not
independent ones: a convolution with taps w turns a common gradient u into u sum w, of square u^2 (sum w)^2, where
independent gradients would give u^2 sum w^2. So beside the whole energy of a gradient its common part is followed: the
positions times E[(average over positions)^2]. The rest counts as independent from place to place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...moments import Moments
from ..channels import channel_axis

NodeResult = tuple[Node, int]  # a node, and which of its results


@dataclass(frozen=True)
class Flow:
    """Energy of a gradient: all of it, and the part that the positions of a channel share (None: nothing)."""

    total: Tensor
    common: Tensor | None = None

    def __add__(self, other: Flow) -> Flow:
        if self.common is None or other.common is None:
            return Flow(self.total + other.total, other.common if self.common is None else self.common)
        return Flow(self.total + other.total, self.common + other.common)

    def scaled(self, total: Tensor, common: Tensor) -> Flow:
        """Each part times its own factor."""
        return Flow(self.total * total, None if self.common is None else self.common * common)

    def summed(self, shape: torch.Size) -> Flow:
        """Summed to a shape it was broadcast from."""
        return Flow(self.total.sum_to_size(shape), None if self.common is None else self.common.sum_to_size(shape))

    def own(self) -> Tensor:
        """What is independent from place to place."""
        return self.total if self.common is None else (self.total - self.common).clamp_min(0)


def multiplicity(moments: Moments) -> float:
    """How many elements of the model each stored one stands for."""
    return math.prod(moments.full) / max(1, moments.mean.numel())


def positions(moments: Moments, node: Node) -> int:
    """Elements of a channel in one sample."""
    kept = {0, channel_axis(moments, node)}
    return math.prod(extent for axis, extent in enumerate(moments.full) if axis not in kept)


def averages_all(x: Moments, node: Node, result: Moments) -> bool:
    """Whether a sum or mean leaves one number of all positions of a channel."""
    batch = x.full[0] if x.ndim > 1 else 1
    return math.prod(result.full) == batch * x.full[channel_axis(x, node)]


def shares_positions(operand: Any, result: Moments, node: Node) -> bool:
    """Whether an operand is one number for all positions of a channel, of which there are several."""
    if not isinstance(operand, Moments) or operand.ndim != result.ndim:
        return False
    axis = channel_axis(result, node)
    spread = {a for a in range(result.ndim) if operand.full[a] == 1 and result.full[a] > 1}
    return bool(spread) and axis not in spread and 0 not in spread
