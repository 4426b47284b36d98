"""The definition of the fold, in a few plain operations of torch; `backends` compute the same, faster.

W' = W scale / sigma and b' = shift - mu scale / sigma (mathematics.md, equation 10.1), with mean mu and standard
deviation sigma of every row's output as `layout.Rows` defines them. Every operation can be differentiated any number of
times, in both modes, mapped, exported and traced. So the reference is used wherever that is asked for, and where
parameters are no plain tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...gaussian.normal import Pair, safe_sqrt, working_dtype
from ...moments import full_precision
from .layout import EPS, Channels, Layout, Rows

STALE = (
    "A parameter of a normalized layer was changed in place between the forward and the backward pass; "
    "its gradient can no longer be computed."
)


class UnitRows(NamedTuple):
    """The rows of a layer as a matrix (group, row, channel, tap), each divided by a power of two near its largest.

    So the range of floats limits the weights and not their squares; a power of two loses nothing. Rows that are to be
    centred are centred: they keep enough of the range, since weights that differ do so in one of their digits.
    """

    matrix: Tensor
    size: Tensor  # the powers of two, (group, row)
    mean: Tensor  # the means of the outputs of these rows, (group, row); `var` likewise their variances
    var: Tensor


def fold_parts(layout: Layout, external: Pair | None, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Folded weights of all layers, then their biases: W' = W scale / sigma, b' = shift - mu scale / sigma.

    W is the weight, or the weight with centred rows. `external` are mean and variance of the external channels, if
    there are any, and `parameters` the weights of all layers, then their shifts, then their scales.
    """
    folded, biases = [], []
    weights, shift, scale = _joined_parameters(parameters)
    units = unit_rows(layout, weights, shift, scale, external)
    for rows, unit, weight in zip(layout.rows, units, weights, strict=True):
        layer_shift, layer_scale = (_of_rows(vector, rows, unit.var) for vector in (shift, scale))
        rate = rate_of(layer_scale, unit.var)
        matrix = unit.matrix * rate[..., None, None]
        folded.append((matrix.transpose(1, 2) if rows.transposed else matrix).reshape(weight.shape).to(weight.dtype))
        biases.append((layer_shift - unit.mean * rate).flatten().to(weight.dtype))
    return [*folded, *biases]


def output_statistics(layout: Layout, external: Pair | None, parameters: Sequence[Tensor]) -> list[Pair]:
    """Mean and standard deviation of every layer's output channels before the normalization, without bias."""
    units = unit_rows(layout, *_joined_parameters(parameters), external)
    return [((unit.mean * unit.size).flatten(), (safe_sqrt(unit.var) * unit.size).flatten()) for unit in units]


def unit_rows(
    layout: Layout, weights: Sequence[Tensor], shift: Tensor, scale: Tensor, external: Pair | None
) -> list[UnitRows]:
    """The rows of every layer with mean and variance of their outputs; `shift` and `scale` are those of all layers."""
    with full_precision(shift.device):
        mean, var = entering(layout.channels, shift, scale, external)
        sizes = [rows.entering for rows in layout.rows]
        layers = zip(layout.rows, weights, mean.split(sizes), var.split(sizes), strict=True)
        return [_unit_rows(*layer) for layer in layers]


def entering(channels: Channels, shift: Tensor, scale: Tensor, external: Pair | None) -> Pair:
    """Mean and variance of all channels that enter the layers, in their order; epsilon goes with the variance."""
    device, work = shift.device, working_dtype(shift.device)
    means = [shift.to(work), channels.constant_mean.to(device, work)]
    variances = [scale.to(work).square(), channels.constant_var.to(device, work)]
    for vectors, vector in zip((means, variances), external or (), strict=False):
        vectors.append(vector)
    mean, var = torch.cat(means), torch.cat(variances)
    for step in channels.steps:
        arguments = [(mean[index], var[index]) for index in (numbers.to(device) for numbers in step.inputs)]
        new_mean, new_var = step.function.moments(*arguments)
        mean, var = torch.cat([mean, new_mean]), torch.cat([var, new_var])
    return mean[channels.entering.to(device)], var[channels.entering.to(device)] + EPS


def _unit_rows(rows: Rows, weight: Tensor, mean: Tensor, var: Tensor) -> UnitRows:
    """The formula of `layout.Rows`, for mean and variance of the channels that enter one layer."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    matrix = _as_matrix(weight, rows)
    size = powers_of_two(matrix.detach().abs().amax((2, 3)))
    matrix, taps = matrix / size[..., None, None], rows.taps.to(weight)
    matrix = minus_row_mean(matrix, (2, 3)) if rows.centred else matrix
    mean, var = (vector.to(weight).view(rows.calls, rows.groups, 1, -1, 1) for vector in (mean, var))
    calls, square = list(zip(mean, var, taps.chunk(rows.calls), strict=True)), matrix.square()
    levers = sum([(matrix * mean).sum(2) @ taps for mean, _, taps in calls])
    noise = sum([(square * var).sum(2) @ taps[:, 0] for _, var, taps in calls])
    return UnitRows(matrix, size, levers[..., 0], noise + levers[..., 1:].square().sum(-1))


def rate_of(scale: Tensor, var: Tensor) -> Tensor:
    """scale / sigma; 0 for a row of zeros (or of equal weights, centred): its output is its shift, without gradient."""
    alive = var > 0
    return torch.where(alive, scale * torch.where(alive, var, torch.ones_like(var)).rsqrt(), torch.zeros_like(scale))


def powers_of_two(peak: Tensor) -> Tensor:
    """The largest power of two that is at most each number; 1 for zeros."""
    return torch.where(peak > 0, torch.exp2(peak.log2().floor()), torch.ones_like(peak))


def minus_row_mean(rows: Tensor, axes: tuple[int, ...]) -> Tensor:
    """A tensor minus its mean over `axes`, which make up a row: centred rows, as the deep form has them.

    The mean is taken of what is left when the first entry of the row is subtracted. So equal weights leave exactly
    zero, and a row far from zero keeps the digits of its spread: the difference of close numbers is exact.
    """
    first = rows.detach()  # cancels out, and so does its derivative
    for axis in axes:
        first = first.narrow(axis, 0, 1)
    distances = rows - first
    return distances.sub_(distances.mean(axes, keepdim=True))


def own_saved_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context within which tensors that autograd saves are hidden from hooks of callers.

    A gradient checkpoint counts what is saved within it, and must find the same number when it computes again. A fold
    may run before it the first time and within it the second.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(STALE)
    return tensor


def _joined_parameters(parameters: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor, Tensor]:
    """The weights, all shifts in one vector and all scales in one, each on the device of the first."""
    count = len(parameters) // 3
    shifts, scales = parameters[count : 2 * count], parameters[2 * count :]
    shift, scale = (torch.cat([vector.to(each[0].device) for vector in each]) for each in (shifts, scales))
    return parameters[:count], shift, scale


def _of_rows(vector: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """The entries of a vector over all sources that belong to the rows of a layer, in the shape and dtype of `like`."""
    return vector[rows.first_row : rows.first_row + rows.outputs].to(like).view_as(like)


def _as_matrix(weight: Tensor, rows: Rows) -> Tensor:
    taps = rows.tap_count
    if rows.transposed:
        return weight.reshape(rows.groups, rows.channels, -1, taps).transpose(1, 2)
    return weight.reshape(rows.groups, -1, rows.channels, taps)
