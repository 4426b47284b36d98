"""Elements put, added or averaged at constant places of another tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..gaussian import maximum
from ..moments import Moments
from .axes import Value, lift
from .registry import RANDOM, rule, structural

aten = torch.ops.aten
_NEVER = -1e30  # below any value a model computes

structural(aten.scatter.src, aten.diagonal_scatter, aten.masked_scatter)
structural(aten.unsafe_split, aten.unsafe_split_with_sizes)


def _with_value(op: Any) -> None:
    """Register an operation whose last argument is a number: it has no variance."""

    @rule(op, handles=lambda x, dim, index, value: index is not RANDOM, multilinear=True)
    def put(x: Moments, dim: int, index: Tensor, value: float) -> Moments:
        """The number at the places named, with no variance there."""
        x = x.dense()
        return Moments(op(x.mean, dim, index, value), op(x.var, dim, index, 0.0))


_with_value(aten.scatter.value)
_with_value(aten.index_fill.int_Scalar)


@rule(
    aten.index_add,
    handles=lambda x, dim, index, *_, **__: index is not RANDOM,
    multilinear=True,
    mixes_positions=True,
)
def index_add(x: Value, dim: int, index: Tensor, source: Value, *, alpha: float = 1) -> Moments:
    """Slices added at constant places: variances add too, those of the source times alpha^2."""
    base, add = lift(x).dense(), lift(source).dense()
    mean = torch.index_add(base.mean, dim, index, add.mean, alpha=alpha)
    return Moments(mean, torch.index_add(base.var, dim, index, add.var, alpha=alpha * alpha))


@rule(
    aten.scatter_reduce,
    handles=lambda _x, _dim, index, _src, reduce, **_: (
        index is not RANDOM and reduce in ("sum", "mean", "amax", "amin")
    ),
)
def scatter_reduce(x: Value, dim: int, index: Tensor, src: Value, reduce: str, *, include_self: bool = True) -> Moments:
    """Sums and averages of the elements sent to each place: variances add, and divide by the count squared.

    Or their maxima and minima, see `_largest_at`.
    """
    base, part = lift(x).dense(), lift(src).dense()
    if reduce in ("amax", "amin"):
        return _largest_at(base, dim, index, part, include_self, 1 if reduce == "amax" else -1)

    def total(start: Tensor, sent: Tensor) -> Tensor:
        return torch.scatter_reduce(start, dim, index, sent, "sum", include_self=include_self)

    count = torch.ones_like(base.mean)
    count = total(count, torch.ones_like(part.mean)).clamp_min(1) if reduce == "mean" else count
    return Moments(total(base.mean, part.mean) / count, total(base.var, part.var) / count.square())


def _rows(place: Tensor, own: Tensor, sent: Tensor, fill: float) -> Tensor:
    """A row for every place: its own element, then those sent there, then the fill."""
    order = place.argsort(stable=True)
    count = place.bincount(minlength=len(own))
    turn = torch.arange(len(place), device=place.device) - (count.cumsum(0) - count)[place[order]]
    rest = torch.full((len(own), int(count.max())), fill, dtype=own.dtype, device=own.device)
    return torch.cat([own[:, None], rest.index_put((place[order], turn), sent[order])], 1)


def _largest_at(base: Moments, dim: int, index: Tensor, part: Moments, include_self: bool, sign: int) -> Moments:
    """Maximum (minimum for sign -1) of the independent Gaussians sent to each place; exact up to quadrature."""
    used = tuple(map(slice, index.shape))
    place = torch.arange(base.mean.numel(), device=index.device).view(base.shape).gather(dim, index).flatten()
    alone = torch.ones_like(base.mean, dtype=torch.bool).flatten().index_fill(0, place, include_self)
    mean = torch.where(alone, sign * base.mean.flatten(), _NEVER)
    mean = _rows(place, mean, sign * part.mean[used].flatten(), _NEVER)
    std = _rows(place, base.std.flatten() * alone, part.std[used].flatten(), 0.0)
    m, v = maximum.independent(mean, std, -1)
    return Moments(sign * m.view(base.shape), v.view(base.shape))
