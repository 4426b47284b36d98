"""The fold in a few plain lines: what all other backends have to agree with.

Every operation is one of torch's, so that it can be differentiated any number of times, in both modes, mapped,
exported and traced. It serves wherever that is asked for, and where parameters are no plain tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...gaussian.normal import Pair, safe_sqrt, working_dtype
from .layout import EPS, Lanes, Layout, Rows


class UnitRows(NamedTuple):
    """The rows of a layer as a matrix (group, row, channel, tap), each divided by a power of two near its largest.

    So the range of floats limits the weights and not their squares; a power of two loses nothing. Rows that are to be
    centred are: they keep enough of the range, since weights that differ do so in one of their digits.
    """

    matrix: Tensor
    size: Tensor  # the powers of two, (group, row)
    mean: Tensor  # of the output of the divided row
    var: Tensor


def fold(
    layout: Layout, weights: Sequence[Tensor], shifts: Sequence[Tensor], scales: Sequence[Tensor], given: Pair | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and biases of the plain layers: W' = W scale / sigma, b' = shift - mu scale / sigma.

    W is the weight, or the weight with centred rows.
    """
    folded, biases = [], []
    shift, scale = (_joined(vectors) for vectors in (shifts, scales))
    for rows, unit, weight in zip(layout.rows, unit_rows(layout, weights, shift, scale, given), weights, strict=True):
        own_shift, own_scale = (_own(rows, vector, unit.var) for vector in (shift, scale))
        rate = rate_of(own_scale, unit.var)
        folded.append(_from_matrix(unit.matrix * rate[..., None, None], rows, weight).to(weight.dtype))
        biases.append((own_shift - unit.mean * rate).flatten().to(weight.dtype))
    return folded, biases


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


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, where the device has it."""
    return contextlib.nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def rate_of(scale: Tensor, var: Tensor) -> Tensor:
    """scale / sigma; 0 for a row of zeros (or of equal weights, centred): its output is its shift, without gradient."""
    alive = var > 0
    return torch.where(alive, scale * torch.where(alive, var, torch.ones_like(var)).rsqrt(), torch.zeros_like(scale))


def output_statistics(
    layout: Layout, weights: Sequence[Tensor], shifts: Sequence[Tensor], scales: Sequence[Tensor], given: Pair | None
) -> list[Pair]:
    """Mean and standard deviation of every layer's output channels before the normalization, without bias."""
    units = unit_rows(layout, weights, _joined(shifts), _joined(scales), given)
    return [((unit.mean * unit.size).flatten(), (safe_sqrt(unit.var) * unit.size).flatten()) for unit in units]


def _joined(vectors: Sequence[Tensor]) -> Tensor:
    """All in one, on the device of the first."""
    return torch.cat([vector.to(vectors[0].device) for vector in vectors])


def _own(rows: Rows, vector: Tensor, like: Tensor) -> Tensor:
    """The part of a vector over all sources that belongs to the rows of a layer."""
    return vector[rows.first_row : rows.first_row + rows.outputs].to(like).view_as(like)


def unit_rows(
    layout: Layout, weights: Sequence[Tensor], shift: Tensor, scale: Tensor, given: Pair | None
) -> list[UnitRows]:
    """The rows of every layer with the mean and variance of what they make of what enters."""
    with full_precision(shift.device):
        mean, var = entering(layout.lanes, shift, scale, given)
        sizes = [rows.groups * rows.channels for rows in layout.rows]
        parts = zip(layout.rows, weights, mean.split(sizes), var.split(sizes), strict=True)
        return [_unit_rows(rows, weight, *own) for rows, weight, *own in parts]


def entering(lanes: Lanes, shift: Tensor, scale: Tensor, given: Pair | None) -> Pair:
    """Mean and variance of all that enters the layers, channel after channel; epsilon goes with the variance."""
    device, work = shift.device, working_dtype(shift.device)
    means = [shift.to(work), lanes.constant_mean.to(device, work)]
    variances = [scale.to(work).square(), lanes.constant_var.to(device, work)]
    for parts, more in zip((means, variances), given or (), strict=False):
        parts.append(more)
    mean, var = torch.cat(means), torch.cat(variances)
    for step in lanes.steps:
        arguments = [(mean[lane], var[lane]) for lane in (numbers.to(device) for numbers in step.inputs)]
        new_mean, new_var = step.function.moments(*arguments)
        mean, var = torch.cat([mean, new_mean]), torch.cat([var, new_var])
    return mean[lanes.entering.to(device)], var[lanes.entering.to(device)] + EPS


def _unit_rows(rows: Rows, weight: Tensor, mean: Tensor, var: Tensor) -> UnitRows:
    """The formula of `layout.Rows`."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    matrix = _as_matrix(weight, rows)
    size = powers_of_two(matrix.detach().abs().amax((2, 3)))
    matrix, taps = matrix / size[..., None, None], rows.taps.to(weight)
    matrix = minus_row_mean(matrix, (2, 3)) if rows.centred else matrix
    mean, var = (part.to(weight).view(rows.groups, 1, -1, 1) for part in (mean, var))
    levers = (matrix * mean).sum(2) @ taps
    noise = (matrix.square() * var).sum(2) @ taps[:, 0]
    return UnitRows(matrix, size, levers[..., 0], noise + levers[..., 1:].square().sum(-1))


def _as_matrix(weight: Tensor, rows: Rows) -> Tensor:
    taps = rows.tap_count
    if rows.transposed:
        return weight.reshape(rows.groups, rows.channels, -1, taps).transpose(1, 2)
    return weight.reshape(rows.groups, -1, rows.channels, taps)


def _from_matrix(matrix: Tensor, rows: Rows, weight: Tensor) -> Tensor:
    return (matrix.transpose(1, 2) if rows.transposed else matrix).reshape(weight.shape)
