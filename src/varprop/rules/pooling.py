"""Average and maximum pooling of independent values, interpolation, sampling on a grid and overlapping sums.

Maxima are order statistics of independent Gaussians, by a quadrature whose error is below 1e-7 of a standard deviation:
they count as exact. Interpolation is a fixed linear map.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gaussian import maximum
from ..gaussian.normal import constant
from ..graph.node import Node
from ..moments import Moments
from .axes import Ints, Value, lift, mixture, per_axis, uniform_axes, write_out
from .linear import of_average
from .registry import rule

aten = torch.ops.aten

# What a pooling window reads along an axis: positions, "one past the end" for none; or so many equal values.
Reads = Tensor | int

WINDOWS = "windows of adaptive pooling differ in size: their statistics are pooled on uniform axes"
BORDER = "padding and cut-off windows are ignored on uniform axes: the statistics hold away from the border"


def _sum_pool(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool) -> Tensor:
    """Sums over windows of one, two or three axes."""
    if len(kernel) == 1:
        return _sum_pool(x.unsqueeze(-2), [1, *kernel], [1, *stride], [0, *padding], ceil_mode).squeeze(-2)
    pool = F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d
    return pool(x, kernel, stride, padding, ceil_mode, divisor_override=1)


def _sizes(extent: int, kernel: int, stride: int, padding: int, ceil_mode: bool, include: bool) -> list[int]:
    """The number of elements each window along an axis is divided by."""
    count = _count(extent, kernel, stride, padding, 1, ceil_mode)
    low, high = (-padding, extent + padding) if include else (0, extent)
    starts = [stride * i - padding for i in range(count)]
    return [min(start + kernel, high) - max(start, low) for start in starts]


def _count(extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """The number of windows; with ``ceil_mode`` also those that begin inside but end outside."""
    reach = extent + 2 * padding - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= extent + padding else count


def _overlap(
    x: Node, kernel_size: Sequence[int], stride: Ints = (), padding: Ints = 0, *_further: Any, **_named: Any
) -> bool:
    """True if windows share elements."""
    count = len(kernel_size)
    numbers = (per_axis(value, count) for value in (stride or kernel_size, padding))
    axes = zip(x.info.shape[-count:], kernel_size, *numbers, strict=True)
    return any(step < size <= extent + 2 * pad - step for extent, size, step, pad in axes)


def _share_edges(x: Node, output_size: Sequence[int]) -> bool:
    """True if windows of adaptive pooling share elements."""
    axes = zip(x.info.shape[-len(output_size) :], output_size, strict=True)
    return any(count > 1 and extent % count > 0 for extent, count in axes)


_POOL: dict[str, Any] = {"per_channel": True, "channels": 1, "overlaps": _overlap}
_ADAPTIVE: dict[str, Any] = _POOL | {"overlaps": _share_edges}
_MAXIMUM: dict[str, Any] = {"order_statistic": True, "maximum": True}


def _outer(sizes: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Products of one number from every axis."""
    total = like.new_ones(())
    for numbers in sizes:
        total = total.unsqueeze(-1) * constant(tuple(numbers), like)
    return total


def _ignores_border(
    x: Moments,
    kernel_size: Sequence[int],
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> str | None:
    count = len(kernel_size)
    numbers = (per_axis(value, count) for value in (stride or kernel_size, padding, dilation))
    axes = zip(uniform_axes(x, count), x.full[-count:], kernel_size, *numbers, strict=True)
    for uniform, extent, size, step, pad, gap in axes:
        cut = ceil_mode and (extent - gap * (size - 1) - 1) % step > 0
        if uniform and (pad > 0 or cut):
            return BORDER
    return None


@rule(
    aten.avg_pool1d,
    aten.avg_pool2d,
    aten.avg_pool3d,
    operation="average window",
    approximate=lambda x, size, step=(), pad=0, ceil=False, *_: _ignores_border(x, size, step, pad, 1, ceil),
    averages=True,
    convolution=of_average,
    **_POOL,
)
def avg_pool(
    x: Moments,
    kernel_size: Sequence[int],
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Moments:
    """E = sum E_i / d, Var = sum Var_i / d^2 over a window of independent values with divisor d (mathematics.md, 7)."""
    count, kernel = len(kernel_size), list(kernel_size)
    steps, pads = per_axis(stride or kernel_size, count), per_axis(padding, count)
    copies = 1
    for axis, uniform in enumerate(uniform_axes(x, count)):
        if uniform:
            copies *= kernel[axis]
            kernel[axis], steps[axis], pads[axis] = 1, 1, 0
    settings = (kernel, steps, pads, ceil_mode)
    axes = zip(x.shape[-count:], kernel, steps, pads, strict=True)
    sizes = [_sizes(*axis, ceil_mode, count_include_pad) for axis in axes]
    divisor = divisor_override or copies * _outer(sizes, x.mean)
    mean, var = (copies * _sum_pool(t, *settings) / divisor for t in (x.mean, x.var))
    return Moments(mean, var / divisor)


def _edges(extent: int, count: int) -> list[tuple[int, int]]:
    """Begin and end of the windows of adaptive pooling."""
    return [(i * extent // count, -(-(i + 1) * extent // count)) for i in range(count)]


def _window_sizes(extent: int, count: int) -> dict[int, float]:
    """How large the windows of adaptive pooling are, and the share of each size."""
    sizes = Counter(stop - start for start, stop in _edges(extent, count))
    return {size: number / count for size, number in sizes.items()}


def _typical(extent: int, count: int) -> float:
    """The size of windows for which 1 / size is the average of all of them."""
    return 1.0 / sum(share / size for size, share in _window_sizes(extent, count).items())


def _pools_windows(x: Moments, output_size: Sequence[int]) -> str | None:
    count = len(output_size)
    axes = zip(uniform_axes(x, count), x.full[-count:], output_size, strict=True)
    return WINDOWS if any(u and len(_window_sizes(n, m)) > 1 for u, n, m in axes) else None


@rule(
    aten.adaptive_avg_pool1d,
    aten.adaptive_avg_pool2d,
    aten.adaptive_avg_pool3d,
    aten._adaptive_avg_pool2d,
    aten._adaptive_avg_pool3d,
    operation="adaptive average",
    averages=True,
    approximate=_pools_windows,
    **_ADAPTIVE,
)
def adaptive_avg_pool(x: Moments, output_size: Sequence[int]) -> Moments:
    """E = mean of E_i, Var = mean of Var_i / k over windows of k independent values.

    On uniform axes windows of different size have equal means, so that their variances are averaged.
    """
    count = len(output_size)
    uniform = uniform_axes(x, count)
    target: Any = [1 if u else n for u, n in zip(uniform, output_size, strict=True)]
    extents = zip(uniform, x.full[-count:], output_size, strict=True)
    sizes = [[_typical(n, m)] if u else [stop - start for start, stop in _edges(n, m)] for u, n, m in extents]
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[count - 1]
    return Moments(pool(x.mean, target), pool(x.var, target) / _outer(sizes, x.mean))


def _window_positions(
    extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool, device: torch.device
) -> Tensor:
    count = _count(extent, kernel, stride, padding, dilation, ceil_mode)
    first = torch.arange(count, device=device)[:, None] * stride - padding
    reads = first + dilation * torch.arange(kernel, device=device)
    return torch.where((reads >= 0) & (reads < extent), reads, extent)


def _adaptive_positions(extent: int, count: int, device: torch.device) -> Tensor:
    edges = _edges(extent, count)
    start, stop = torch.tensor(edges, device=device).T.unsqueeze(-1)
    reads = start + torch.arange(max(last - first for first, last in edges), device=device)
    return torch.where(reads < stop, reads, extent)


def _windows(x: Tensor, absent: Tensor, reads: Sequence[Reads]) -> Tensor:
    """The elements that every window reads, on one new axis at the end; ``absent`` where it reads none."""
    first = x.ndim - len(reads)
    for axis, positions in enumerate(reads, first):
        if isinstance(positions, int):
            x = x.unsqueeze(-1).expand(*x.shape, positions)
        else:
            x = torch.cat([x, absent.expand(x.narrow(axis, 0, 1).shape)], axis)
            x = x.index_select(axis, positions.flatten()).unflatten(axis, positions.shape)
            x = x.movedim(axis + 1, -1)
    return x.flatten(-len(reads))


def _maximum(x: Moments, reads: Sequence[Reads]) -> Moments:
    """The maximum over windows; what they read outside lies 40 standard deviations below everything else."""
    copies = [positions for positions in reads if isinstance(positions, int)]
    if len(copies) == len(reads):
        return Moments(*maximum.iid(x.mean, x.std, prod(copies)))
    widest = x.std.amax().detach()
    lowest = x.mean.amin().detach() - 40 * widest
    return Moments(*maximum.independent(_windows(x.mean, lowest, reads), _windows(x.std, widest, reads), -1))


@rule(aten.max_pool1d, aten.max_pool2d, aten.max_pool3d, approximate=_ignores_border, **_MAXIMUM, **_POOL)
def max_pool(
    x: Moments,
    kernel_size: Sequence[int],
    stride: Ints = (),
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
) -> Moments:
    """Maximum of independent Gaussians over a window; on uniform axes of as many equal ones (mathematics.md, 7)."""
    count = len(kernel_size)
    numbers = (per_axis(value, count) for value in (stride or kernel_size, padding, dilation))
    reads: list[Reads] = []
    for uniform, *axis in zip(uniform_axes(x, count), x.shape[-count:], kernel_size, *numbers, strict=True):
        extent, size, step, pad, gap = axis
        reads.append(size if uniform else _window_positions(extent, size, step, pad, gap, ceil_mode, x.device))
    return _maximum(x, reads)


@rule(
    aten.max_pool1d_with_indices,
    aten.max_pool2d_with_indices,
    aten.max_pool3d_with_indices,
    approximate=_ignores_border,
    **_MAXIMUM,
    **_POOL,
)
def max_pool_with_indices(x: Moments, *args: Any, **kwargs: Any) -> tuple[Moments, None]:
    """Moments as by `max_pool`; the index of the maximum has none."""
    return max_pool(x, *args, **kwargs), None


@rule(
    aten.adaptive_max_pool1d,
    aten.adaptive_max_pool2d,
    aten.adaptive_max_pool3d,
    approximate=_pools_windows,
    **_MAXIMUM,
    **_ADAPTIVE,
)
def adaptive_max_pool(x: Moments, output_size: Sequence[int]) -> tuple[Moments, None]:
    """Maximum of independent Gaussians over windows that share the axis evenly (mathematics.md, 7).

    On uniform axes windows of different size are pooled: E = mean E_p, Var = mean Var_p + spread E_p.
    """
    count = len(output_size)
    kinds: list[list[tuple[Reads, float]]] = []
    for uniform, extent, size in zip(uniform_axes(x, count), x.full[-count:], output_size, strict=True):
        if uniform:
            kinds.append([*_window_sizes(extent, size).items()])
        else:
            kinds.append([(_adaptive_positions(extent, size, x.device), 1.0)])
    choices = (zip(*kind, strict=True) for kind in product(*kinds))
    return mixture([(prod(shares), _maximum(x, reads)) for reads, shares in choices]), None


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
    shape = [extent if index == axis else 2 for index in range(len(size))]
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
    aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d, aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa,
):  # fmt: skip
    _interpolation(_op)

for _op in (
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d,
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
):  # fmt: skip
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
    grid, samples = grid.dense(), []
    for points in product(_HERMITE, repeat=grid.shape[-1]):
        shift = torch.tensor([z for z, _ in points], dtype=x.dtype, device=x.device)
        samples.append((prod(w for _, w in points), _sampled(x, grid.mean + grid.std * shift, *settings)))
    return mixture(samples)


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
    position = (grid + 1) * (extent - 1) / 2 if align_corners else ((grid + 1) * extent - 1) / 2
    position = position.clamp(torch.zeros_like(extent), extent - 1) if padding_mode == _BORDER else position
    var = torch.zeros_like(mean)
    for corner in product((0, 1), repeat=x.ndim - 2):
        near = position.floor() + torch.tensor(corner, dtype=x.dtype, device=x.device)
        weight = (1 - (position - near).abs()).prod(-1).square().unsqueeze(1)
        var = var + weight * torch.grid_sampler(x.var, (2 * near + 1) / extent - 1, _NEAREST, _ZEROS, False)
    return Moments(mean, var)


@rule(aten.col2im, multilinear=True, mixes_positions=True)
def col2im(x: Moments, *args: Any) -> Moments:
    """Overlapping patches added up: E = sum E_i, Var = sum Var_i of independent values."""
    x = write_out(x, -2, -1)
    return Moments(aten.col2im(x.mean, *args), aten.col2im(x.var, *args))
