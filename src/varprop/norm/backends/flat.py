"""Small layers that follow each other, weight by weight: a few operations for all of them.

An operation on a small matrix costs the time of its call, so that as many for every layer would cost more than the
layers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..fold.layout import Rows
from .row_block import RowBackward

SMALL = 2**14  # weights of a layer: beyond, looking up what every weight meets costs more than a few calls


@dataclass(frozen=True)
class FlatBlock:
    """The weights of its sites one after the other, as in memory; as `RowBlock`."""

    sites: slice
    sizes: tuple[int, int, int]
    row: Tensor  # that a weight is in
    first: Tensor  # weight of that row
    channel: Tensor  # that a weight meets
    lengths: Tensor  # of the rows
    centred: bool  # whether the mean of every row is subtracted from it
    spreads: bool = False

    def unit(self, weights: Sequence[Tensor], size: Tensor | None) -> Tensor:
        """As `RowBlock.unit`."""
        flat = torch.cat([weight.view(-1) for weight in weights[self.sites]])
        flat = flat if size is None else flat / size.index_select(0, self.row)
        if not self.centred:
            return flat
        return self._minus_row_mean(flat - flat.index_select(0, self.first))  # as `centring` says, and why

    def peak(self, weights: Sequence[Tensor]) -> Tensor:
        """As `RowBlock.peak`."""
        flat = torch.cat([weight.view(-1) for weight in weights[self.sites]])
        return torch.segment_reduce(flat.abs(), "max", lengths=self.lengths, unsafe=True)

    def statistics(self, unit: Tensor, entering: Tensor, first: Tensor, second: Tensor, scratch: Tensor) -> None:
        """As `RowBlock.statistics`."""
        mean, var = entering.index_select(1, self.channel)
        first.copy_(self._row_sums(unit * mean))
        second.copy_(self._row_sums(var.mul_(unit).mul_(unit)))

    def fold(self, unit: Tensor, rate: Tensor, piece: Tensor) -> None:
        """As `RowBlock.fold`."""
        torch.mul(unit, rate.index_select(0, self.row), out=piece)

    def gradient(self, piece: Tensor) -> Tensor:
        """As `RowBlock.gradient`."""
        return piece

    def by_rate(self, unit: Tensor, gradient: Tensor, found: Tensor, scratch: Tensor) -> None:
        """As `RowBlock.by_rate`."""
        found.copy_(self._row_sums(unit * gradient))

    def backward(self, given: RowBackward, piece: Tensor, by_entering: Tensor, scratch: Tensor) -> None:
        """As `RowBlock.backward`."""
        unit = given.unit
        rate, by_mean, by_var = torch.stack([given.rate, given.by_mean, given.by_var]).index_select(1, self.row)
        mean, var = given.entering.index_select(1, self.channel)
        by_square = by_var.mul_(unit)  # half the derivative by a weight, without the variance it meets
        found = torch.mul(given.gradient, rate).addcmul_(by_square, var, value=2.0).addcmul_(by_mean, mean)
        found = found if given.size is None else found.div_(given.size.index_select(0, self.row))
        piece.copy_(self._minus_row_mean(found) if self.centred else found)
        by_entering.zero_()
        by_entering[0].index_add_(0, self.channel, by_mean.mul_(unit))
        by_entering[1].index_add_(0, self.channel, by_square.mul_(unit))

    def _row_sums(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def _minus_row_mean(self, values: Tensor) -> Tensor:
        mean = torch.segment_reduce(values, "mean", lengths=self.lengths, unsafe=True)
        return values - mean.index_select(0, self.row)


def is_flat(rows: Rows, weight: Tensor) -> bool:
    """Whether a site is small and has no taps, and its weights follow each other row by row."""
    plain = weight.is_cpu and weight.is_contiguous() and not rows.transposed
    return plain and rows.taps.numel() == 1 and rows.weights <= SMALL


def flat_block(rows: Sequence[Rows], sites: slice) -> FlatBlock:
    """The block of some sites, all centred or none."""
    chosen = rows[sites]
    lengths = torch.cat([torch.full((r.outputs,), r.channels) for r in chosen])
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    first = (lengths.cumsum(0) - lengths)[row]
    channel = torch.cat([_channels(r) + (r.first_channel - chosen[0].first_channel) for r in chosen])
    sizes = (len(lengths), sum(r.groups * r.channels for r in chosen), len(row))
    return FlatBlock(sites, sizes, row, first, channel, lengths, chosen[0].centred)


def _channels(rows: Rows) -> Tensor:
    """The channel that every weight meets, among those of its site."""
    own = torch.arange(rows.groups * rows.channels).view(rows.groups, 1, rows.channels)
    return own.expand(-1, rows.outputs // rows.groups, -1).reshape(-1)
