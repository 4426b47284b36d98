"""Convolutions over uniform axes: statistics pooled over all positions, the border included.

Near the border some taps fall on zeros, so mean and variance differ from position to position. Their pooled values
(those of a unit at a random position, which is what batch norm measures) need only the share of positions at which each
set of taps lies inside: E = mean_p E_p, Var = mean_p Var_p + spread_p E_p (mathematics.md, section 8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from ..moments import Moments
from .convolution import Convolution

BLOCK = 2**18  # weights that stay in the cache
Sets = dict[tuple[bool, ...], float]  # which taps take part, and the share of positions at which just these do


def pooled_convolution(x: Moments, given: Convolution) -> Moments:
    """Moments of a convolution with constants at a random position, for an input uniform along every spatial axis."""
    weight, bias, count = given.weight, given.bias, len(given.stride)
    axes = tuple(zip(x.full[-count:], weight.shape[2:], given.stride, given.zeros, given.dilation, strict=True))
    masks, shares = (torch.tensor(values, dtype=weight.dtype, device=weight.device) for values in _patterns(axes))
    # a column for every set of taps inside
    mean, var = (taps @ masks for taps in _moments_per_tap(x, weight, given.groups))
    centre = (mean @ shares)[..., None]
    pooled = ((mean - centre).square() + var) @ shares
    centre = centre[..., 0] if bias is None else centre[..., 0] + bias
    shape = (*x.shape[: x.ndim - count - 1], -1, *[1] * count)
    return Moments(centre.reshape(shape), pooled.reshape(shape))


@lru_cache(maxsize=256)
def _patterns(axes: tuple[tuple[int, int, int, tuple[int, int], int], ...]) -> tuple[list[list[float]], list[float]]:
    """The sets of taps inside the image that occur (taps x sets), and the share of positions of each."""
    found = [_along_axis(*axis) for axis in axes]
    columns = [[float(all(taps)) for taps in product(*sets)] for sets in product(*(list(one) for one in found))]
    shares = [math.prod(part) for part in product(*(list(one.values()) for one in found))]
    return [list(row) for row in zip(*columns, strict=True)], shares


def _along_axis(size: int, taps: int, stride: int, padding: tuple[int, int], dilation: int) -> Sets:
    positions = (size + sum(padding) - dilation * (taps - 1) - 1) // stride + 1
    starts = (position * stride - padding[0] for position in range(positions))
    return _shares(tuple(0 <= start + tap * dilation < size for tap in range(taps)) for start in starts)


@lru_cache(maxsize=256)
def meeting_taps(size: int, taps: int, stride: int, padding: int, output_padding: int, dilation: int) -> Sets:
    """The sets of taps of a transposed convolution that meet at an output position, along one axis.

    Tap k of the input at i lands on i stride + k dilation - padding.
    """
    positions = (size - 1) * stride - 2 * padding + dilation * (taps - 1) + output_padding + 1
    lands = {(i * stride + tap * dilation - padding, tap) for i in range(size) for tap in range(taps)}
    return _shares(tuple((position, tap) in lands for tap in range(taps)) for position in range(positions))


def _shares(sets: Iterable[tuple[bool, ...]]) -> Sets:
    found = Counter(sets)
    return {taps: count / found.total() for taps, count in found.items()}


def _per_tap(weight: Tensor, values: Tensor, groups: int) -> Tensor:
    """sum_i w_oij x_i for every output channel o and tap j, as (batch, o, taps)."""
    rows = weight.flatten(2).unflatten(0, (groups, -1))
    values = values.reshape(-1, groups, 1, 1, weight.shape[1])  # the spatial axes have extent one
    taps: Tensor = (values @ rows).flatten(1, 3)
    return taps


def _moments_per_tap(x: Moments, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """`_per_tap` of the means with w and of the variances with w², block by block of output channels.

    A block is read from memory once and its squares never leave the cache, which halves the time of a large layer.
    """
    blocks = weight.split(max(1, BLOCK // weight[0].numel())) if groups == 1 else [weight]
    parts = [(_per_tap(b, x.mean, groups), _per_tap(b.square(), x.var, groups)) for b in blocks]
    mean, var = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    return mean, var
