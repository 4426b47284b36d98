"""The two passes that fold a whole network, in plain torch: moments of all lanes, then all weight rows.

Each has its backward derived by hand (mathematics.md, section 10), so that nothing but parameters and a few vectors
is kept. What a pass needs to know is laid down in `TorchTables`, for in a small network the looking up would cost more
than the arithmetic. The Triton kernels compute the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...gaussian.normal import Pair
from ..fold.layout import Layout
from .derivatives import with_derivatives
from .matrices import Index, TorchTables, make_tables
from .row_block import RowBackward

LEAST, LARGEST = 1e-30, 1e36  # variances between which no sum of squares has left the range of floats


def moments_forward(
    tables: TorchTables, shift_scale: Tensor, given: Pair | None, backward: bool
) -> tuple[Tensor, list[Tensor]]:
    """Mean and variance (with epsilon) of what enters every site, as two rows, and what the backward needs."""
    state = tables.lanes.clone()
    sources = state[:, : tables.sources]
    sources.copy_(shift_scale)
    sources[1].square_()
    if given is not None:
        state[:, tables.given] = torch.stack(given)
    saved: list[Tensor] = []
    for run in tables.runs:
        arguments = [(own[0], own[1]) for own in (state[:, index] for index in run.inputs)]
        if backward or run.function.kernel is not None:
            state[:, run.where], derivatives = with_derivatives(run.function, arguments, tables.nodes)
            saved += derivatives
        else:
            state[:, run.where] = torch.stack(run.function.moments(*arguments))
    return (state[:, tables.entering] + tables.offset).to(shift_scale.dtype), saved


def moments_backward(
    tables: TorchTables, saved: Sequence[Tensor], scale: Tensor, by_entering: Tensor
) -> tuple[Tensor, Pair]:
    """Derivatives by the shifts and scales of the sources, as two rows, and by the moments of the given lanes."""
    by_lane = torch.zeros_like(tables.lanes)
    _add_at(by_lane, tables.entering, by_entering)
    kept = iter(reversed(saved))
    for run in reversed(tables.runs):
        by_result = by_lane[:, run.where].unsqueeze(1)
        for index in reversed(run.inputs):
            _add_at(by_lane, index, (by_result * next(kept)).sum(0))
    by_source = by_lane[:, : tables.sources].to(scale.dtype, copy=True).contiguous()
    by_source[1] *= 2.0 * scale
    mean, var = by_lane[:, tables.given]
    return by_source, (mean, var)


def _add_at(total: Tensor, index: Index, part: Tensor) -> None:
    if isinstance(index, slice):
        total[:, index] += part
    else:
        total.index_add_(1, index, part.to(total.dtype))


def rows_forward(
    tables: TorchTables, weights: Sequence[Tensor], shift_scale: Tensor, entering: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Folded weights and biases, flat, and what the backward needs.

    Where the square of a weight leaves the range of floats, all rows are divided by their sizes first.
    """
    shift, scale = shift_scale
    size = torch.ones_like(shift)
    units = _units(tables, weights, [None] * len(tables.blocks))
    rows, spread = _row_statistics(tables, units, entering)
    if not rows.is_cpu or not _in_range(rows[1]):
        size = _sizes(tables, weights)
        units = _units(tables, weights, _by_block(size, tables.rows))
        rows, spread = _row_statistics(tables, units, entering)
    rate = scale * _inverse_std(rows[1])
    flat = torch.empty(sum(tables.weights), dtype=dtype, device=scale.device)
    pieces, rates = _by_block(flat, tables.weights), _by_block(rate, tables.rows)
    for block, unit, own, piece in zip(tables.blocks, units, rates, pieces, strict=True):
        block.fold(unit, own, piece)
    bias = torch.addcmul(shift, rows[0], rate, value=-1).to(dtype)
    return flat, bias, [rows, rate, size, *(levers for levers in spread if levers is not None)]


def _in_range(var: Tensor) -> bool:
    least, largest = (float(end) for end in var.aminmax())
    return least > LEAST and largest < LARGEST  # not so for NaN


def _row_statistics(
    tables: TorchTables, units: Sequence[Tensor], entering: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """Mean and variance of every row, as two rows; and for every block their spread over positions, if any."""
    rows, scratch = entering.new_empty(2, sum(tables.rows)), _scratch(tables, entering)
    means, variances = _by_block(rows[0], tables.rows), _by_block(rows[1], tables.rows)
    parts = zip(tables.blocks, units, _by_block(entering, tables.channels), means, variances, strict=True)
    return rows, [block.statistics(unit, own, mean, var, scratch) for block, unit, own, mean, var in parts]


def _by_block(vectors: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """What belongs to every block."""
    return [vectors] if len(sizes) == 1 else vectors.split_with_sizes(sizes, -1)


def _scratch(tables: TorchTables, like: Tensor) -> Tensor:
    """Room for any of the blocks: one for all of them stays in the cache of a processor."""
    return torch.empty(max(tables.weights), dtype=like.dtype, device=like.device)


def _sizes(tables: TorchTables, weights: Sequence[Tensor]) -> Tensor:
    """A power of two near the largest weight of every row, as a vector; 1 for a row of zeros."""
    peak = torch.cat([block.peak(weights) for block in tables.blocks])
    return torch.where(peak > 0, torch.exp2(peak.log2().floor()), torch.ones_like(peak))


def _units(tables: TorchTables, weights: Sequence[Tensor], sizes: Sequence[Tensor | None]) -> list[Tensor]:
    """The weights of every block as they are folded, for sizes of their rows, if any."""
    return [block.unit(weights, size) for block, size in zip(tables.blocks, sizes, strict=True)]


def _divisors(tables: TorchTables, size: Tensor) -> Sequence[Tensor | None]:
    """What the rows of every block are divided by; None where that is 1, as far as it can be known without waiting."""
    if size.is_cpu and bool((size == 1).all()):
        return [None] * len(tables.blocks)
    return _by_block(size, tables.rows)


def _inverse_std(var: Tensor) -> Tensor:
    """1 / sigma; 0 for a row of zeros (or of equal weights, centred): its output is its shift, without gradient."""
    return torch.where(var > 0, var.rsqrt(), torch.zeros_like(var))


def rows_backward(
    tables: TorchTables,
    weights: Sequence[Tensor],
    saved: Sequence[Tensor],
    entering: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by weights (flat), by scale, and by what enters (two rows)."""
    rows, rate, size, *levers = saved
    blocks, scratch, sizes = tables.blocks, _scratch(tables, rate), _divisors(tables, size)
    units, pieces = _units(tables, weights, sizes), _by_block(grad_weight.to(rate.dtype), tables.weights)
    gradients = [block.gradient(piece) for block, piece in zip(blocks, pieces, strict=True)]
    by_rate = torch.empty_like(rate)
    found = _by_block(by_rate, tables.rows)
    for block, unit, gradient, own_by_rate in zip(blocks, units, gradients, found, strict=True):
        block.by_rate(unit, gradient, own_by_rate, scratch)
    by_rate.addcmul_(grad_bias, rows[0], value=-1)
    inverse = _inverse_std(rows[1])
    by_scale = by_rate * inverse
    by_mean, by_var = -grad_bias * rate, (by_scale * inverse * rate).mul_(-0.5)
    rates, by_means, by_vars = (_by_block(part, tables.rows) for part in (rate, by_mean, by_var))
    met, spread = _by_block(entering, tables.channels), iter(levers)
    kept = [next(spread) if block.spreads else None for block in blocks]
    given = map(RowBackward, units, gradients, rates, sizes, by_means, by_vars, met, kept)
    by_weight, by_entering = torch.empty_like(grad_weight, dtype=rate.dtype), torch.empty_like(entering)
    results = _by_block(by_weight, tables.weights), _by_block(by_entering, tables.channels)
    for block, own, piece, result in zip(blocks, given, *results, strict=True):
        block.backward(own, piece, result, scratch)
    return by_weight, by_scale, by_entering


class TorchBackend:
    """The two passes as a backend: any device, any function."""

    def __init__(self, layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tables = make_tables(layout, weights, dtype)
        self.lanes_kept = sum(len(run.inputs) for run in self.tables.runs)

    def forward(
        self, weights: Sequence[Tensor], shift_scale: Tensor, given: Pair | None, dtype: torch.dtype, backward: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """As `Backend.forward`."""
        entering, lanes_kept = moments_forward(self.tables, shift_scale, given, backward)
        folded, bias, rows_kept = rows_forward(self.tables, self._working(weights), shift_scale, entering, dtype)
        return folded, bias, [entering, *lanes_kept, *rows_kept]

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        kept: Sequence[Tensor],
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `Backend.backward`."""
        tables, by_bias, entering = self.tables, grad_bias.to(self.dtype), kept[0].view(2, -1)
        lanes_kept = [part.view(2, 2, -1) for part in kept[1 : 1 + self.lanes_kept]]
        rows, *rows_kept = kept[1 + self.lanes_kept :]
        by_rows = rows_backward(
            tables, self._working(weights), [rows.view(2, -1), *rows_kept], entering, grad_weight, by_bias
        )
        d_weight, d_scale, by_entering = by_rows
        by_source, given = moments_backward(tables, lanes_kept, shift_scale[1], by_entering)
        by_source[0] += by_bias
        by_source[1] += d_scale
        return d_weight.to(weights[0].dtype), by_source, *given

    def _working(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return weights if weights[0].dtype == self.dtype else [weight.to(self.dtype) for weight in weights]


def kept_sizes(layout: Layout, dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """Length and dtype of what `TorchBackend.forward` keeps."""
    lanes = layout.lanes
    steps = [(4 * step.count, torch.float64) for step in lanes.steps for _ in range(step.function.arity)]
    vectors = [(2 * layout.row_count, dtype), (layout.row_count, dtype), (layout.row_count, dtype)]
    spread = [(rows.outputs * rows.taps.shape[1], dtype) for rows in layout.rows if rows.taps.shape[1] > 1]
    return [(2 * len(lanes.entering), dtype), *steps, *vectors, *spread]
