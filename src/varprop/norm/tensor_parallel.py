"""The fold where layers are parallelized by `torch.distributed.tensor.parallel`: weights that stay sharded.

Every process computes the moments of all channels, from gathered shifts and scales, and its own part of the weights.
What processes exchange is put together, so that a step has four collectives of vectors however many layers there are:
shifts and scales of rows that are spread, sums over rows whose columns are spread, and the gradients of both.

Until it is exchanged, the gradient of a number that all processes have is the share of one process in it: the sum over
processes is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..gaussian.normal import Pair, working_dtype
from .fold import reference
from .fold.layout import Layout, restricted
from .sharded import REFUSED, is_sharded

NOT_LINEAR = (
    "A convolution of the normalized model is tensor parallel, which only nn.Linear may be: leave it out of the plan "
    "of parallelize_module."
)


class _Sum(torch.autograd.Function):
    """The sum over all processes; its gradient is known to every one of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_of_gradients(grad, ctx.group), None


class _SumOfGradients(torch.autograd.Function):
    """The same number, of whose gradient each process has its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group), None


class _ShareOfGradient(torch.autograd.Function):
    """The same number, whose gradient is known to every process: each takes an equal share of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, processes: int) -> Tensor:
        ctx.processes = processes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.processes, None


_sum: Callable[[Tensor, Any], Tensor] = _Sum.apply
_sum_of_gradients: Callable[[Tensor, Any], Tensor] = _SumOfGradients.apply
_share_of_gradient: Callable[[Tensor, int], Tensor] = _ShareOfGradient.apply


def gathered_vectors(layers: Sequence[Any]) -> dict[nn.Module, Pair]:
    """Shift and scale of every layer, all of them in every process."""
    vectors = [vector for layer in layers for vector in (layer.shift, layer.scale)]
    full = list(map(_local, vectors))
    spread = [n for n, vector in enumerate(vectors) if _sharded_axis(vector) == 0]
    if spread:
        parts = torch.cat([_among_zeros(vectors[n]) for n in spread])
        sizes = [len(vectors[n]) for n in spread]
        for n, vector in zip(spread, _sum(parts, _group_of(vectors)).split(sizes), strict=True):
            full[n] = vector
    return dict(zip(layers, zip(full[::2], full[1::2], strict=True), strict=True))


def tensor_parallel_parts(
    layout: Layout, given: Pair | None, parameters: Sequence[Tensor], vectors: Sequence[Pair]
) -> list[Tensor]:
    """Folded weights and then biases; those of parallel layers are sharded as their parameters are.

    Args:
        layout: Of the network.
        given: Moments from outside.
        parameters: All weights, then all shifts, then all scales.
        vectors: Shift and scale of every layer, gathered.
    """
    group, count = _group_of(parameters), len(layout.rows)
    shifts, scales = ([pair[k] for pair in vectors] for k in (0, 1))
    shift, scale, given_in_shares = _in_shares(torch.cat(shifts), torch.cat(scales), given, group)
    found: dict[int, Pair] = {}
    by_columns: dict[int, _OwnColumns] = {}
    for place, weight in enumerate(parameters[:count]):
        own, axis = restricted(layout, [place]), _sharded_axis(weight)
        if axis is None:
            folded, bias = reference.fold(own, [_local(weight)], shifts, scales, given)
            found[place] = folded[0], bias[0]
        elif weight.ndim != 2:
            raise RuntimeError(NOT_LINEAR)
        elif axis == 0:
            found[place] = _fold_own_rows(own, weight, shift, scale, given_in_shares)
        else:
            entering = reference.entering(own.lanes, shift, scale, given_in_shares)
            by_columns[place] = _own_columns(weight, entering, own.rows[0].centred)
    for place, sums in _exchanged(by_columns, group).items():
        rows = slice(layout.rows[place].first_row, layout.rows[place].first_row + layout.rows[place].outputs)
        found[place] = _fold_own_columns(by_columns[place], sums, shift[rows], scale[rows], group)
    parts = [found[place][k] for k in (0, 1) for place in range(count)]
    like = parameters[: 2 * count]  # a bias is sharded as the shift is
    return [_sharded_like(parameter, part) for parameter, part in zip(like, parts, strict=True)]


def _in_shares(shift: Tensor, scale: Tensor, given: Pair | None, group: Any) -> tuple[Tensor, Tensor, Pair | None]:
    """The same vectors for what is computed of the own part alone; their gradients are exchanged together."""
    vectors = [shift, scale, *(given or ())]
    joined = torch.cat([vector.to(working_dtype(vector.device)) for vector in vectors])
    shift, scale, *more = _sum_of_gradients(joined, group).split([len(vector) for vector in vectors])
    return shift, scale, (more[0], more[1]) if more else None


def _fold_own_rows(own: Layout, weight: Any, shift: Tensor, scale: Tensor, given: Pair | None) -> Pair:
    """Weight and bias of the rows that this process has, for which no other has to be asked."""
    rows, held = own.rows[0], _held(weight, 0)
    part = Layout(own.lanes, (replace(rows, outputs=len(held)),))
    (unit,) = reference.unit_rows(part, [_local(weight)], shift, scale, given)
    span = slice(rows.first_row + held.start, rows.first_row + held.stop)
    rate = reference.rate_of(scale[span].to(unit.var), unit.var[0])
    return unit.matrix[0, :, :, 0] * rate[:, None], shift[span].to(rate) - unit.mean[0] * rate


class _OwnColumns(NamedTuple):
    """Those columns of a weight that this process has, and its part of the sums over rows.

    All is in double precision: the sums of processes may cancel where rows are centred.

    Attributes:
        matrix: The columns divided by `sums[0]`, where it is not 0; if rows are centred, minus their mean over these
            columns.
        sums: Six vectors, an entry for each row: a power of two near the largest weight, 0 for a row of zeros; a
            number near that mean, and what the mean is above it; the sums over the matrix times the entering means,
            squared times the variances, and times the variances.
        entering: Three rows, an entry for each process: its number of columns, and the sums of the means and of the
            variances that enter them.
        process: The number of this process.
    """

    matrix: Tensor
    sums: Tensor
    entering: Tensor
    process: int


def _own_columns(weight: Any, entering: Pair, centred: bool) -> _OwnColumns:
    held, ones = _held(weight, 1), torch.ones_like(entering[0])
    mean, var = (part[held.start : held.stop] for part in entering)
    matrix = _local(weight).to(mean)
    largest = matrix.detach().abs().amax(1) if len(held) else matrix.new_zeros(len(matrix))
    size = torch.exp2(largest.log2().floor())
    matrix = matrix / _one_for_zero(size)[:, None]
    pivot = above = torch.zeros_like(size)
    if centred and len(held):
        pivot = matrix[:, 0].detach()  # so that equal weights leave exactly zero
        above = (matrix - pivot[:, None]).mean(1)
        matrix = matrix - pivot[:, None] - above[:, None]
    sums = [size, pivot, above, matrix @ mean, matrix.square() @ var, matrix @ var]
    spans = [_held(weight, 1, process) for process in range(weight.device_mesh.size())]
    totals = [torch.stack([part[span.start : span.stop].sum() for span in spans]) for part in (ones, *entering)]
    return _OwnColumns(matrix, torch.stack(sums), torch.stack(totals), weight.device_mesh.get_local_rank())


def _exchanged(parts: dict[int, _OwnColumns], group: Any) -> dict[int, Tensor]:
    """The sums of every layer as all processes have them, a process in each entry of the first axis."""
    if not parts:
        return {}
    own = torch.cat([part.sums.flatten() for part in parts.values()])
    everyone = [torch.zeros_like(own)] * dist.get_world_size(group)
    everyone[dist.get_rank(group)] = own
    found = _sum_of_gradients(_sum(torch.stack(everyone), group), group)
    flat = found.split([part.sums.numel() for part in parts.values()], 1)
    return {place: sums.unflatten(1, part.sums.shape) for (place, part), sums in zip(parts.items(), flat, strict=True)}


def _fold_own_columns(part: _OwnColumns, sums: Tensor, shift: Tensor, scale: Tensor, group: Any) -> Pair:
    """Weight of the own columns, and the bias, from the sums of all processes."""
    size, pivot = sums[:, :2].detach().unbind(1)
    above, levers, squares, products = sums[:, 2:].unbind(1)
    size = _one_for_zero(size) / _one_for_zero(size.amax(0))
    columns, mean, var = part.entering[..., None]
    offset = size * pivot - (size * pivot)[:1] + size * above  # of the means of processes; from that of the whole row:
    offset = offset - (columns * offset).sum(0) / columns.sum()
    row_mean = (size * levers + offset * mean).sum(0)
    row_var = (size.square() * squares + 2 * size * offset * products + offset.square() * var).sum(0)
    rate = reference.rate_of(scale, row_var)
    folded = part.matrix * (size[part.process] * rate)[:, None] + (offset[part.process] * rate)[:, None]
    return folded, _share_of_gradient(shift - row_mean * rate, dist.get_world_size(group))


def _one_for_zero(size: Tensor) -> Tensor:
    return torch.where(size > 0, size, torch.ones_like(size))


def _group_of(parameters: Sequence[Any]) -> Any:
    """The processes that share a model; parameters sharded over others too belong to blocks that are not gathered."""
    meshes = {parameter.device_mesh for parameter in parameters if is_sharded(parameter)}
    if len(meshes) != 1 or any(mesh.ndim > 1 for mesh in meshes):
        raise RuntimeError(REFUSED)
    return meshes.pop().get_group()


def _sharded_axis(parameter: Any) -> int | None:
    """Along which a parameter is cut; None for one that every process has."""
    if not is_sharded(parameter) or parameter.placements[0].is_replicate():
        return None
    return int(parameter.placements[0].dim)


def _local(parameter: Any) -> Tensor:
    """What this process has of a parameter."""
    found: Tensor = parameter.to_local() if is_sharded(parameter) else parameter
    return found


def _held(parameter: Any, axis: int, process: int | None = None) -> range:
    """The places along an axis that a process has: torch cuts as `torch.chunk` does."""
    mesh = parameter.device_mesh
    process = mesh.get_local_rank() if process is None else process
    size = parameter.shape[axis]
    step = -(-size // mesh.size())
    return range(size)[process * step : (process + 1) * step]


def _among_zeros(vector: Any) -> Tensor:
    """The part of a vector that this process has, and zeros for the others."""
    held = _held(vector, 0)
    return nn.functional.pad(_local(vector), (held.start, len(vector) - held.stop))


def _sharded_like(parameter: Any, part: Tensor) -> Tensor:
    """A part in the dtype of a parameter and sharded as it is."""
    part = part.to(parameter.dtype)
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    form = {"shape": parameter.shape, "stride": parameter.stride()}
    found: Tensor = DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, **form)
    return found
