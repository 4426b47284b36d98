"""Common gradients back through convolutions and windows of averages, where the taps that meet at a place add up."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor

from ...moments import Moments
from ...rules.linear import Convolution
from .flow import Flow


def through_taps(kernel: Convolution, x: Moments, result: Moments, common: Tensor) -> Flow | None:
    """Back through a convolution or a window of an average; None if its weights are random."""
    weight = kernel.weight
    if not isinstance(weight, Tensor) or x.ndim != weight.ndim:
        return None
    extents = zip(x.full[2:], result.full[2:], weight.shape[2:], strict=True)
    before = [first for first, _ in kernel.zeros]
    axes = zip(extents, kernel.stride, before, kernel.dilation, strict=True)
    reach = [_reach(kernel.transposed, *sizes, *settings) for sizes, *settings in axes]
    squares, sums = _meeting(weight.detach().double().flatten(2), reach)
    if kernel.transposed:  # (in, out / groups): to (out / groups, in) group by group, as the others have it
        pairs = (part.unflatten(0, (kernel.groups, -1)) for part in (squares, sums))
        squares, sums = (part.transpose(1, 2).flatten(0, 1) for part in pairs)
    channels = result.full[1]
    wide = common.expand(-1, channels, *common.shape[2:]) * (common.shape[1] / channels)
    return _spread(x, result, wide, squares, sums, kernel.groups)


def _reach(transposed: bool, size: int, out: int, taps: int, stride: int, before: int, dilation: int) -> Tensor:
    """Which places of the argument (columns) get a gradient through which tap (rows), along one axis."""
    place, tap = torch.arange(size)[None], torch.arange(taps)[:, None] * dilation
    if transposed:
        target = place * stride + tap - before
        return ((target >= 0) & (target < out)).double()
    target = place + before - tap
    return ((target % stride == 0) & (target >= 0) & (target < out * stride)).double()


def _meeting(taps: Tensor, reach: list[Tensor]) -> tuple[Tensor, Tensor]:
    """For every pair of channels: sum over places of (sum of the taps that meet there)^2, and of that sum itself."""
    pairs = reduce(torch.kron, [one @ one.T for one in reach]).to(taps.device)
    counts = reduce(torch.kron, [one.sum(1) for one in reach]).to(taps.device)
    return ((taps @ pairs) * taps).sum(-1), taps @ counts


def _spread(x: Moments, result: Moments, common: Tensor, squares: Tensor, sums: Tensor, groups: int) -> Flow:
    """The energies by channel through the pairs (out, in / groups), spread evenly over the argument's positions."""
    places, before = math.prod(result.full[2:]), math.prod(x.full[2:])
    energy = common.flatten(2).sum(2).unflatten(1, (groups, -1)).unsqueeze(2) / places
    total, shared = (
        (energy @ part.unflatten(0, (groups, -1))).flatten(1) for part in (squares, sums.square() / before)
    )
    return Flow(*(_placed(part, x) for part in (total, shared)))


def _placed(energy: Tensor, x: Moments) -> Tensor:
    """Energies by channel as those of the stored elements."""
    energy = energy if x.shape[1] > 1 else energy.sum(1, keepdim=True)
    spread = energy.view(*energy.shape, *[1] * (x.ndim - 2)) / math.prod(x.shape[2:])
    return spread.expand(energy.shape[0], *x.shape[1:])
