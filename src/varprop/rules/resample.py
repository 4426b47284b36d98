"""Interpolation, sampling on a grid and overlapping sums: fixed linear maps of independent values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments
from .axes import Value, lift, mixture, uniform_axes, write_out
from .registry import rule

aten = torch.ops.aten
# Codes of the sampler's modes.
_ZEROS, _BORDER, _NEAREST = 0, 1, 1
_GRIDS = [(mode, padding) for mode in (0, _NEAREST) for padding in (_ZEROS, _BORDER)]  # 0: linear along every axis

# Nodes and weights of the five-point Gauss-Hermite rule for a standard normal variable.
_HERMITE = (
    (0.0, 8 / 15),
    (-1.355626179974266, 0.22207592200561264),
    (1.355626179974266, 0.22207592200561264),
    (-2.8569700138728056, 0.011257411327720689),
    (2.8569700138728056, 0.011257411327720689),
)
PLACE = (
    "a random place is averaged over five points an axis of its distribution (std error 1 %, at worst 7 %, for a place "
    "with a std of 0.2 pixels; 9 %, at worst 32 %, for 0.8; 16 %, at worst 58 %, for 2.4)"
)
_RESIZE: dict[str, Any] = {"resizes": True, "per_channel": True, "channels": 1}
POOLED = "on uniform axes the variance is the average over the positions between the samples"


def _size(x: Moments, output_size: Sequence[int] | None, scales: Any) -> list[int]:
    """Output extents, given as such or (overload ``.vec``) by scales."""
    if output_size is not None:
        return list(output_size)
    return [int(n * scale) for n, scale in zip(x.full[-len(scales[0]) :], scales[0], strict=True)]


def _axis_weights(op: Any, extent: int, axis: int, size: list[int], like: Tensor, *settings: Any) -> Tensor:
    """The interpolation along one axis as a matrix, input by output: the operation applied to unit vectors.

    The other axes have extent 2: antialiased interpolation of torch 2.13 is wrong beside an axis of extent 1.
    """
    target = [2] * len(size)
    target[axis] = size[axis]
    unit = torch.eye(extent, dtype=like.dtype, device=like.device).view(extent, 1, *[1] * len(size), extent)
    unit = unit.transpose(2 + axis, -1).squeeze(-1)
    shape = [extent if other == axis else 2 for other in range(len(size))]
    weights: Tensor = op.default(unit.expand(-1, -1, *shape).contiguous(), target, *settings)
    return weights.movedim(2 + axis, 1).flatten(1)[:, :: 2 ** (len(size) - 1)]


def _only(axis: int, count: int, scales: Any) -> list[float | None]:
    """The scale of one axis, from either overload, and none for the others."""
    listed = scales[0] if scales and isinstance(scales[0], Sequence) else scales
    return [listed[i] if i == axis and i < len(listed) else None for i in range(count)]


def _pools_positions(x: Moments, output_size: Sequence[int] | None, align_corners: bool, *scales: Any) -> str | None:
    size = _size(x, output_size, scales)
    axes = zip(uniform_axes(x, len(size)), size, x.full[-len(size) :], strict=True)
    return POOLED if any(uniform and new != old for uniform, new, old in axes) else None


def _along(x: Tensor, weights: Tensor, axis: int) -> Tensor:
    return (x.movedim(axis, -1) @ weights).movedim(-1, axis)


def _interpolation(op: Any) -> None:
    """Register both overloads of an interpolation whose weights are products over the axes and sum to one."""

    @rule(op, approximate=_pools_positions, **_RESIZE)
    def interpolate(x: Moments, output_size: Sequence[int] | None, align_corners: bool, *scales: Any) -> Moments:
        """E = A E[x], Var = A^2 Var[x], one axis after the other.

        On a uniform axis the mean stays and the variance is averaged over the outputs.
        """
        size, mean, var = _size(x, output_size, scales), x.mean, x.var
        count = len(size)
        for axis, uniform in enumerate(uniform_axes(x, count)):
            settings = (align_corners, *_only(axis, count, scales))
            weights = _axis_weights(op, x.full[axis - count], axis, size, x.mean, *settings)
            if uniform:
                var = var * weights.square().sum(0).mean()
            else:
                mean, var = _along(mean, weights, axis - count), _along(var, weights.square(), axis - count)
        return Moments(mean, var)


def _nearest(op: Any) -> None:
    """Register both overloads of an operation that repeats elements."""

    @rule(op, **_RESIZE)
    def repeat(x: Moments, output_size: Sequence[int] | None, *scales: Any) -> Moments:
        """Copies keep mean and variance (that copies are equal is not carried on)."""
        axes = range(-(x.ndim - 2), 0)
        uniform, x = uniform_axes(x, len(axes)), write_out(x, *axes)
        mean, var = (op(t, output_size, *scales) for t in (x.mean, x.var))
        for axis, same in zip(axes, uniform, strict=True):
            if same:
                mean, var = mean.narrow(axis, 0, 1), var.narrow(axis, 0, 1)
        return Moments(mean, var)


for _op in (
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa,
):
    _interpolation(_op)

for _op in (
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d,
):
    _nearest(_op)


@rule(
    aten.grid_sampler,
    aten.grid_sampler_2d,
    aten.grid_sampler_3d,
    handles=lambda _x, _grid, mode, padding, _corners: (mode, padding) in _GRIDS,
    approximate=lambda _x, grid, *_: PLACE if isinstance(grid, Moments) else None,
)
def grid_sampler(x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Moments:
    """Sampling at constant places, or the average of that over the points of a random place's distribution.

    With P the place: E = E[E[y | P]], Var = E[Var[y | P]] + Var[E[y | P]].
    """
    x = lift(x)
    settings = (interpolation_mode, padding_mode, align_corners)
    if isinstance(grid, Tensor):
        return _sampled(x, grid, *settings)
    grid, found = grid.dense(), []
    for points in product(_HERMITE, repeat=grid.shape[-1]):
        shift = torch.tensor([z for z, _ in points], dtype=x.dtype, device=x.device)
        found.append((prod(w for _, w in points), _sampled(x, grid.mean + grid.std * shift, *settings)))
    return mixture(found)


def _sampled(x: Moments, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Moments:
    """Multilinear (or nearest) sampling at constant places: E = A E[x], Var = A^2 Var[x].

    The variance adds, over the corners of a position's cell, the squared weight times the variance there.
    """
    settings = (interpolation_mode, padding_mode, align_corners)
    x = write_out(x, 0, *range(2, x.ndim))
    mean = torch.grid_sampler(x.mean, grid, *settings)
    if interpolation_mode == _NEAREST:
        return Moments(mean, torch.grid_sampler(x.var, grid, *settings))
    extent = torch.tensor(x.shape[:1:-1], dtype=x.dtype, device=x.device)
    place = (grid + 1) * (extent - 1) / 2 if align_corners else ((grid + 1) * extent - 1) / 2
    place = place.clamp(torch.zeros_like(extent), extent - 1) if padding_mode == _BORDER else place
    var = torch.zeros_like(mean)
    for corner in product((0, 1), repeat=x.ndim - 2):
        near = place.floor() + torch.tensor(corner, dtype=x.dtype, device=x.device)
        weight = (1 - (place - near).abs()).prod(-1).square().unsqueeze(1)
        var = var + weight * torch.grid_sampler(x.var, (2 * near + 1) / extent - 1, _NEAREST, _ZEROS, False)
    return Moments(mean, var)


@rule(aten.col2im, multilinear=True, mixes_positions=True)
def col2im(x: Moments, *args: Any) -> Moments:
    """Overlapping patches added up: E = sum E_i, Var = sum Var_i of independent values."""
    x = write_out(x, -2, -1)
    return Moments(aten.col2im(x.mean, *args), aten.col2im(x.var, *args))
