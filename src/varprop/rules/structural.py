"""Operations that move, select, repeat or join elements, put them into another tensor, or look them up in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CaptureError
from ..gaussian import maximum
from ..moments import Moments, Tokens, compact
from .axes import Value, extents, lift, write_out
from .registry import RANDOM, constant, rule, structural

aten = torch.ops.aten

structural(
    aten.permute, aten.transpose, aten.t, aten.movedim, aten.swapaxes, aten.flip, aten.fliplr,
    aten.flipud, aten.rot90, aten.repeat, aten.tile, aten.repeat_interleave, aten.narrow, aten.diagonal, aten.unfold,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d,
    aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d, selects=True,
)  # fmt: skip
structural(aten.squeeze, aten.unsqueeze, aten.expand, operation="view", selects=True)
structural(aten.select, operation="select", selects=True)
structural(aten.slice, operation="slice", selects=True)
structural(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split, aten.unbind)
structural(aten.unsafe_split, aten.unsafe_split_with_sizes)
structural(aten.vstack, aten.hstack, aten.dstack, aten.column_stack, aten.broadcast_tensors, aten.meshgrid)
structural(aten.diag, aten.diag_embed, aten.masked_select)
# Sums of independent elements, each counted once, act on mean and variance alike too.
structural(aten.scatter_add, aten.trace, adds=True)
structural(aten.im2col, aten.index, aten.index_select, aten.gather, aten.take, aten.take_along_dim, repeats_elements=0)
structural(aten.tril, aten.triu, aten.slice_scatter, aten.select_scatter, aten.index_copy)
structural(aten.scatter.src, aten.diagonal_scatter, aten.masked_scatter)
structural(aten.index_put, repeats_elements=2, adds=lambda _x, _indices, _values, accumulate=False: accumulate)


def _overwritten(x: Tensor, source: Tensor, *_: Any) -> Tensor:
    """`source` broadcast to x, as by torch's copy, which has no derivative; casts to whole numbers are left out."""
    return source.to(x if x.is_floating_point() else x.device).expand_as(x)


structural(aten.copy, evaluate=_overwritten, overwrites=True, casts=1)
structural(aten.fill.Tensor, evaluate=_overwritten, overwrites=True)

constant(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.fill.Scalar)
constant(aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.sym_size)
constant(aten.isnan, aten.isinf, aten.isfinite)  # a Gaussian value is finite


@structural(aten.view, aten._unsafe_view, aten.reshape, operation="view", selects=True)
def view(x: Moments | Tokens, shape: Sequence[int]) -> Moments | Tokens:
    """The elements in another shape; a view of a uniform axis may need a copy, which only reshape makes.

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


@structural(aten.cat, operation="cat", selects=True)
def cat(tensors: Sequence[Any], dim: int = 0) -> Moments:
    """Joined along one axis; the others stay uniform where every part is."""
    tensors = [t for t in tensors if t.shape != (0,)] or tensors[:1]  # torch skips these too
    ndim = max(t.ndim for t in tensors)
    dim = dim % ndim
    uniform = [axis != dim and all(t.shape[axis] == 1 for t in tensors) for axis in range(ndim)]
    shapes = [[1 if alike else n for alike, n in zip(uniform, extents(t), strict=True)] for t in tensors]
    parts = [lift(t).expand(*shape) for t, shape in zip(tensors, shapes, strict=True)]
    return Moments(torch.cat([part.mean for part in parts], dim), torch.cat([part.var for part in parts], dim))


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
def type_as(x: Moments, like: Any) -> Moments:
    """The dtype follows from the graph."""
    return x


@structural(aten.roll, selects=True)
def roll(x: Moments, shifts: Sequence[int], dims: Sequence[int] = ()) -> Moments:
    """A shift along a uniform axis changes nothing, so no axis needs writing out."""
    if not dims:
        x = x.dense()
    return Moments(aten.roll(x.mean, shifts, dims), aten.roll(x.var, shifts, dims))


def _unsqueeze(t: Any, dim: int) -> Any:
    if isinstance(t, Tensor):
        return t.unsqueeze(dim)
    return Moments(t.mean.unsqueeze(dim), t.var.unsqueeze(dim), [*t.full[:dim], 1, *t.full[dim:]])


_NEVER = -1e30  # below any value a model computes


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
    aten.index_add, handles=lambda x, dim, index, *_, **__: index is not RANDOM, multilinear=True, mixes_positions=True
)
def index_add(x: Value, dim: int, index: Tensor, source: Value, *, alpha: float = 1) -> Moments:
    """Slices added at constant places: variances add too, those of the source times alpha^2."""
    base, add = lift(x).dense(), lift(source).dense()
    mean = torch.index_add(base.mean, dim, index, add.mean, alpha=alpha)
    return Moments(mean, torch.index_add(base.var, dim, index, add.var, alpha=alpha * alpha))


@rule(
    aten.scatter_reduce,
    skews=lambda _x, _dim, _index, _src, reduce, **_: reduce in ("amax", "amin"),
    handles=lambda _x, _dim, index, _src, reduce, **_: (
        index is not RANDOM and reduce in ("sum", "mean", "amax", "amin")
    ),
)
def scatter_reduce(x: Value, dim: int, index: Tensor, src: Value, reduce: str, *, include_self: bool = True) -> Moments:
    """Sums and averages of the elements sent to each place: variances add, and divide by the count squared.

    Or their maxima and minima, see `_largest_at`.
    """
    base, values = lift(x).dense(), lift(src).dense()
    if reduce in ("amax", "amin"):
        return _largest_at(base, dim, index, values, include_self, 1 if reduce == "amax" else -1)

    def total(start: Tensor, sent: Tensor) -> Tensor:
        return torch.scatter_reduce(start, dim, index, sent, "sum", include_self=include_self)

    count = torch.ones_like(base.mean)
    count = total(count, torch.ones_like(values.mean)).clamp_min(1) if reduce == "mean" else count
    return Moments(total(base.mean, values.mean) / count, total(base.var, values.var) / count.square())


def _rows(target: Tensor, start: Tensor, sent: Tensor, fill: float) -> Tensor:
    """A row for every place: its own element, then those sent there, then the fill."""
    order = target.argsort(stable=True)
    count = target.bincount(minlength=len(start))
    turn = torch.arange(len(target), device=target.device) - (count.cumsum(0) - count)[target[order]]
    room = torch.full((len(start), int(count.max())), fill, dtype=start.dtype, device=start.device)
    return torch.cat([start[:, None], room.index_put((target[order], turn), sent[order])], 1)


def _largest_at(base: Moments, dim: int, index: Tensor, values: Moments, include_self: bool, sign: int) -> Moments:
    """Maximum (minimum for sign -1) of the independent Gaussians sent to each place; exact up to quadrature."""
    used = tuple(map(slice, index.shape))
    target = torch.arange(base.mean.numel(), device=index.device).view(base.shape).gather(dim, index).flatten()
    alone = torch.ones_like(base.mean, dtype=torch.bool).flatten().index_fill(0, target, include_self)
    mean = torch.where(alone, sign * base.mean.flatten(), _NEVER)
    mean = _rows(target, mean, sign * values.mean[used].flatten(), _NEVER)
    std = _rows(target, base.std.flatten() * alone, values.std[used].flatten(), 0.0)
    m, v = maximum.independent(mean, std, -1)
    return Moments(sign * m.view(base.shape), v.view(base.shape))


ROWS = 1 << 19  # entries of a table whose squares stay in the cache of a processor, with two copies
SUM, MEAN, MAXIMUM = range(3)  # of a bag, by torch's numbers


@rule(aten.embedding)
def embedding(weight: Value, indices: Value | Tokens, *_: Any, **__: Any) -> Moments:
    """Rows of a table; a random one: E = sum_j p_j E_j, Var = sum_j p_j ((E_j - E)^2 + Var_j) (mathematics.md, 8)."""
    if isinstance(indices, Tensor):
        table = write_out(lift(weight), 0)
        return Moments(F.embedding(indices, table.mean), F.embedding(indices, table.var))
    if isinstance(indices, Moments):  # which some versions of torch let pass for indices when they capture
        raise CaptureError("An embedding reads indices, which have no moments: give vp.Tokens(probabilities) for them.")
    rows = weight.dense().mean if isinstance(weight, Moments) else weight
    chance = indices.probabilities.to(rows)
    if len(chance) != len(rows):
        raise CaptureError(
            f"The tokens have {len(chance)} probabilities, but the embedding that reads them has {len(rows)} rows: "
            f"give one probability for each row."
        )
    mean = chance @ rows
    count = max(1, ROWS // rows.shape[1])
    blocks = zip(chance.split(count), rows.split(count), strict=True)
    var = sum((p @ (block - mean).square() for p, block in blocks), torch.zeros_like(mean))
    if isinstance(weight, Moments):
        var = var + chance @ weight.dense().var
    shape = (*(1 for _ in indices.full or (1,)), mean.shape[-1])
    return Moments(mean.view(shape), var.view(shape))


@rule(aten.embedding_bag)
def embedding_bag(
    weight: Tensor,
    indices: Tokens,
    offsets: Tensor,
    _scale_grad: bool = False,
    mode: int = SUM,
    _sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Moments, None, None, None]:
    """Sum, average or maximum of the rows of a bag, for bags of equally many independent random tokens."""
    bags, size = _equal_bags(weight, indices, offsets, include_last_offset)
    if padding_idx is not None and padding_idx >= 0 and bool(indices.probabilities[padding_idx] > 0):
        raise CaptureError(
            f"Token {padding_idx} is the padding of an embedding bag, which leaves it out: give it probability 0."
        )
    row = embedding(weight, Tokens(indices.probabilities, (bags,)))
    if mode == MAXIMUM:
        return _largest(weight, indices.probabilities.to(weight), size), None, None, None
    if per_sample_weights is not None:
        factors = per_sample_weights.view(bags, size)
    else:
        factors = torch.full((1, size), 1.0 if mode == SUM else 1 / size).to(row.mean)
    first, second = (power.sum(1, keepdim=True) for power in (factors, factors.square()))
    return Moments(row.mean * first, row.var * second), None, None, None


def _equal_bags(weight: Any, indices: Any, offsets: Tensor, include_last_offset: bool) -> tuple[int, int]:
    """How many bags there are, and how many tokens each has."""
    if isinstance(weight, Tensor) and isinstance(indices, Tokens) and indices.full is not None:
        ends = offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([indices.full.numel()])])
        sizes = ends.diff().tolist()
        if len(set(sizes)) == 1:
            return len(sizes), sizes[0]
    raise CaptureError("Bags of an embedding have moments where they are equally many random tokens (vp.Tokens).")


def _largest(rows: Tensor, chance: Tensor, count: int) -> Moments:
    """The largest of so many independent rows of a table, column by column: P(max <= x) = P(row <= x)^count."""
    values, order = rows.sort(0)
    below = chance[order].cumsum(0).clamp(max=1.0).pow(count)
    share = torch.diff(below, dim=0, prepend=torch.zeros_like(below[:1]))
    mean = (share * values).sum(0, keepdim=True)
    return Moments(mean, (share * (values - mean).square()).sum(0, keepdim=True))
