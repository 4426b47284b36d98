"""Elements put, added or averaged at constant places of another tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moments import Moments
from ..registry import RANDOM, rule, structural
from .arithmetic import moments

aten = torch.ops.aten
Value = Tensor | Moments

structural(aten.scatter.src, aten.diagonal_scatter, aten.masked_scatter)
structural(aten.unsafe_split, aten.unsafe_split_with_sizes)


def _dense(x: Value) -> Moments:
    return x.dense() if isinstance(x, Moments) else moments(x, 0.0)


def _with_value(op: Any) -> None:
    """Register an operation whose last argument is a number: it has no variance."""

    @rule(op, handles=lambda x, dim, index, value: index is not RANDOM)
    def put(x: Moments, dim: int, index: Tensor, value: float) -> Moments:
        """The number at the places named, with no variance there."""
        x = x.dense()
        return Moments(op(x.mean, dim, index, value), op(x.var, dim, index, 0.0))


_with_value(aten.scatter.value)
_with_value(aten.index_fill.int_Scalar)


@rule(aten.index_add, handles=lambda x, dim, index, *_, **__: index is not RANDOM)
def index_add(x: Value, dim: int, index: Tensor, source: Value, *, alpha: float = 1) -> Moments:
    """Slices added at constant places: variances add too, those of the source times alpha^2."""
    base, add = _dense(x), _dense(source)
    mean = torch.index_add(base.mean, dim, index, add.mean, alpha=alpha)
    return Moments(mean, torch.index_add(base.var, dim, index, add.var, alpha=alpha * alpha))


def _sums(x: Any, dim: int, index: Any, src: Any, reduce: str, **_: Any) -> bool:
    return index is not RANDOM and reduce in ("sum", "mean")


@rule(aten.scatter_reduce, handles=_sums)
def scatter_reduce(x: Value, dim: int, index: Tensor, src: Value, reduce: str, *, include_self: bool = True) -> Moments:
    """Sums and averages of the elements sent to each place: variances add, and divide by the count squared."""
    base, part = _dense(x), _dense(src)

    def total(start: Tensor, sent: Tensor) -> Tensor:
        return torch.scatter_reduce(start, dim, index, sent, "sum", include_self=include_self)

    count = torch.ones_like(base.mean)
    count = total(count, torch.ones_like(part.mean)).clamp_min(1) if reduce == "mean" else count
    return Moments(total(base.mean, part.mean) / count, total(base.var, part.var) / count.square())
