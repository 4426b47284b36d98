"""What the passes in torch read besides parameters: indices of lanes, and the weights of layers as stacked matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gaussian.derivatives import DOUBLE, SINGLE
from ..centring import minus_row_mean
from ..layout import EPS, Function, Layout, Rows
from ..memory_format import in_format, memory_format, memory_order

SMALL = 2**14  # weights: matrices below this are stacked with their like
Index = Tensor | slice


@dataclass(frozen=True)
class LaneStep:
    """A step of the moment pass: its function, the lanes it reads, and those it makes."""

    function: Function
    inputs: tuple[Index, ...]
    where: slice


@dataclass(frozen=True)
class MatrixBlock:
    """Sites of one shape as one matrix: (groups, rows, entries), where sites count as groups too.

    Attributes:
        sites: Which.
        shape: Of the matrix.
        taps: E of `layout.Rows`, on the device.
        transposed: Of the layers.
        inner: The channels of a tap lie side by side in memory (channels_last), and so they do in the matrix.
        centred: Whether the mean of every row is subtracted from it.
    """

    sites: slice
    shape: tuple[int, int, int]
    taps: Tensor
    transposed: bool
    inner: bool
    centred: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, entering channels, and weights."""
        groups, rows, entries = self.shape
        return groups * rows, groups * entries // len(self.taps), groups * rows * entries

    def matrix(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights of its sites as one matrix, as they are."""
        own = weights[self.sites]
        return self.as_matrix(own[0] if len(own) == 1 else torch.stack(list(own)))

    def unit_matrix(self, weights: Sequence[Tensor], size: Tensor | None) -> Tensor:
        """The matrix that is folded: its rows divided by their sizes, if any, and centred, if they are to be."""
        matrix = self.matrix(weights)
        matrix = matrix if size is None else matrix / self.column(size)
        return minus_row_mean(matrix, (2,)) if self.centred else matrix

    def as_matrix(self, weight: Tensor) -> Tensor:
        """Weights as they lie in a layer, as its matrix."""
        if self.inner:
            return weight.movedim(1, -1).reshape(self.shape)
        if not self.transposed:
            return weight.reshape(self.shape)
        groups, rows, _ = self.shape
        return weight.reshape(groups, -1, rows, len(self.taps)).transpose(1, 2).reshape(self.shape)

    def in_order(self, piece: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
        """A flat buffer seen as the matrix, if it lies in memory as the matrix does."""
        plain = self.inner or (not self.transposed and weights[self.sites.start].is_contiguous())
        return piece.view(self.shape) if plain else None

    def put(self, matrix: Tensor, piece: Tensor, weights: Sequence[Tensor]) -> None:
        """Write a matrix to a flat buffer in the order of the weight in memory."""
        weight = weights[self.sites.start]
        if self.transposed:
            groups, rows, _ = self.shape
            matrix = matrix.reshape(groups, rows, -1, len(self.taps)).transpose(1, 2)
        in_format(piece, memory_format(weight)).copy_(matrix.reshape(weight.shape))

    def met(self, own: Tensor, columns: slice) -> Tensor:
        """What every entry of a row meets: a channel's number times a tap's, as (groups, entries, columns)."""
        if self.taps.numel() == 1:
            return own.view(self.shape[0], self.shape[2], 1)
        if self.inner:
            met = own.view(self.shape[0], 1, -1, 1) * self.taps[:, columns].unsqueeze(1)
            return met.view(self.shape[0], self.shape[2], -1)
        return (own.view(-1, 1, 1) * self.taps[:, columns]).view(self.shape[0], self.shape[2], -1)

    def per_channel(self, by_met: Tensor, columns: slice) -> Tensor:
        """The derivative by channels from that by what the entries meet."""
        if self.taps.numel() == 1:
            return by_met.view(-1)
        taps = self.taps[:, columns]
        if self.inner:
            return (
                (by_met.reshape(self.shape[0], len(taps), -1, taps.shape[1]) * taps.unsqueeze(1)).sum((1, 3)).view(-1)
            )
        return (by_met.reshape(-1, *taps.shape) * taps).sum((1, 2))

    def of(self, scratch: Tensor) -> Tensor:
        """Part of a buffer as large as the matrix, in its shape."""
        return scratch[: self.shape[0] * self.shape[1] * self.shape[2]].view(self.shape)

    def column(self, own: Tensor) -> Tensor:
        """A vector over its rows in the shape that multiplies the matrix."""
        return own.view(self.shape[0], self.shape[1], 1)


ALL, INSIDE = slice(None), slice(0, 1)  # columns of the taps: all, and the share of positions inside


@dataclass(frozen=True)
class TorchTables:
    """All that the passes read besides parameters, on one device."""

    sources: int
    given: slice
    lanes: Tensor  # mean and variance of all lanes, as two rows; constants are there already
    runs: tuple[LaneStep, ...]
    entering: Index
    offset: Tensor  # to add to what enters: epsilon to the variance
    blocks: tuple[MatrixBlock, ...]
    rows: list[int]  # of every block
    channels: list[int]
    weights: list[int]
    nodes: int


def make_tables(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> TorchTables:
    """Lay everything down for weights as they are; `dtype` is that of the statistics."""
    lanes, device = layout.lanes, weights[0].device
    state = torch.zeros(2, lanes.total, dtype=torch.float64, device=device)
    first = lanes.sources + len(lanes.constant_mean)
    state[:, lanes.sources : first] = torch.stack([lanes.constant_mean, lanes.constant_var])
    runs = [
        LaneStep(
            step.function, tuple(_index(i, device) for i in step.inputs), slice(step.start, step.start + step.count)
        )
        for step in lanes.steps
    ]
    blocks = [_block(layout.rows, group, weights, dtype) for group in alike(layout.rows, weights)]
    rows, channels, sizes = (list(part) for part in zip(*(block.sizes for block in blocks), strict=True))
    return TorchTables(
        lanes.sources,
        slice(first, first + lanes.given),
        state,
        tuple(runs),
        _index(lanes.entering, device),
        torch.tensor([[0.0], [EPS]], dtype=torch.float64, device=device),
        tuple(blocks),
        rows,
        channels,
        sizes,
        DOUBLE if dtype == torch.float64 else SINGLE,
    )


def _index(lanes: Tensor, device: torch.device) -> Index:
    """A slice where the lanes follow each other, which reads and adds without looking up."""
    if len(lanes) and bool((lanes.diff() == 1).all()):
        return slice(int(lanes[0]), int(lanes[-1]) + 1)
    return lanes.to(device)


def alike(rows: Sequence[Rows], weights: Sequence[Tensor]) -> list[slice]:
    """Runs of neighbouring sites of one form, small enough that stacking them saves more than it costs."""
    runs = [slice(0, 1)]
    for place in range(1, len(rows)):
        last, own = (_form(rows[k], weights[k]) for k in (place - 1, place))
        if own is not None and own == last and rows[place].taps is rows[place - 1].taps:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            runs.append(slice(place, place + 1))
    return runs


def _form(rows: Rows, weight: Tensor) -> tuple[int, ...] | None:
    """What sites must share to be stacked; None if this one cannot be. The weight's shape does not tell the groups."""
    if rows.weights > SMALL or rows.transposed or not weight.is_contiguous():
        return None
    return rows.centred, rows.groups, *weight.shape


def _block(rows: Sequence[Rows], sites: slice, weights: Sequence[Tensor], dtype: torch.dtype) -> MatrixBlock:
    first, weight = rows[sites.start], weights[sites.start]
    groups = (sites.stop - sites.start) * first.groups
    shape = (groups, first.outputs // first.groups, first.channels * first.tap_count)
    last = [0, *range(2, weight.ndim), 1]
    inner = not first.transposed and not weight.is_contiguous() and memory_order(weight) == last
    return MatrixBlock(sites, shape, first.taps.to(weight.device, dtype), first.transposed, inner, first.centred)
