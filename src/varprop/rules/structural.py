"""Operations that move, select, repeat or join elements: mean and variance alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments, Tokens, compact
from .axes import extents, lift, write_out
from .registry import constant, structural

aten = torch.ops.aten

structural(aten.permute, aten.transpose, aten.t, aten.movedim, aten.swapaxes, selects=True)
structural(aten.unsqueeze, aten.squeeze, aten.flip, aten.fliplr, aten.flipud, aten.rot90, selects=True)
structural(aten.expand, aten.repeat, aten.tile, aten.repeat_interleave, selects=True)
structural(aten.select, aten.slice, aten.narrow, aten.diagonal, aten.unfold, selects=True)
structural(aten.im2col, repeats_elements=0)
structural(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unbind)
structural(aten.vstack, aten.hstack, aten.dstack, aten.column_stack, aten.broadcast_tensors, aten.meshgrid)
structural(aten.diag, aten.diag_embed, aten.masked_select)
# Sums of independent elements, each counted once, act on mean and variance alike too.
structural(aten.scatter_add, aten.trace, adds=True)
structural(aten.index, aten.index_select, aten.gather, aten.take, aten.take_along_dim, repeats_elements=0)
structural(aten.tril, aten.triu)
structural(aten.slice_scatter, aten.select_scatter, aten.index_copy)
structural(aten.index_put, repeats_elements=2, adds=lambda _x, _indices, _values, accumulate=False: accumulate)


def _overwritten(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    """As torch's own copy, which has no derivative; what a cast to whole numbers would cut off stays, and is marked."""
    return source.to(x if x.is_floating_point() else x.device).expand_as(x)


structural(aten.copy, aten.fill.Tensor, evaluate=_overwritten, overwrites=True)
structural(aten.pixel_shuffle, aten.pixel_unshuffle, selects=True)
structural(aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d, selects=True)
structural(aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d, selects=True)

constant(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.fill.Scalar)
constant(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.sym_size)
constant(aten.isnan, aten.isinf, aten.isfinite)  # a Gaussian value is finite


@structural(aten.view, aten._unsafe_view, aten.reshape, selects=True)
def view(x: Moments | Tokens, shape: Sequence[int]) -> Moments | Tokens:
    """The same elements in other extents; a view of a uniform axis may need a copy, which only reshape makes.

    What is stored is put in order first, lest that copy write uniform axes out.
    """
    if isinstance(x, Tokens):
        return Tokens(x.probabilities, torch.empty(x.full or (), device="meta").reshape(shape).shape)
    x = Moments(x.mean.contiguous(), x.var.contiguous(), x.full).dense()
    return compact(torch.reshape(x.mean, shape), torch.reshape(x.var, shape))


@structural(aten.channel_shuffle, selects=True)
def channel_shuffle(x: Moments, groups: int) -> Moments:
    """Channels in another order; positions stay uniform."""
    x = write_out(x, 1)
    return Moments(aten.channel_shuffle(x.mean, groups), aten.channel_shuffle(x.var, groups))


@structural(aten.cat, selects=True)
def cat(tensors: Sequence[Any], dim: int = 0) -> Moments:
    """Joined along one axis; the others stay uniform where every part is."""
    tensors = [t for t in tensors if not (isinstance(t, Tensor) and t.shape == (0,))]  # torch skips these too
    ndim = max(t.ndim for t in tensors)
    dim = dim % ndim
    kept = [axis != dim and all(t.shape[axis] == 1 for t in tensors) for axis in range(ndim)]
    means, variances = zip(*(_write_out(t, kept) for t in tensors), strict=True)
    return Moments(torch.cat(means, dim), torch.cat(variances, dim))


@structural(aten.stack, selects=True)
def stack(tensors: Sequence[Any], dim: int = 0) -> Moments:
    """Joined along a new axis."""
    ndim = tensors[0].ndim + 1
    return cat([_unsqueeze(t, dim % ndim) for t in tensors], dim % ndim)


@structural(aten.constant_pad_nd)
def constant_pad(x: Moments, pad: Sequence[int], value: float = 0.0) -> Moments:
    """The border is constant: it has the value as mean and no variance."""
    x = x.dense()
    return Moments(aten.constant_pad_nd(x.mean, pad, value), aten.constant_pad_nd(x.var, pad, 0.0))


@structural(aten.pad, repeats_elements=0)
def pad(x: Moments, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Moments:
    """A constant border, or one that repeats elements."""
    if mode == "constant":
        return constant_pad(x, pad, value or 0.0)
    x = x.dense()
    return Moments(aten.pad(x.mean, pad, mode), aten.pad(x.var, pad, mode))


@structural(aten.type_as)
def type_as(x: Moments, other: Any) -> Moments:
    """The dtype follows from the graph."""
    return x


@structural(aten.roll, selects=True)
def roll(x: Moments, shifts: Sequence[int], dims: Sequence[int] = ()) -> Moments:
    """A shift along a uniform axis changes nothing, so no axis needs writing out."""
    if not dims:
        x = x.dense()
    return Moments(aten.roll(x.mean, shifts, dims), aten.roll(x.var, shifts, dims))


def _write_out(t: Any, kept: list[bool]) -> tuple[Tensor, Tensor]:
    shape = [1 if keep else extent for keep, extent in zip(kept, extents(t), strict=True)]
    t = lift(t)
    return t.mean.expand(shape), t.var.expand(shape)


def _unsqueeze(t: Any, dim: int) -> Any:
    if isinstance(t, Tensor):
        return t.unsqueeze(dim)
    return Moments(t.mean.unsqueeze(dim), t.var.unsqueeze(dim), [*t.full[:dim], 1, *t.full[dim:]])
