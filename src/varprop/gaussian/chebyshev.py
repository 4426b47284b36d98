"""Chebyshev polynomials on intervals, and smooth functions of mean and std at many places from a few of them."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MANY = 1 << 14  # places from which a grid is worth it
SIZES = ((8, 6), (14, 8), (24, 12), (40, 16), (64, 24))  # nodes in mean and std to be tried in turn
CLOSE = 1e-9  # how small the last coefficients must be, of the largest
SMALL = 1e-5  # values that are no larger than this, of the largest, are not to be had from polynomials
SOME = 0.05  # as many of them may be computed one by one
BLOCK = 1 << 13  # places taken at a time
Function = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Range(NamedTuple):
    """The middle and the half width of an interval."""

    middle: float
    half: float

    def nodes(self, count: int, like: Tensor) -> Tensor:
        """Chebyshev nodes of the interval."""
        angle = (torch.arange(count, dtype=like.dtype, device=like.device) + 0.5) * (math.pi / count)
        return self.middle + self.half * torch.cos(angle)

    def polynomials(self, x: Tensor, count: int) -> Tensor:
        """Chebyshev polynomials of x on the interval, along a new last axis."""
        y = (x - self.middle) / self.half
        values = [torch.ones_like(y), y]
        for _ in range(2, count):
            values.append(2.0 * y * values[-1] - values[-2])
        return torch.stack(values[:count], -1)


def transform(count: int, like: Tensor) -> Tensor:
    """The matrix from values at Chebyshev nodes to coefficients."""
    k = torch.arange(count, dtype=like.dtype, device=like.device)
    rows = torch.cos(k[:, None] * (k + 0.5) * (math.pi / count)) * (2.0 / count)
    rows[0] *= 0.5
    return rows


def at_many(function: Function, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor] | None:
    """Two smooth functions of mean and std at every place, float64; None where polynomials do not converge.

    Each is within some 1e-8 of its largest value; the second, which is positive, within 1e-3 of itself. None also where
    the second is often too small for that.

    Args:
        function: Computes both, element by element.
        mean: The means of the places.
        std: Their standard deviations.
    """
    if not bool(torch.isfinite(mean).all() & torch.isfinite(std).all()):
        return None
    intervals = _interval(mean), _interval(std)
    for size in SIZES:
        m, s = torch.meshgrid(*(r.nodes(n, mean) for r, n in zip(intervals, size, strict=True)), indexing="ij")
        values = torch.stack([value.view(size) for value in function(m.flatten(), s.flatten().clamp_min(0.0))])
        coefficients = torch.einsum("am,bs,kms->kab", *(transform(n, mean) for n in size), values)
        sizes = coefficients.abs()
        last = torch.maximum(sizes[:, -2:].amax((1, 2)), sizes[:, :, -2:].amax((1, 2)))
        if bool((last <= CLOSE * sizes.amax((1, 2))).all()):
            break
    else:
        return None
    count, rows, columns = coefficients.shape
    matrix, blocks = coefficients.movedim(0, -1).reshape(rows, columns * count), []
    for m, s in zip(mean.reshape(-1).split(BLOCK), std.reshape(-1).split(BLOCK), strict=True):
        by_mean = (intervals[0].polynomials(m, rows) @ matrix).view(-1, columns, count)
        blocks.append((by_mean * intervals[1].polynomials(s, columns).unsqueeze(-1)).sum(1))
    first, second = torch.cat(blocks).view(*mean.shape, count).unbind(-1)
    small = second < SMALL * second.amax()  # there the error of polynomials shows
    if int(small.sum()) > SOME * small.numel():
        return None
    if bool(small.any()):
        first[small], second[small] = function(mean[small], std[small])
    return first, second


def _interval(x: Tensor) -> Range:
    low, high = float(x.amin()), float(x.amax())
    return Range(0.5 * (low + high), max(0.5 * (high - low), 1e-6 * (1.0 + abs(low))))
