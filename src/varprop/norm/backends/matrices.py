"""What the passes in torch read besides parameters: indices of lanes, and the weights of a layer as a matrix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...gaussian.derivatives import DOUBLE, SINGLE
from ..fold.centring import minus_row_mean
from ..fold.layout import EPS, Function, Layout, Rows
from ..fold.memory_format import MemoryFormat, in_format, memory_format, memory_order
from .flat import flat_block, is_flat
from .row_block import RowBackward, RowBlock

Index = Tensor | slice


@dataclass(frozen=True)
class LaneStep:
    """A step of the moment pass: its function, the lanes it reads, and those it makes."""

    function: Function
    inputs: tuple[Index, ...]
    where: slice


@dataclass(frozen=True)
class MatrixBlock:
    """One site as a matrix (groups, rows, entries); as `RowBlock`.

    Attributes:
        place: Of the site.
        shape: Of the matrix.
        taps: E of `layout.Rows`, on the device.
        transposed: Of the layer.
        inner: The channels of a tap lie side by side in memory (channels_last), and so they do in the matrix.
        centred: Whether the mean of every row is subtracted from it.
        form: The memory format of the weight.
    """

    place: int
    shape: tuple[int, int, int]
    taps: Tensor
    transposed: bool
    inner: bool
    centred: bool
    form: MemoryFormat

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, entering channels, and weights."""
        groups, rows, entries = self.shape
        return groups * rows, groups * entries // len(self.taps), groups * rows * entries

    @property
    def spreads(self) -> bool:
        """As `RowBlock.spreads`."""
        return self.taps.shape[1] > 1

    def unit(self, weights: Sequence[Tensor], size: Tensor | None) -> Tensor:
        """As `RowBlock.unit`."""
        matrix = self._as_matrix(weights[self.place])
        matrix = matrix if size is None else matrix / self._column(size)
        return minus_row_mean(matrix, (2,)) if self.centred else matrix

    def peak(self, weights: Sequence[Tensor]) -> Tensor:
        """As `RowBlock.peak`."""
        matrix = self._as_matrix(weights[self.place])
        peak: Tensor = torch.linalg.vector_norm(matrix, torch.inf, -1)
        return peak.view(-1)

    def statistics(
        self, unit: Tensor, entering: Tensor, first: Tensor, second: Tensor, scratch: Tensor
    ) -> Tensor | None:
        """As `RowBlock.statistics`."""
        mean, var = entering
        square = torch.mul(unit, unit, out=self._of(scratch))
        torch.bmm(square, self._met(var, INSIDE), out=self._column(second))
        if not self.spreads:
            torch.bmm(unit, self._met(mean, ALL), out=self._column(first))
            return None
        levers = torch.bmm(unit, self._met(mean, ALL))
        first.copy_(levers[..., 0].reshape(-1))
        second += levers[..., 1:].square().sum(-1).view(-1)
        return levers

    def fold(self, unit: Tensor, rate: Tensor, piece: Tensor) -> None:
        """As `RowBlock.fold`."""
        target = self._in_order(piece)
        if target is None:
            self._put(unit * self._column(rate), piece)
        else:
            torch.mul(unit, self._column(rate), out=target)

    def gradient(self, piece: Tensor) -> Tensor:
        """As `RowBlock.gradient`."""
        found = self._in_order(piece)
        return self._as_matrix(in_format(piece, self.form)) if found is None else found

    def by_rate(self, unit: Tensor, gradient: Tensor, found: Tensor, scratch: Tensor) -> None:
        """As `RowBlock.by_rate`."""
        product = torch.mul(gradient, unit, out=self._of(scratch))
        torch.sum(product, -1, keepdim=True, out=self._column(found))

    def backward(self, given: RowBackward, piece: Tensor, by_entering: Tensor, scratch: Tensor) -> None:
        """As `RowBlock.backward`."""
        unit, (mean, var) = given.unit, given.entering
        by_lever, by_var = self._column(given.by_mean), self._column(given.by_var)
        if given.levers is not None:
            spread = given.levers.view(*self.shape[:2], -1)[..., 1:]
            by_lever = torch.cat([by_lever, 2.0 * by_var * spread], -1)
        target = self._in_order(piece)
        by_weight = torch.mul(given.gradient, self._column(given.rate), out=target)
        outer = torch.bmm(by_var, self._met(var, INSIDE).mT, out=self._of(scratch))
        by_weight.addcmul_(unit, outer, value=2.0)
        by_weight.baddbmm_(by_lever, self._met(mean, ALL).mT)
        if given.size is not None:
            by_weight.div_(self._column(given.size))
        if self.centred:
            by_weight.sub_(by_weight.mean(-1, keepdim=True))
        if target is None:
            self._put(by_weight, piece)
        by_entering[0] = self._per_channel(torch.bmm(unit.mT, by_lever), ALL)
        square = torch.mul(unit, unit, out=self._of(scratch))
        by_entering[1] = self._per_channel(torch.bmm(square.mT, by_var), INSIDE)

    def _as_matrix(self, weight: Tensor) -> Tensor:
        """Weights as they lie in a layer, as its matrix."""
        if self.inner:
            return weight.movedim(1, -1).reshape(self.shape)
        if not self.transposed:
            return weight.reshape(self.shape)
        groups, rows, _ = self.shape
        return weight.reshape(groups, -1, rows, len(self.taps)).transpose(1, 2).reshape(self.shape)

    def _in_order(self, piece: Tensor) -> Tensor | None:
        """A flat buffer seen as the matrix, if it lies in memory as the matrix does."""
        _, permuted = self.form
        return piece.view(self.shape) if self.inner or not (self.transposed or permuted) else None

    def _put(self, matrix: Tensor, piece: Tensor) -> None:
        """Write a matrix to a flat buffer in the order of the weight in memory."""
        if self.transposed:
            groups, rows, _ = self.shape
            matrix = matrix.reshape(groups, rows, -1, len(self.taps)).transpose(1, 2)
        weight = in_format(piece, self.form)
        weight.copy_(matrix.reshape(weight.shape))

    def _met(self, own: Tensor, columns: slice) -> Tensor:
        """What every entry of a row meets: a channel's number times a tap's, as (groups, entries, columns)."""
        if self.taps.numel() == 1:
            return own.view(self.shape[0], self.shape[2], 1)
        if self.inner:
            met = own.view(self.shape[0], 1, -1, 1) * self.taps[:, columns].unsqueeze(1)
            return met.view(self.shape[0], self.shape[2], -1)
        return (own.view(-1, 1, 1) * self.taps[:, columns]).view(self.shape[0], self.shape[2], -1)

    def _per_channel(self, by_met: Tensor, columns: slice) -> Tensor:
        """The derivative by channels from that by what the entries meet."""
        if self.taps.numel() == 1:
            return by_met.view(-1)
        taps = self.taps[:, columns]
        if self.inner:
            return (
                (by_met.reshape(self.shape[0], len(taps), -1, taps.shape[1]) * taps.unsqueeze(1)).sum((1, 3)).view(-1)
            )
        return (by_met.reshape(-1, *taps.shape) * taps).sum((1, 2))

    def _of(self, scratch: Tensor) -> Tensor:
        """Part of a buffer as large as the matrix, in its shape."""
        return scratch[: self.shape[0] * self.shape[1] * self.shape[2]].view(self.shape)

    def _column(self, own: Tensor) -> Tensor:
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
    blocks: tuple[RowBlock, ...]
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
    blocks = _blocks(layout.rows, weights, dtype)
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


def _blocks(rows: Sequence[Rows], weights: Sequence[Tensor], dtype: torch.dtype) -> list[RowBlock]:
    """Small sites that follow each other in one block, every other site in one of its own."""
    found: list[RowBlock] = []
    kinds = [(is_flat(own, weight), own.centred) for own, weight in zip(rows, weights, strict=True)]
    for (flat, _), group in itertools.groupby(range(len(rows)), kinds.__getitem__):
        places = list(group)
        if flat:
            found.append(flat_block(rows, slice(places[0], places[-1] + 1)))
        else:
            found += [_matrix_block(rows[place], place, weights[place], dtype) for place in places]
    return found


def _matrix_block(rows: Rows, place: int, weight: Tensor, dtype: torch.dtype) -> MatrixBlock:
    shape = (rows.groups, rows.outputs // rows.groups, rows.channels * rows.tap_count)
    last = [0, *range(2, weight.ndim), 1]
    inner = not rows.transposed and not weight.is_contiguous() and memory_order(weight) == last
    taps = rows.taps.to(weight.device, dtype)
    return MatrixBlock(place, shape, taps, rows.transposed, inner, rows.centred, memory_format(weight))
