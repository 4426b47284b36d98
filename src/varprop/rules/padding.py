"""Convolutions with zero padding over uniform axes: statistics pooled over all positions, the border included.

Near the border some taps fall on zeros, so mean and variance differ from position to position. Their pooled values
(those of a unit at a random position, which is what batch norm measures) need only the share of positions at which each
set of taps lies inside: E = mean_p E_p, Var = mean_p Var_p + spread_p E_p (mathematics.md, section 8).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments


@lru_cache(maxsize=256)
def _patterns(
    size: int, taps: int, stride: int, padding: tuple[int, int], dilation: int
) -> tuple[list[list[float]], list[float]]:
    """The sets of taps inside the image that occur along one axis, and the share of positions of each."""
    positions = (size + sum(padding) - dilation * (taps - 1) - 1) // stride + 1
    starts = (position * stride - padding[0] for position in range(positions))
    inside = Counter(tuple(0 <= start + tap * dilation < size for tap in range(taps)) for start in starts)
    return [[float(tap) for tap in pattern] for pattern in inside], [count / positions for count in inside.values()]


def pooled_convolution(
    x: Moments,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Moments:
    """Moments of a convolution at a random position, for an input that is uniform along every spatial axis.

    ``weight`` and ``bias`` are constants; ``padding`` gives the zeros before and behind each axis.
    """
    count = weight.ndim - 2
    mean, var = (_per_tap(w, t, groups) for w, t in ((weight, x.mean), (weight.square(), x.var)))
    shares = torch.ones((), dtype=weight.dtype, device=weight.device)
    for axis in range(count):
        size = x.full[axis - count]
        rows, share = _patterns(size, weight.shape[axis + 2], stride[axis], padding[axis], dilation[axis])
        masks = torch.tensor(rows, dtype=weight.dtype, device=weight.device)
        mean, var = (torch.tensordot(t, masks, dims=([2], [1])) for t in (mean, var))  # the axis of taps moves behind
        shares = shares[..., None] * torch.tensor(share, dtype=weight.dtype, device=weight.device)
    axes = list(range(2, mean.ndim))
    centre = (mean * shares).sum(axes, keepdim=True)
    spread = ((mean - centre).square() + var) * shares
    centre = centre if bias is None else centre + bias.view(1, -1, *[1] * count)
    pooled = spread.sum(axes, keepdim=True)
    return Moments(centre, pooled) if x.ndim > count + 1 else Moments(centre.squeeze(0), pooled.squeeze(0))


def _per_tap(weight: Tensor, values: Tensor, groups: int) -> Tensor:
    """sum_i w_oij x_i for every output channel o and tap j, as (batch, o, *taps)."""
    rows = weight.flatten(2).unflatten(0, (groups, -1))
    values = values.reshape(-1, groups, 1, 1, weight.shape[1])  # the spatial axes have extent one
    taps: Tensor = (values @ rows).flatten(1, 3).unflatten(-1, weight.shape[2:])
    return taps
