"""The two passes that fold a whole network, in plain torch: moments of all lanes, then all weight rows.

Each has its backward derived by hand (mathematics.md, section 10), so that nothing but parameters and a few vectors
is kept. What a pass needs to know is laid down in `Tables`, for in a small network the looking up would cost more than
the arithmetic. The Triton kernels compute the same on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import EPS, Function, Layout, Pair, Rows
from ..memory_format import in_format, memory_format, memory_order
from .derivatives import DOUBLE, SINGLE, with_derivatives

SMALL = 2**14  # weights: matrices below this are stacked with their like
LEAST, LARGEST = 1e-30, 1e36  # variances between which no sum of squares has left the range of floats
Index = Tensor | slice


@dataclass(frozen=True)
class Run:
    """A step of the moment pass: its function, the lanes it reads, and those it makes."""

    function: Function
    inputs: tuple[Index, ...]
    where: slice


@dataclass(frozen=True)
class Block:
    """Sites of one shape as one matrix: (groups, rows, entries), where sites count as groups too.

    Attributes:
        sites: Which.
        shape: Of the matrix.
        taps: E of `layout.Rows`, on the device.
        transposed: Of the layers.
        inner: The channels of a tap lie side by side in memory (channels_last), and so they do in the matrix.
    """

    sites: slice
    shape: tuple[int, int, int]
    taps: Tensor
    transposed: bool
    inner: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, entering channels, and weights."""
        groups, rows, entries = self.shape
        return groups * rows, groups * entries // len(self.taps), groups * rows * entries

    def matrix(self, weights: Sequence[Tensor]) -> Tensor:
        """The weights of its sites as one matrix."""
        own = weights[self.sites]
        return self.as_matrix(own[0] if len(own) == 1 else torch.stack(list(own)))

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
class Tables:
    """All that the passes read besides parameters, on one device."""

    sources: int
    given: slice
    lanes: Tensor  # mean and variance of all lanes, as two rows; constants are there already
    runs: tuple[Run, ...]
    entering: Index
    offset: Tensor  # to add to what enters: epsilon to the variance
    blocks: tuple[Block, ...]
    rows: list[int]  # of every block
    channels: list[int]
    weights: list[int]
    nodes: int


def make_tables(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> Tables:
    """Lay everything down for weights as they are; `dtype` is that of the statistics."""
    lanes, device = layout.lanes, weights[0].device
    state = torch.zeros(2, lanes.total, dtype=torch.float64, device=device)
    first = lanes.sources + len(lanes.constant_mean)
    state[:, lanes.sources : first] = torch.stack([lanes.constant_mean, lanes.constant_var])
    runs = [
        Run(step.function, tuple(_index(i, device) for i in step.inputs), slice(step.start, step.start + step.count))
        for step in lanes.steps
    ]
    blocks = [_block(layout.rows, group, weights, dtype) for group in alike(layout.rows, weights)]
    rows, channels, sizes = (list(part) for part in zip(*(block.sizes for block in blocks), strict=True))
    return Tables(
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
    return rows.groups, *weight.shape


def _block(rows: Sequence[Rows], sites: slice, weights: Sequence[Tensor], dtype: torch.dtype) -> Block:
    first, weight = rows[sites.start], weights[sites.start]
    groups = (sites.stop - sites.start) * first.groups
    shape = (groups, first.outputs // first.groups, first.channels * first.tap_count)
    last = [0, *range(2, weight.ndim), 1]
    inner = not first.transposed and not weight.is_contiguous() and memory_order(weight) == last
    return Block(sites, shape, first.taps.to(weight.device, dtype), first.transposed, inner)


def moments_forward(
    tables: Tables, shift_scale: Tensor, given: Pair | None, backward: bool
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
    tables: Tables, saved: Sequence[Tensor], scale: Tensor, by_entering: Tensor
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
    tables: Tables, weights: Sequence[Tensor], shift_scale: Tensor, entering: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Folded weights and biases, flat, and what the backward needs.

    Where the square of a weight leaves the range of floats, all rows are divided by their sizes first.
    """
    size = torch.ones_like(shift_scale[0])
    rows, spread = _row_statistics(tables, weights, entering, size)
    if not rows.is_cpu or not bool(((rows[1] > LEAST) & (rows[1] < LARGEST)).all()):
        size = _sizes(tables, weights)
        rows, spread = _row_statistics(tables, weights, entering, size)
    shift, scale = shift_scale
    rate = scale * _inverse_std(rows[1])
    flat = torch.empty(sum(tables.weights), dtype=dtype, device=scale.device)
    pieces, rates = flat.split_with_sizes(tables.weights), rate.split_with_sizes(tables.rows)
    for block, matrix, piece, own in zip(
        tables.blocks, _unit_matrices(tables, weights, size), pieces, rates, strict=True
    ):
        target = block.in_order(piece, weights)
        if target is None:
            block.put(matrix * block.column(own), piece, weights)
        else:
            torch.mul(matrix, block.column(own), out=target)
    return flat, torch.addcmul(shift, rows[0], rate, value=-1).to(dtype), [rows, rate, size, *spread]


def _row_statistics(
    tables: Tables, weights: Sequence[Tensor], entering: Tensor, size: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Mean and variance of every row of the unit matrices, as two rows; and their spread over positions."""
    rows, spread = torch.empty(2, len(size), dtype=size.dtype, device=size.device), []
    mean_var = (entering[0].split_with_sizes(tables.channels), entering[1].split_with_sizes(tables.channels))
    parts = (rows[0].split_with_sizes(tables.rows), rows[1].split_with_sizes(tables.rows))
    scratch = _scratch(tables, size)
    for block, matrix, mean, var, first, second in zip(
        tables.blocks, _unit_matrices(tables, weights, size), *mean_var, *parts, strict=True
    ):
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


def _scratch(tables: Tables, like: Tensor) -> Tensor:
    """Room for any of the matrices: one for all of them stays in the cache of a processor."""
    return torch.empty(max(tables.weights), dtype=like.dtype, device=like.device)


def _sizes(tables: Tables, weights: Sequence[Tensor]) -> Tensor:
    """A power of two near the largest weight of every row, as a vector; 1 for a row of zeros."""
    matrices = [block.matrix(weights) for block in tables.blocks]
    peak = torch.cat([torch.linalg.vector_norm(matrix, torch.inf, -1).view(-1) for matrix in matrices])
    return torch.where(peak > 0, torch.exp2(peak.log2().floor()), torch.ones_like(peak))


def _unit_matrices(tables: Tables, weights: Sequence[Tensor], size: Tensor) -> list[Tensor]:
    """The weights of every block as a matrix, its rows divided by their sizes."""
    matrices = [block.matrix(weights) for block in tables.blocks]
    if _is_one(size):
        return matrices
    parts = zip(tables.blocks, matrices, size.split_with_sizes(tables.rows), strict=True)
    return [matrix / block.column(own) for block, matrix, own in parts]


def _is_one(size: Tensor) -> bool:
    """Whether no row has to be divided, where that can be known without waiting for a device."""
    return size.is_cpu and bool((size == 1).all())


def _inverse_std(var: Tensor) -> Tensor:
    """1 / sigma; 0 for a row of zeros, whose output is its shift and which gets no gradient."""
    return torch.where(var > 0, var.rsqrt(), torch.zeros_like(var))


def rows_backward(
    tables: Tables,
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
        if target is None:
            block.put(d_weight, piece, weights)
        result[0] = block.per_channel(torch.bmm(matrix.mT, by_lever), ALL)
        square = torch.mul(matrix, matrix, out=block.of(scratch))
        result[1] = block.per_channel(torch.bmm(square.mT, by_var), INSIDE)
    return d_flat, by_scale, by_entering


def _grad_matrix(block: Block, piece: Tensor, weights: Sequence[Tensor]) -> Tensor:
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
