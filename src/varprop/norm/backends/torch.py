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
from ..layout import Layout
from ..memory_format import in_format, memory_format
from .derivatives import with_derivatives
from .matrices import ALL, INSIDE, Index, MatrixBlock, TorchTables, alike, make_tables

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
    size = torch.ones_like(shift_scale[0])
    matrices = _unit_matrices(tables, weights, size)
    rows, spread = _row_statistics(tables, matrices, entering, size)
    if not rows.is_cpu or not bool(((rows[1] > LEAST) & (rows[1] < LARGEST)).all()):
        size = _sizes(tables, weights)
        matrices = _unit_matrices(tables, weights, size)
        rows, spread = _row_statistics(tables, matrices, entering, size)
    shift, scale = shift_scale
    rate = scale * _inverse_std(rows[1])
    flat = torch.empty(sum(tables.weights), dtype=dtype, device=scale.device)
    pieces, rates = flat.split_with_sizes(tables.weights), rate.split_with_sizes(tables.rows)
    for block, matrix, piece, own in zip(tables.blocks, matrices, pieces, rates, strict=True):
        target = block.in_order(piece, weights)
        if target is None:
            block.put(matrix * block.column(own), piece, weights)
        else:
            torch.mul(matrix, block.column(own), out=target)
    return flat, torch.addcmul(shift, rows[0], rate, value=-1).to(dtype), [rows, rate, size, *spread]


def _row_statistics(
    tables: TorchTables, matrices: Sequence[Tensor], entering: Tensor, size: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Mean and variance of every row of the unit matrices, as two rows; and their spread over positions."""
    rows, spread = torch.empty(2, len(size), dtype=size.dtype, device=size.device), []
    mean_var = (entering[0].split_with_sizes(tables.channels), entering[1].split_with_sizes(tables.channels))
    parts = (rows[0].split_with_sizes(tables.rows), rows[1].split_with_sizes(tables.rows))
    scratch = _scratch(tables, size)
    for block, matrix, mean, var, first, second in zip(tables.blocks, matrices, *mean_var, *parts, strict=True):
        square = torch.mul(matrix, matrix, out=block.of(scratch))
        torch.bmm(square, block.met(var, INSIDE), out=block.column(second))
        if block.taps.shape[1] == 1:
            torch.bmm(matrix, block.met(mean, ALL), out=block.column(first))
        else:
            levers = torch.bmm(matrix, block.met(mean, ALL))
            spread.append(levers)
            first.copy_(levers[..., 0].reshape(-1))
            second += levers[..., 1:].square().sum(-1).view(-1)
    return rows, spread


def _scratch(tables: TorchTables, like: Tensor) -> Tensor:
    """Room for any of the matrices: one for all of them stays in the cache of a processor."""
    return torch.empty(max(tables.weights), dtype=like.dtype, device=like.device)


def _sizes(tables: TorchTables, weights: Sequence[Tensor]) -> Tensor:
    """A power of two near the largest weight of every row, as a vector; 1 for a row of zeros."""
    matrices = [block.matrix(weights) for block in tables.blocks]
    peak = torch.cat([torch.linalg.vector_norm(matrix, torch.inf, -1).view(-1) for matrix in matrices])
    return torch.where(peak > 0, torch.exp2(peak.log2().floor()), torch.ones_like(peak))


def _unit_matrices(tables: TorchTables, weights: Sequence[Tensor], size: Tensor) -> list[Tensor]:
    """The weights of every block as the matrix that is folded."""
    if _is_one(size):
        return [block.unit_matrix(weights, None) for block in tables.blocks]
    parts = zip(tables.blocks, size.split_with_sizes(tables.rows), strict=True)
    return [block.unit_matrix(weights, own) for block, own in parts]


def _is_one(size: Tensor) -> bool:
    """Whether no row has to be divided, where that can be known without waiting for a device."""
    return size.is_cpu and bool((size == 1).all())


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
    rows, rate, size, *levers_of = saved
    spread, scratch, plain = iter(levers_of), _scratch(tables, rate), _is_one(size)
    inverse = _inverse_std(rows[1])
    by_scale, by_entering = torch.empty_like(rate), torch.empty_like(entering)
    d_flat = torch.empty(len(grad_weight), dtype=weights[0].dtype, device=entering.device)
    vectors = [part.split_with_sizes(tables.rows) for part in (rows[0], rate, inverse, size, -grad_bias, by_scale)]
    means = entering.split_with_sizes(tables.channels, 1)
    results, targets = by_entering.split_with_sizes(tables.channels, 1), d_flat.split_with_sizes(tables.weights)
    grads, matrices = grad_weight.split_with_sizes(tables.weights), _unit_matrices(tables, weights, size)
    parts = zip(tables.blocks, matrices, grads, zip(*vectors, strict=True), means, results, targets, strict=True)
    for block, matrix, grad_piece, own, (mean, var), result, piece in parts:
        grad = _grad_matrix(block, grad_piece, weights)
        row_mean, row_rate, row_inverse, row_size, minus_bias, row_by_scale = (block.column(vector) for vector in own)
        by_rate = torch.mul(grad, matrix, out=block.of(scratch)).sum(-1, keepdim=True).addcmul_(minus_bias, row_mean)
        torch.mul(by_rate, row_inverse, out=row_by_scale)
        by_lever = minus_bias * row_rate  # by the mean of a row
        by_var = by_rate * row_rate * row_inverse.square() * -0.5
        if block.taps.shape[1] > 1:
            levers = next(spread).view(block.shape[0], block.shape[1], -1)
            by_lever = torch.cat([by_lever, 2.0 * by_var * levers[..., 1:]], -1)
        target = block.in_order(piece, weights)
        d_weight = torch.mul(grad, row_rate, out=target)
        outer = torch.bmm(by_var, block.met(var, INSIDE).mT, out=block.of(scratch))
        d_weight.addcmul_(matrix, outer, value=2.0)
        d_weight.baddbmm_(by_lever, block.met(mean, ALL).mT)
        if not plain:
            d_weight.div_(row_size)
        if block.centred:
            d_weight.sub_(d_weight.mean(-1, keepdim=True))
        if target is None:
            block.put(d_weight, piece, weights)
        result[0] = block.per_channel(torch.bmm(matrix.mT, by_lever), ALL)
        square = torch.mul(matrix, matrix, out=block.of(scratch))
        result[1] = block.per_channel(torch.bmm(square.mT, by_var), INSIDE)
    return d_flat, by_scale, by_entering


def _grad_matrix(block: MatrixBlock, piece: Tensor, weights: Sequence[Tensor]) -> Tensor:
    piece = piece.to(weights[0].dtype)
    found = block.in_order(piece, weights)
    if found is not None:
        return found
    return block.as_matrix(in_format(piece, memory_format(weights[block.sites.start])))


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


def kept_sizes(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> list[tuple[int, torch.dtype]]:
    """Length and dtype of what `TorchBackend.forward` keeps."""
    lanes, blocks = layout.lanes, [layout.rows[sites] for sites in alike(layout.rows, weights)]
    steps = [(4 * step.count, torch.float64) for step in lanes.steps for _ in range(step.function.arity)]
    spread = [(sum(r.outputs for r in block), block[0].taps.shape[1]) for block in blocks]
    vectors = [(2 * layout.row_count, dtype), (layout.row_count, dtype), (layout.row_count, dtype)]
    sizes = [(2 * len(lanes.entering), dtype), *steps, *vectors]
    return sizes + [(rows * columns, dtype) for rows, columns in spread if columns > 1]
