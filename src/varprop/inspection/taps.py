"""Common gradients back through convolutions and windows of averages, where the taps that meet at a place add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node
from ..moments import Moments
from .common import TRANSPOSED, WINDOWS, Flow

GROUPS, DILATION = 6, 7  # arguments of a transposed convolution; of the others the dilation is the fifth


def through_taps(node: Node, args: Sequence[Any], result: Moments, common: Tensor) -> Flow | None:
    """Back through a convolution or a window of an average; None if its weights are random."""
    x, packet = args[0], node.packet
    if packet in WINDOWS:
        return _through_windows(args, result, common)
    weight = args[1]
    if not isinstance(weight, Tensor) or x.ndim != weight.ndim:
        return None
    groups = _argument(args, GROUPS, 1)
    reach = [_reach(packet in TRANSPOSED, *axis) for axis in _axes(packet in TRANSPOSED, args, x, result)]
    taps = weight.detach().double().flatten(2)
    squares, sums = _meeting(taps, reach)
    if packet in TRANSPOSED:  # (in, out / groups): to (out / groups, in) group by group, as the others have it
        squares, sums = (_turned(part, groups) for part in (squares, sums))
    return _spread(x, result, common, squares, sums, groups)


def _axes(transposed: bool, args: Sequence[Any], x: Moments, result: Moments) -> list[tuple[int, ...]]:
    """For every axis: extents of argument and result, taps, stride, zeros before, dilation."""
    count = args[1].ndim - 2
    dilation = _numbers(_argument(args, DILATION if transposed else 5, 1), count)
    if _argument(args, 4, 0) == "same":
        before = [gap * (size - 1) // 2 for gap, size in zip(dilation, args[1].shape[2:], strict=True)]
    else:
        before = _numbers(0 if isinstance(_argument(args, 4, 0), str) else _argument(args, 4, 0), count)
    stride, taps = _numbers(_argument(args, 3, 1), count), args[1].shape[2:]
    return list(zip(x.full[-count:], result.full[-count:], taps, stride, before, dilation, strict=True))


def _argument(args: Sequence[Any], index: int, default: Any) -> Any:
    return args[index] if len(args) > index else default


def _numbers(value: Any, count: int) -> list[int]:
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given


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


def _turned(pairs: Tensor, groups: int) -> Tensor:
    turned: Tensor = pairs.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return turned


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


def _through_windows(args: Sequence[Any], result: Moments, common: Tensor) -> Flow:
    """A window of an average is a convolution of each channel with equal taps."""
    x, count = args[0], args[0].ndim - 2
    kernel = _numbers(args[1], count)
    stride = _numbers(_argument(args, 2, None) or kernel, count)
    before = _numbers(_argument(args, 3, 0), count)
    axes = zip(x.full[-count:], result.full[-count:], kernel, stride, before, [1] * count, strict=True)
    taps = torch.full((x.full[1], 1, math.prod(kernel)), 1 / math.prod(kernel), dtype=torch.float64)
    squares, sums = _meeting(taps.to(common.device), [_reach(False, *axis) for axis in axes])
    wide = common.expand(common.shape[0], x.full[1], *common.shape[2:])
    return _spread(x, result, wide, squares, sums, x.full[1])
