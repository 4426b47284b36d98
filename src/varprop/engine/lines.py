"""Affine functions of one variable, by which values of a cluster follow from one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments


@dataclass(frozen=True)
class Line:
    """``slope * base + offset``: a value that is affine in another node of its cluster."""

    slope: Any
    offset: Any

    def __add__(self, other: Any) -> Line:
        if isinstance(other, Line):
            return Line(self.slope + other.slope, self.offset + other.offset)
        return Line(self.slope, self.offset + other)

    def __neg__(self) -> Line:
        return Line(-self.slope, -self.offset)

    def __sub__(self, other: Any) -> Line:
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> Line:
        return (-self).__add__(other)

    def __mul__(self, factor: Any) -> Line | None:
        return None if isinstance(factor, Line) else Line(self.slope * factor, self.offset * factor)

    def __truediv__(self, divisor: Any) -> Line | None:
        return None if isinstance(divisor, Line) else Line(self.slope / divisor, self.offset / divisor)

    __radd__ = __add__
    __rmul__ = __mul__


IDENTITY = Line(1.0, 0.0)


def through_line(x: Moments, line: Line) -> Moments:
    """Exact moments of an affine function."""
    slope, offset = (_as_tensor(v, x.mean) for v in (line.slope, line.offset))
    mean = x.mean * slope + offset
    return Moments(mean, (x.var * slope.square()).expand(mean.shape))


def solve(line: Line, t: Any, mean: Tensor) -> Any:
    """Where the line takes the value t; the mean itself (a harmless break) if it never does."""
    slope, offset = (_as_tensor(v, mean) for v in (line.slope, line.offset))
    flat = slope == 0
    return torch.where(flat, mean, (t - offset) / torch.where(flat, torch.ones_like(slope), slope))


def _as_tensor(value: Any, like: Tensor) -> Tensor:
    return value.to(like.dtype) if isinstance(value, Tensor) else torch.full_like(like, float(value))
