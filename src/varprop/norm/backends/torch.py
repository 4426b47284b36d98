"""The fold in torch operations, on any device and for any function: channel moments, then weight rows.

Both passes have a backward that is derived by hand (mathematics.md, section 10), so that parameters and a few vectors
are all that is saved. What a pass reads besides parameters is prepared once for a layout: in a small network finding it
would cost more than the arithmetic. `fold.reference` is the definition, which they agree with.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...gaussian.derivatives import DOUBLE, KERNELS, SINGLE
from ...gaussian.normal import Pair, Slopes
from ...gaussian.shortcuts import first_order
from ...moments import full_precision
from ..fold.layout import EPS, Channels, Function, Layout, MemoryLayout, Rows, as_weight, memory_layout, memory_order
from ..fold.reference import minus_row_mean, own_saved_tensors, powers_of_two

Index = Tensor | slice
SavedSizes = list[tuple[int, torch.dtype]]  # length and dtype of every tensor that a pass saves for its backward

# --- channel moments ---


class TorchMoments:
    """The moment pass, in float64; its results have the dtype given."""

    replayable = False  # a function without a kernel may copy from the host, which a CUDA graph cannot

    def __init__(self, channels: Channels, device: torch.device, dtype: torch.dtype) -> None:
        first = channels.sources + len(channels.constant_mean)
        self.sources, self.external = channels.sources, slice(first, first + channels.external)
        self.initial = torch.zeros(2, channels.total, dtype=torch.float64, device=device)  # constants are never written
        self.initial[:, channels.sources : first] = torch.stack([channels.constant_mean, channels.constant_var])
        nodes = DOUBLE if dtype == torch.float64 else SINGLE
        self.steps = []
        for step in channels.steps:
            inputs, results = [_index(i, device) for i in step.inputs], slice(step.start, step.start + step.count)
            self.steps.append((step.function, with_slopes(step.function, nodes), inputs, results))
        self.entering = _index(channels.entering, device)
        self.epsilon = torch.tensor([[0.0], [EPS]], dtype=torch.float64, device=device)

    def forward(self, shift_scale: Tensor, external: Pair | None, backward: bool) -> tuple[Tensor, list[Tensor]]:
        """See `MomentPass`."""
        state = self.initial.clone()
        sources = state[:, : self.sources]
        sources.copy_(shift_scale)
        sources[1].square_()
        if external is not None:
            state[:, self.external] = torch.stack(external)
        saved: list[Tensor] = []
        for function, evaluate, inputs, results in self.steps:
            arguments = [(read[0], read[1]) for read in (state[:, index] for index in inputs)]
            if backward or function.kernel is not None:
                state[:, results], derivatives = evaluate(*arguments)
                saved += derivatives
            else:
                state[:, results] = torch.stack(function.moments(*arguments))
        return (state[:, self.entering] + self.epsilon).to(shift_scale.dtype), saved

    def backward(
        self, shift_scale: Tensor, saved: Sequence[Tensor], by_entering: Tensor, direct: Pair
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `MomentPass`."""
        by_channel = torch.zeros_like(self.initial)
        _add_at(by_channel, self.entering, by_entering)
        derivatives = iter(reversed(saved))
        for _, _, inputs, results in reversed(self.steps):
            by_result = by_channel[:, results].unsqueeze(1)
            for index in reversed(inputs):
                _add_at(by_channel, index, (by_result * next(derivatives).view(2, 2, -1)).sum(0))
        by_source = by_channel[:, : self.sources].to(shift_scale.dtype, copy=True).contiguous()
        by_source[1] *= 2.0 * shift_scale[1]
        by_source[0] += direct[0]
        by_source[1] += direct[1]
        by_mean, by_var = by_channel[:, self.external]
        return by_source, by_mean, by_var


def moments_saved(layout: Layout) -> SavedSizes:
    """Length and dtype of what `TorchMoments.forward` saves, known without running it."""
    steps = layout.channels.steps
    return [(4 * step.count, torch.float64) for step in steps for _ in range(step.function.arity)]


def _index(numbers: Tensor, device: torch.device) -> Index:
    """A slice where numbers follow each other, which reads and adds without looking up; else the numbers."""
    if len(numbers) and bool((numbers.diff() == 1).all()):
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers.to(device)


def _add_at(total: Tensor, index: Index, values: Tensor) -> None:
    if isinstance(index, slice):
        total[:, index] += values
    else:
        total.index_add_(1, index, values.to(total.dtype))


_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.ADInplaceOrView,
)


def with_slopes(function: Function, nodes: int = DOUBLE) -> Callable[..., Slopes]:
    """Moments after `function` with their derivatives: by `gaussian.derivatives` if it can, else by autograd."""
    if function.kernel is None or function.kernel[0] not in KERNELS[nodes]:
        return functools.partial(_by_autograd, function.moments)
    name, *numbers = function.kernel
    kernel = KERNELS[nodes][str(name)]
    return lambda *arguments: kernel(*arguments, *numbers)


def _by_autograd(moments: Callable[..., Pair], *arguments: Pair) -> Slopes:
    """Derivatives by autograd, which has to be called back first: inside of an operation it is switched off."""
    with torch.inference_mode(False), torch.enable_grad(), own_saved_tensors(), contextlib.ExitStack() as stack:
        for key in _AUTOGRAD_KEYS:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        leaves = [tuple(t.detach().clone().requires_grad_() for t in pair) for pair in arguments]
        with first_order():
            results = moments(*leaves)
        flat = [leaf for pair in leaves for leaf in pair]
        derivatives = torch.stack([torch.stack(_derivatives(result, flat)) for result in results])
    by_argument = derivatives.detach().split(2, dim=1)
    return torch.stack([r.detach() for r in results]), [pair.flatten(0, 1) for pair in by_argument]


def _derivatives(result: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    if not result.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    grads = torch.autograd.grad(result.sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


# --- weight rows ---

LEAST, LARGEST = 1e-30, 1e36  # variances between which no sum of squares has left the range of floats


class TorchRows:
    """The row pass for weights of the memory layouts of those given, computed in `dtype`."""

    replayable = False  # it launches some ten kernels for every layer, which a graph does not make fewer

    def __init__(self, layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.blocks = _blocks(layout.rows, weights, dtype)
        sizes = zip(*(block.sizes for block in self.blocks), strict=True)
        self.rows, self.channels, self.weights = (list(of_blocks) for of_blocks in sizes)

    def forward(
        self, weights: Sequence[Tensor], shift_scale: Tensor, entering: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `RowPass`.

        Where the square of a weight leaves the range of floats, all rows are divided by powers of two first.
        """
        if weights[0].dtype != self.dtype:
            weights = [weight.to(self.dtype) for weight in weights]
        shift, scale = shift_scale
        size = torch.ones_like(shift)
        units, statistics, levers = self._statistics(weights, [None] * len(self.blocks), entering)
        smallest, largest = statistics[1].aminmax() if statistics.is_cpu else (0.0, torch.inf)
        if not (float(smallest) > LEAST and float(largest) < LARGEST):  # so for NaN
            size = powers_of_two(torch.cat([block.peak(weights) for block in self.blocks]))
            units, statistics, levers = self._statistics(weights, size.split_with_sizes(self.rows), entering)
        mean, var = statistics
        # 0 for a row of zeros (or of equal weights, centred): its output is its shift, without gradient
        inverse_std = torch.where(var > 0, var.rsqrt(), torch.zeros_like(var))
        rate = scale * inverse_std
        folded = torch.empty(sum(self.weights), dtype=dtype, device=scale.device)
        pieces, rates = folded.split_with_sizes(self.weights), rate.split_with_sizes(self.rows)
        for block, unit, block_rate, piece in zip(self.blocks, units, rates, pieces, strict=True):
            block.fold(unit, block_rate, piece)
        bias = torch.addcmul(shift, mean, rate, value=-1).to(dtype)
        return folded, bias, [mean, inverse_std, rate, size, *(lever for lever in levers if lever is not None)]

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        saved: Sequence[Tensor],
        entering: Tensor,
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowPass`; `shift_scale` is not needed."""
        row_mean, inverse_std, rate, size, *levers = saved
        grad_bias, dtype = grad_bias.to(self.dtype), weights[0].dtype
        weights = weights if dtype == self.dtype else [weight.to(self.dtype) for weight in weights]
        scratch = rate.new_empty(max(self.weights))
        # rows are divided by powers of two; None where all are 1, as far as that is known without waiting
        undivided = size.is_cpu and bool((size == 1).all())
        sizes = [None] * len(self.blocks) if undivided else size.split_with_sizes(self.rows)
        units = [block.unit(weights, divisor) for block, divisor in zip(self.blocks, sizes, strict=True)]
        pieces = grad_weight.to(rate.dtype).split_with_sizes(self.weights)
        gradients = [block.gradient(piece) for block, piece in zip(self.blocks, pieces, strict=True)]
        by_rate = torch.empty_like(rate)
        results = by_rate.split_with_sizes(self.rows)
        for block, unit, gradient, result in zip(self.blocks, units, gradients, results, strict=True):
            block.by_rate(unit, gradient, result, scratch)
        by_rate.addcmul_(grad_bias, row_mean, value=-1)
        by_scale = by_rate * inverse_std
        by_mean, by_var = -grad_bias * rate, (by_scale * inverse_std * rate).mul_(-0.5)
        rates, by_means, by_vars = (vector.split_with_sizes(self.rows) for vector in (rate, by_mean, by_var))
        moments, remaining = entering.split_with_sizes(self.channels, 1), iter(levers)
        saved_levers = [next(remaining) if block.spreads else None for block in self.blocks]
        inputs = map(_BlockBackward, units, gradients, rates, sizes, by_means, by_vars, moments, saved_levers)
        by_weight, by_entering = torch.empty_like(grad_weight, dtype=rate.dtype), torch.empty_like(entering)
        pieces, results = by_weight.split_with_sizes(self.weights), by_entering.split_with_sizes(self.channels, 1)
        for block, block_inputs, piece, result in zip(self.blocks, inputs, pieces, results, strict=True):
            block.backward(block_inputs, piece, result, scratch)
        return by_weight.to(dtype), by_scale, by_entering

    def _statistics(
        self, weights: Sequence[Tensor], sizes: Sequence[Tensor | None], entering: Tensor
    ) -> tuple[list[Tensor], Tensor, list[Tensor | None]]:
        """The rows of every block, divided by `sizes` if given, mean and variance of all, and what blocks returned."""
        units = [block.unit(weights, size) for block, size in zip(self.blocks, sizes, strict=True)]
        result = entering.new_empty(2, sum(self.rows))
        scratch = entering.new_empty(max(self.weights))  # one for all blocks stays in the cache of a processor
        moments = entering.split_with_sizes(self.channels, 1)
        means, variances = result[0].split_with_sizes(self.rows), result[1].split_with_sizes(self.rows)
        inputs = zip(self.blocks, units, moments, means, variances, strict=True)
        levers = [block.statistics(unit, entered, mean, var, scratch) for block, unit, entered, mean, var in inputs]
        return units, result, levers


def rows_saved(layout: Layout, dtype: torch.dtype) -> SavedSizes:
    """Length and dtype of what `TorchRows.forward` saves, known without running it."""
    vectors = 4 * [(layout.row_count, dtype)]
    return vectors + [(rows.outputs * rows.taps.shape[1], dtype) for rows in layout.rows if rows.taps.shape[1] > 1]


class _BlockBackward(NamedTuple):
    """The arguments of the backward of a block."""

    unit: Tensor
    gradient: Tensor  # by the folded weights, in the shape of `unit`
    rate: Tensor  # of every row: scale / sigma
    size: Tensor | None  # the powers of two that the rows were divided by, if they were
    by_mean: Tensor  # derivative by the mean of every row
    by_var: Tensor
    entering: Tensor  # mean and variance of the entering channels, as two rows
    levers: Tensor | None  # what `statistics` returned


def _blocks(rows: Sequence[Rows], weights: Sequence[Tensor], dtype: torch.dtype) -> list[Block]:
    """Small layers that follow each other in one block, every other layer in one of its own."""
    blocks: list[Block] = []
    kinds = [(_is_flat(layer, weight), layer.centred) for layer, weight in zip(rows, weights, strict=True)]
    for (flat, _), group in itertools.groupby(range(len(rows)), kinds.__getitem__):
        numbers = list(group)
        if flat:
            blocks.append(_flat_block(rows, slice(numbers[0], numbers[-1] + 1)))
        else:
            blocks += [_matrix_block(rows[n], n, weights[n], dtype) for n in numbers]
    return blocks


@dataclass(frozen=True)
class MatrixBlock:
    """One layer as a matrix (groups, rows, entries).

    Its `unit` is what is folded: the weights, rows divided by powers of two and centred if asked for.
    """

    layer: int  # the number of the layer
    shape: tuple[int, int, int]  # the shape of the matrix
    taps: Tensor  # E of `layout.Rows`, on the device: (calls, taps, columns)
    transposed: bool  # whether it is a transposed convolution
    inner: bool  # whether the channels of a tap lie side by side in memory (channels_last), and so in the matrix
    centred: bool  # whether the mean of every row is subtracted from it
    order: MemoryLayout  # the memory layout of the weight

    @functools.cached_property
    def column(self) -> tuple[int, int, int]:
        """The shape in which a vector over rows multiplies the matrix."""
        return self.shape[0], self.shape[1], 1

    @functools.cached_property
    def spreads(self) -> bool:
        """True if the means of its rows differ by position."""
        return self.taps.shape[2] > 1

    @functools.cached_property
    def in_order(self) -> bool:
        """True if a flat buffer in the order of the weight in memory can be viewed as the matrix."""
        return self.inner or not (self.transposed or self.order.permutation)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of rows, of entering channels, and of weights."""
        groups, rows, entries = self.shape
        return groups * rows, groups * entries * len(self.taps) // self.taps.shape[1], groups * rows * entries

    def unit(self, weights: Sequence[Tensor], size: Tensor | None) -> Tensor:
        """The weights, rows divided by `size`, and centred if they are to be."""
        matrix = self._as_matrix(weights[self.layer])
        matrix = matrix if size is None else matrix / size.view(self.column)
        return minus_row_mean(matrix, (2,)) if self.centred else matrix

    def peak(self, weights: Sequence[Tensor]) -> Tensor:
        """The largest absolute weight of every row."""
        peak: Tensor = torch.linalg.vector_norm(self._as_matrix(weights[self.layer]), torch.inf, -1)
        return peak.view(-1)

    def statistics(self, unit: Tensor, entering: Tensor, mean: Tensor, var: Tensor, scratch: Tensor) -> Tensor | None:
        """Write mean and variance of every row; return the means by position where they differ."""
        square = torch.mul(unit, unit, out=scratch[: unit.numel()].view(self.shape))
        torch.bmm(square, self._expanded(entering[1], SHARE), out=var.view(self.column))
        if not self.spreads:
            torch.bmm(unit, self._expanded(entering[0], ALL), out=mean.view(self.column))
            return None
        levers = _product(torch.bmm, unit, self._expanded(entering[0], ALL))
        mean.copy_(levers[..., 0].reshape(-1))
        var += levers[..., 1:].square().sum(-1).view(-1)
        return levers

    def fold(self, unit: Tensor, rate: Tensor, piece: Tensor) -> None:
        """Write the folded weights to a flat buffer, in the order of the weights in memory."""
        if self.in_order:
            torch.mul(unit, rate.view(self.column), out=piece.view(self.shape))
        else:
            self._write(unit * rate.view(self.column), piece)

    def gradient(self, piece: Tensor) -> Tensor:
        """A flat buffer like that of `fold` in the shape of `unit`."""
        return piece.view(self.shape) if self.in_order else self._as_matrix(as_weight(piece, self.order))

    def by_rate(self, unit: Tensor, gradient: Tensor, result: Tensor, scratch: Tensor) -> None:
        """Write the derivative by the rate of every row that comes from the folded weights."""
        product = torch.mul(gradient, unit, out=scratch[: unit.numel()].view(self.shape))
        torch.sum(product, -1, keepdim=True, out=result.view(self.column))

    def backward(self, inputs: _BlockBackward, piece: Tensor, by_entering: Tensor, scratch: Tensor) -> None:
        """Write the derivatives by the weights, in their order in memory, and by the entering channels."""
        unit, (mean, var) = inputs.unit, inputs.entering
        by_lever, by_var = inputs.by_mean.view(self.column), inputs.by_var.view(self.column)
        if inputs.levers is not None:
            spread = inputs.levers.view(*self.shape[:2], -1)[..., 1:]
            by_lever = torch.cat([by_lever, 2.0 * by_var * spread], -1)
        target = piece.view(self.shape) if self.in_order else None
        by_weight = torch.mul(inputs.gradient, inputs.rate.view(self.column), out=target)
        outer = torch.bmm(by_var, self._expanded(var, SHARE).mT, out=scratch[: unit.numel()].view(self.shape))
        by_weight.addcmul_(unit, outer, value=2.0)
        by_weight.baddbmm_(by_lever, self._expanded(mean, ALL).mT)
        if inputs.size is not None:
            by_weight.div_(inputs.size.view(self.column))
        if self.centred:
            by_weight.sub_(by_weight.mean(-1, keepdim=True))
        if target is None:
            self._write(by_weight, piece)
        by_entering[0] = self._summed(_product(torch.bmm, unit.mT, by_lever), ALL)
        square = torch.mul(unit, unit, out=scratch[: unit.numel()].view(self.shape))
        by_entering[1] = self._summed(_product(torch.bmm, square.mT, by_var), SHARE)

    def _as_matrix(self, weight: Tensor) -> Tensor:
        if self.inner:
            return weight.movedim(1, -1).reshape(self.shape)
        if not self.transposed:
            return weight.reshape(self.shape)
        groups, rows, _ = self.shape
        return weight.reshape(groups, -1, rows, self.taps.shape[1]).transpose(1, 2).reshape(self.shape)

    def _write(self, matrix: Tensor, piece: Tensor) -> None:
        """Write a matrix to a flat buffer, in the order of the weight in memory."""
        if self.transposed:
            groups, rows, _ = self.shape
            matrix = matrix.reshape(groups, rows, -1, self.taps.shape[1]).transpose(1, 2)
        weight = as_weight(piece, self.order)
        weight.copy_(matrix.reshape(weight.shape))

    def _expanded(self, vector: Tensor, columns: slice) -> Tensor:
        """A vector over channels times columns of the taps, for every entry of a row: (groups, entries, columns)."""
        groups, _, entries = self.shape
        if self.taps.numel() == 1:
            return vector.view(groups, entries, 1)
        taps = self.taps[..., columns]
        calls, count, width = taps.shape
        if calls == 1:
            product = vector.view(-1, 1, 1) * taps
        else:
            product = _product(torch.mm, vector.view(calls, -1).mT, taps.reshape(calls, -1))
        product = product.view(groups, -1, count, width)
        return (product.transpose(1, 2) if self.inner else product).reshape(groups, entries, width)

    def _summed(self, by_expanded: Tensor, columns: slice) -> Tensor:
        """The derivative by a vector over channels from that by what `_expanded` makes of it."""
        if self.taps.numel() == 1:
            return by_expanded.view(-1)
        taps = self.taps[..., columns]
        calls, count, width = taps.shape
        by_entry = by_expanded
        if self.inner:
            by_entry = by_expanded.reshape(self.shape[0], count, -1, width).transpose(1, 2)
        by_entry = by_entry.reshape(-1, count, width)
        if calls == 1:
            return (by_entry * taps).sum((1, 2))
        return _product(torch.mm, taps.reshape(calls, -1), by_entry.flatten(1).mT).view(-1)


def _product(function: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices, by `torch.mm` or `torch.bmm`, in their own dtype also under autocast."""
    with full_precision(a.device):
        return function(a, b)


ALL, SHARE = slice(None), slice(0, 1)  # columns of the taps: all, and the share of positions inside the image


def _matrix_block(rows: Rows, layer: int, weight: Tensor, dtype: torch.dtype) -> MatrixBlock:
    shape = (rows.groups, rows.outputs // rows.groups, rows.channels * rows.tap_count)
    channels_last = [0, *range(2, weight.ndim), 1]
    inner = not rows.transposed and not weight.is_contiguous() and memory_order(weight) == channels_last
    taps = rows.taps.to(weight.device, dtype).view(rows.calls, rows.tap_count, -1)
    return MatrixBlock(layer, shape, taps, rows.transposed, inner, rows.centred, memory_layout(weight))


SMALL = 2**14  # weights of a layer: beyond, looking up the channel of every weight costs more than a few calls


@dataclass(frozen=True)
class FlatBlock:
    """Small layers that follow each other, all weights in one vector: a `MatrixBlock` in fewer calls.

    An operation on a small matrix costs the time of its call, and looking up a channel for every weight that of a
    gather: the rows of the benchmark's MLP (784-20x6-10) take 1.2 ms forward and backward in flat blocks and 3.2 ms as
    matrices, five layers 1024 wide 417 ms and 104 ms, and 128 wide the same (one core, side by side).
    """

    layers: slice  # the numbers of the layers
    sizes: tuple[int, int, int]  # numbers of rows, of entering channels, and of weights
    row: Tensor  # the row of every weight
    first: Tensor  # the first weight of that row
    channel: Tensor  # the entering channel that every weight multiplies
    lengths: Tensor  # the number of weights of every row
    centred: bool  # whether the mean of every row is subtracted from it
    spreads: bool = False  # false: there is one tap

    def unit(self, weights: Sequence[Tensor], size: Tensor | None) -> Tensor:
        """See `MatrixBlock.unit`."""
        flat = torch.cat([weight.view(-1) for weight in weights[self.layers]])
        flat = flat if size is None else flat / size.index_select(0, self.row)
        if not self.centred:
            return flat
        return self._minus_row_mean(flat - flat.index_select(0, self.first))  # as `minus_row_mean`, for its reason

    def peak(self, weights: Sequence[Tensor]) -> Tensor:
        """See `MatrixBlock.peak`."""
        flat = torch.cat([weight.view(-1) for weight in weights[self.layers]])
        return torch.segment_reduce(flat.abs(), "max", lengths=self.lengths, unsafe=True)

    def statistics(self, unit: Tensor, entering: Tensor, mean: Tensor, var: Tensor, scratch: Tensor) -> None:
        """See `MatrixBlock.statistics`."""
        channel_mean, channel_var = entering.index_select(1, self.channel)
        products = ((mean, unit * channel_mean), (var, channel_var.mul_(unit).mul_(unit)))
        for result, values in products:
            result.copy_(torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True))

    def fold(self, unit: Tensor, rate: Tensor, piece: Tensor) -> None:
        """See `MatrixBlock.fold`."""
        torch.mul(unit, rate.index_select(0, self.row), out=piece)

    def gradient(self, piece: Tensor) -> Tensor:
        """See `MatrixBlock.gradient`."""
        return piece

    def by_rate(self, unit: Tensor, gradient: Tensor, result: Tensor, scratch: Tensor) -> None:
        """See `MatrixBlock.by_rate`."""
        result.copy_(torch.segment_reduce(unit * gradient, "sum", lengths=self.lengths, unsafe=True))

    def backward(self, inputs: _BlockBackward, piece: Tensor, by_entering: Tensor, scratch: Tensor) -> None:
        """See `MatrixBlock.backward`."""
        unit = inputs.unit
        rate, by_mean, by_var = torch.stack([inputs.rate, inputs.by_mean, inputs.by_var]).index_select(1, self.row)
        mean, var = inputs.entering.index_select(1, self.channel)
        by_square = by_var.mul_(unit)  # half the derivative by a weight, without the variance it multiplies
        by_weight = torch.mul(inputs.gradient, rate).addcmul_(by_square, var, value=2.0).addcmul_(by_mean, mean)
        by_weight = by_weight if inputs.size is None else by_weight.div_(inputs.size.index_select(0, self.row))
        piece.copy_(self._minus_row_mean(by_weight) if self.centred else by_weight)
        by_entering.zero_()
        by_entering[0].index_add_(0, self.channel, by_mean.mul_(unit))
        by_entering[1].index_add_(0, self.channel, by_square.mul_(unit))

    def _minus_row_mean(self, values: Tensor) -> Tensor:
        mean = torch.segment_reduce(values, "mean", lengths=self.lengths, unsafe=True)
        return values - mean.index_select(0, self.row)


Block = MatrixBlock | FlatBlock


def _is_flat(rows: Rows, weight: Tensor) -> bool:
    """True if a layer is small and has one tap, and its weights follow each other row by row."""
    plain = weight.is_cpu and weight.is_contiguous() and not rows.transposed
    return plain and rows.taps.numel() == 1 and rows.weights <= SMALL


def _flat_block(rows: Sequence[Rows], layers: slice) -> FlatBlock:
    """The block of some layers, all centred or none."""
    chosen = rows[layers]
    lengths = torch.cat([torch.full((r.outputs,), r.channels) for r in chosen])
    row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    first = (lengths.cumsum(0) - lengths)[row]
    channels = []
    for r in chosen:
        grouped = torch.arange(r.groups * r.channels).view(r.groups, 1, r.channels)
        by_weight = grouped.expand(-1, r.outputs // r.groups, -1).reshape(-1)
        channels.append(by_weight + (r.first_channel - chosen[0].first_channel))
    sizes = (len(lengths), sum(r.groups * r.channels for r in chosen), len(row))
    return FlatBlock(layers, sizes, row, first, torch.cat(channels), lengths, chosen[0].centred)
