"""Uniform axes and per-axis arguments, as several families of rules read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..moments import Moments

Value = Moments | Tensor  # random, or a constant
Ints = int | Sequence[int]


def lift(x: Value) -> Moments:
    """A constant as moments without variance."""
    return x if isinstance(x, Moments) else Moments(x, torch.zeros_like(x))


def dense(x: Value) -> Value:
    """A value written out at the extents the model sees."""
    return x.dense() if isinstance(x, Moments) else x


def extents(x: Value) -> torch.Size:
    """The extents the model sees."""
    return x.full if isinstance(x, Moments) else x.shape


def moved(x: Value, move: Callable[[Tensor], Tensor]) -> Value:
    """A value whose elements are moved, selected, or summed as independent ones: mean and variance alike."""
    return move(x) if isinstance(x, Tensor) else Moments(move(x.mean), move(x.var))


def negative(x: Moments) -> Moments:
    """The moments of -x."""
    return Moments(-x.mean, x.var, x.full)


def write_out(x: Moments, *axes: int) -> Moments:
    """Moments with some uniform axes written out at their full extent (as views of stride zero)."""
    size = [-1] * x.ndim
    for axis in axes:
        size[axis] = x.full[axis]
    return Moments(x.mean.expand(size), x.var.expand(size), x.full)


def mixture(outcomes: Sequence[tuple[float, Moments]]) -> Moments:
    """Moments of one of several values, each with its chance p: E = sum p E_p, Var = sum p (Var_p + (E_p - E)^2)."""
    none = torch.zeros_like(outcomes[0][1].mean)
    mean = sum((share * x.mean for share, x in outcomes), none)
    return Moments(mean, sum((share * (x.var + (x.mean - mean).square()) for share, x in outcomes), none))


def at_random_place(x: Moments, axes: list[int]) -> tuple[Tensor, Tensor]:
    """Moments of the value at a random place along the axes: E = mean E_p, Var = mean Var_p + spread E_p."""
    mean = x.mean.mean(axes, keepdim=True)
    return mean, (x.var + (x.mean - mean).square()).mean(axes, keepdim=True)


def uniform_axes(x: Value, count: int) -> list[bool]:
    """For each of the last ``count`` axes, whether one stored value stands for several."""
    return [x.shape[axis] != extents(x)[axis] for axis in range(-count, 0)]


def per_axis(value: Ints, count: int) -> list[int]:
    """An operation's integer argument as one number an axis."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers
