"""Uniform axes and per-axis arguments, as several families of rules read them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..moments import Moments

Random = Moments | Tensor
Ints = int | Sequence[int]


def write_out(x: Moments, *axes: int) -> Moments:
    """The same statistics with the given uniform axes at their full extent (views of stride zero)."""
    size = [-1] * x.ndim
    for axis in axes:
        size[axis] = x.full[axis]
    return Moments(x.mean.expand(size), x.var.expand(size), x.full)


def uniform_axes(x: Random, count: int) -> list[bool]:
    """For each of the last ``count`` axes, whether one stored value stands for several."""
    full = x.full if isinstance(x, Moments) else x.shape
    return [x.shape[axis] != full[axis] for axis in range(-count, 0)]


def per_axis(value: Ints, count: int) -> list[int]:
    """An operation's integer argument as one number an axis."""
    given = [value] if isinstance(value, int) else list(value)
    return given * count if len(given) == 1 else given
