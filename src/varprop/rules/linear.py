"""Linear layers and convolutions: weighted sums of independent values.

Convolutions over uniform axes have statistics pooled over all positions, the border included. Near the border some taps
fall on zeros, so mean and variance differ from position to position. Their pooled values (those of a unit at a random
position, which is what batch norm measures) need only the share of positions at which each set of taps lies inside:
E = mean_p E_p, Var = mean_p Var_p + spread_p E_p (mathematics.md, section 8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gaussian.normal import constant
from ..graph import ops
from ..moments import Moments
from .axes import Ints, Value, dense, extents, lift, moved, per_axis, uniform_axes, write_out
from .registry import rule

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """The weights of a convolution and how they move; one number an axis."""

    weight: Any  # (out, in / groups, taps...), or (in, out / groups, taps...) of a transposed convolution
    bias: Any  # what is added to every output, if anything
    stride: list[int]  # steps from one output position to the next (from one input position if transposed)
    zeros: list[tuple[int, int]]  # how many stand before and behind each axis
    dilation: list[int]  # steps from one tap to the next
    groups: int = 1  # into how many groups channels are divided
    transposed: bool = False  # whether it is the transpose of a convolution
    extra: Sequence[int] = ()  # of a transposed one: positions added behind each axis of the output


def zeros_around(weight: Value, padding: Ints | str, dilation: Ints) -> list[tuple[int, int]]:
    """Zeros before and behind each axis."""
    count = weight.ndim - 2
    if padding == "same":  # the odd one behind
        totals = [gap * (size - 1) for gap, size in zip(per_axis(dilation, count), weight.shape[2:], strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(pad, pad) for pad in per_axis(0 if isinstance(padding, str) else padding, count)]


def of_conv(
    x: Any,
    weight: Value,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints | str = 0,
    dilation: Ints = 1,
    groups: int = 1,
) -> Convolution:
    """The settings of ``conv1d``, ``conv2d`` and ``conv3d``, from their arguments."""
    count, weight, bias = weight.ndim - 2, dense(weight), None if bias is None else dense(bias)
    zeros = zeros_around(weight, padding, dilation)
    return Convolution(weight, bias, per_axis(stride, count), zeros, per_axis(dilation, count), groups)


def of_transposed(
    x: Any,
    weight: Value,
    bias: Any = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
) -> Convolution:
    """The settings of ``conv_transpose1d``, ``conv_transpose2d`` and ``conv_transpose3d``, from their arguments."""
    plain = of_conv(x, weight, bias, stride, padding, dilation, groups)
    return replace(plain, transposed=True, extra=per_axis(output_padding, weight.ndim - 2))


def either(plain: Callable[..., Any], transposed: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the arguments of ``aten.convolution``, from those for ``conv2d`` and for ``conv_transpose2d``."""

    def chosen(
        x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, turned: bool, extra: Any, groups: int
    ) -> Any:
        if turned:
            return transposed(x, weight, bias, stride, padding, extra, groups, dilation)
        return plain(x, weight, bias, stride, padding, dilation, groups)

    return chosen


def of_average(x: Moments, kernel_size: Sequence[int], stride: Ints = (), padding: Ints = 0, *_: Any) -> Convolution:
    """A window of an average: every channel by itself, with equal taps."""
    sizes, channels = list(kernel_size), x.full[-len(kernel_size) - 1]
    shape = (channels, 1, *sizes)
    weight = torch.full(shape, 1 / math.prod(sizes), dtype=torch.float64, device=x.device)
    steps = per_axis(stride or sizes, len(sizes))
    return Convolution(weight, None, steps, zeros_around(weight, padding, 1), [1] * len(sizes), channels)


BLOCK = 2**18  # weights that stay in the cache
Sets = dict[tuple[bool, ...], float]  # which taps take part, and the share of positions at which just these do


def pooled_convolution(x: Moments, convolution: Convolution) -> Moments:
    """Moments of a convolution with constants at a random position, for an input uniform along every spatial axis."""
    weight, bias, count = convolution.weight, convolution.bias, len(convolution.stride)
    axes = tuple(
        zip(x.full[-count:], weight.shape[2:], convolution.stride, convolution.zeros, convolution.dilation, strict=True)
    )
    masks, shares = (torch.tensor(values, dtype=weight.dtype, device=weight.device) for values in _patterns(axes))
    # a column for every set of taps inside
    mean, var = (taps @ masks for taps in _moments_per_tap(x, weight, convolution.groups))
    centre = (mean @ shares)[..., None]
    pooled = ((mean - centre).square() + var) @ shares
    centre = centre[..., 0] if bias is None else centre[..., 0] + bias
    shape = (*x.shape[: x.ndim - count - 1], -1, *[1] * count)
    return Moments(centre.reshape(shape), pooled.reshape(shape))


@lru_cache(maxsize=256)
def _patterns(axes: tuple[tuple[int, int, int, tuple[int, int], int], ...]) -> tuple[list[list[float]], list[float]]:
    """The sets of taps inside the image that occur (taps x sets), and the share of positions of each."""
    per_axis_sets = [_along_axis(*axis) for axis in axes]
    columns = [
        [float(all(taps)) for taps in product(*sets)]
        for sets in product(*(list(axis_sets) for axis_sets in per_axis_sets))
    ]
    shares = [math.prod(factors) for factors in product(*(list(axis_sets.values()) for axis_sets in per_axis_sets))]
    return [list(row) for row in zip(*columns, strict=True)], shares


def _along_axis(size: int, taps: int, stride: int, padding: tuple[int, int], dilation: int) -> Sets:
    positions = (size + sum(padding) - dilation * (taps - 1) - 1) // stride + 1
    starts = (position * stride - padding[0] for position in range(positions))
    return _shares(tuple(0 <= start + tap * dilation < size for tap in range(taps)) for start in starts)


@lru_cache(maxsize=256)
def meeting_taps(size: int, taps: int, stride: int, padding: int, output_padding: int, dilation: int) -> Sets:
    """The sets of taps of a transposed convolution that meet at an output position, along one axis.

    Tap k of the input at i lands on i stride + k dilation - padding.
    """
    positions = (size - 1) * stride - 2 * padding + dilation * (taps - 1) + output_padding + 1
    lands = {(i * stride + tap * dilation - padding, tap) for i in range(size) for tap in range(taps)}
    return _shares(tuple((position, tap) in lands for tap in range(taps)) for position in range(positions))


def _shares(sets: Iterable[tuple[bool, ...]]) -> Sets:
    counts = Counter(sets)
    return {taps: count / counts.total() for taps, count in counts.items()}


def _per_tap(weight: Tensor, values: Tensor, groups: int) -> Tensor:
    """sum_i w_oij x_i for every output channel o and tap j, as (batch, o, taps)."""
    rows = weight.flatten(2).unflatten(0, (groups, -1))
    values = values.reshape(-1, groups, 1, 1, weight.shape[1])  # the spatial axes have extent one
    taps: Tensor = (values @ rows).flatten(1, 3)
    return taps


def _moments_per_tap(x: Moments, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """`_per_tap` of the means with w and of the variances with w², block by block of output channels.

    A block is read from memory once and its squares never leave the cache, which halves the time of a large layer.
    """
    blocks = weight.split(max(1, BLOCK // weight[0].numel())) if groups == 1 else [weight]
    pairs = [(_per_tap(b, x.mean, groups), _per_tap(b.square(), x.var, groups)) for b in blocks]
    mean, var = (torch.cat(pieces, dim=1) for pieces in zip(*pairs, strict=True))
    return mean, var


BORDER = "zero padding is ignored on uniform axes: the statistics are those of positions away from the border"
POOLED = "zero padding makes the border differ: the statistics of all positions of a uniform axis are pooled"
PHASES = (
    "the positions of a transposed convolution see different taps: those of a uniform axis are pooled, border and all"
)
LARGE = 1 << 22  # weights whose squares are not worth making part by part
PART = 1 << 21  # weights whose squares stay in the cache of a processor
_LAYER: dict[str, Any] = {"linear": True, "weighted": True, "channels": 1, "bias": 2}


def _weighted(apply: Callable[..., Tensor], x: Value, weight: Value, bias: Value | None) -> Moments:
    """Independent terms: E = sum E[w] E[x] + E[b], Var = sum E[w]^2 Var x + Var w E[x^2] + Var b."""
    x = lift(x)
    fixed, noise = (bias.mean, bias.var) if isinstance(bias, Moments) else (bias, None)
    if not isinstance(weight, Moments):
        return Moments(apply(x.mean, weight, fixed), apply(x.var, weight.square(), noise))
    weight = weight.dense()
    second = weight.mean.square() + weight.var
    var = apply(x.var, second, noise) + apply(x.mean.square(), weight.var, None)
    return Moments(apply(x.mean, weight.mean, fixed), var)


@rule(aten.linear, linear=True, weighted=True, channels=-1, bias=2)
def linear(x: Value, weight: Value, bias: Value | None = None) -> Moments:
    """Uncorrelated inputs: E = W E[x] + b, Var = W^2 Var[x] (paper, eq. 3); random weights: product rule."""
    x, bias = write_out(lift(x), -1), None if bias is None else dense(bias)
    if isinstance(weight, Tensor) and weight.numel() > LARGE and weight.device.type == "cpu":
        return _weighted_in_parts(x, weight, bias)
    return _weighted(F.linear, x, weight, bias)


@rule(ops.transposed_linear, linear=True, weighted=True, channels=-1, bias=2)
def transposed_linear(x: Value, weight: Value, bias: Value | None = None) -> Moments:
    """`linear` with a weight (in, out)."""
    return linear(x, moved(weight, lambda t: t.mT), bias)


def _weighted_in_parts(x: Moments, weight: Tensor, bias: Value | None) -> Moments:
    """`linear` with no more squared weights at a time than stay in the cache of a processor."""
    fixed, noise = (bias.mean, bias.var) if isinstance(bias, Moments) else (bias, None)
    rows = max(1, PART // weight.shape[1])
    var = torch.cat([F.linear(x.var, block.square()) for block in weight.split(rows)], -1)
    return Moments(F.linear(x.mean, weight, fixed), var if noise is None else var + noise)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """`torch.convolution` for inputs with or without a batch axis."""
    if x.ndim == weight.ndim:
        return torch.convolution(x, weight, bias, *settings)
    return torch.convolution(x.unsqueeze(0), weight, bias, *settings).squeeze(0)


def border(x: Value, *arguments: Any, **named: Any) -> str | None:
    """Why a convolution over uniform axes is approximate, if zeros around them make it so."""
    return _border(x, of_conv(x, *arguments, **named))


def _border(x: Value, settings: Convolution) -> str | None:
    axes = uniform_axes(x, len(settings.zeros))
    if not any(same and any(pad) for same, pad in zip(axes, settings.zeros, strict=True)):
        return None
    fixed = isinstance(settings.weight, Tensor) and not isinstance(settings.bias, Moments)
    return POOLED if all(axes) and fixed else BORDER


@rule(aten.conv1d, aten.conv2d, aten.conv3d, approximate=border, convolution=of_conv, **_LAYER)
def conv(x: Value, weight: Value, bias: Value | None = None, *settings: Any, **named: Any) -> Moments:
    """Uncorrelated inputs: E = sum_ij W_ij E[x_ij], Var = sum_ij W_ij^2 Var[x_ij] (mathematics.md, 8).

    A uniform axis shrinks to a single window, so that every tap sees the same value: this gives the sums of W
    and of W^2 over the taps in one convolution. With zero padding they are weighted by the share of positions at which
    each tap lies inside (`pooled_convolution`).
    """
    convolution, count = of_conv(x, weight, bias, *settings, **named), weight.ndim - 2
    uniform, reason, x = uniform_axes(x, count), _border(x, convolution), write_out(lift(x), -count - 1)
    if reason == POOLED:
        return pooled_convolution(x, convolution)
    zeros = [(0, 0) if same else pad for same, pad in zip(uniform, convolution.zeros, strict=True)]
    pads, margins = [before for before, _ in zeros], list[int]()
    if any(before != behind for before, behind in zeros):  # an even kernel and padding="same"
        pads, margins = [0] * count, [side for pad in reversed(zeros) for side in pad]
    steps, gaps, size = convolution.stride, convolution.dilation, list(x.shape)
    for axis in (axis for axis in range(count) if uniform[axis]):
        steps[axis], gaps[axis], size[axis - count] = 1, 1, convolution.weight.shape[axis + 2]
    mean, var = (F.pad(t.expand(size), margins) if margins else t.expand(size) for t in (x.mean, x.var))
    moves = (steps, pads, gaps, False, [0], convolution.groups)
    return _weighted(
        lambda t, w, b: _convolve(t, w, b, *moves), Moments(mean, var), convolution.weight, convolution.bias
    )


def _meetings(x: Value, convolution: Convolution) -> dict[int, Sets]:
    """For each uniform axis of the weight, which sets of taps meet at its output positions."""
    count, pads = len(convolution.stride), [pad for pad, _ in convolution.zeros]
    numbers = (convolution.weight.shape[2:], convolution.stride, pads, convolution.extra, convolution.dilation)
    axes = enumerate(zip(uniform_axes(x, count), extents(x)[-count:], *numbers, strict=True), 2)
    return {axis: meeting_taps(*values) for axis, (uniform, *values) in axes if uniform}


def _pools_phases(x: Value, *arguments: Any, **named: Any) -> str | None:
    meetings = _meetings(x, of_transposed(x, *arguments, **named))
    return PHASES if any(len(taps) > 1 for taps in meetings.values()) else None


def _sums(weight: Tensor, axis: int, sets: Sets) -> Tensor:
    """Sums of the taps of each set, along their axis."""
    masks = constant(tuple(float(tap) for taps in sets for tap in taps), weight).view(len(sets), -1)
    return (weight.movedim(axis, -1) @ masks.mT).movedim(-1, axis)


@rule(
    aten.conv_transpose1d,
    aten.conv_transpose2d,
    aten.conv_transpose3d,
    approximate=_pools_phases,
    convolution=of_transposed,
    transposed=True,
    **_LAYER,
)
def conv_transpose(x: Value, weight: Value, bias: Value | None = None, *settings: Any, **named: Any) -> Moments:
    """Uncorrelated inputs, as `conv`; which taps meet at an output position depends on where it lies.

    On a uniform axis all positions are pooled, those at the border included: E = mean_p E_p, Var = mean_p Var_p +
    spread_p E_p. Positions at which the same taps meet are alike, so one of each kind is computed (`meeting_taps`).
    """
    convolution, count = of_transposed(x, weight, bias, *settings, **named), weight.ndim - 2
    x, meetings = write_out(lift(x), -count - 1), _meetings(x, convolution)
    steps, pads = convolution.stride, [pad for pad, _ in convolution.zeros]
    gaps, extra = convolution.dilation, list(convolution.extra)
    for axis in meetings:
        steps[axis - 2], pads[axis - 2], gaps[axis - 2], extra[axis - 2] = 1, 0, 1, 0

    def apply(t: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        for axis, sets in meetings.items():
            w = _sums(w, axis, sets)
        return _convolve(t, w, b, steps, pads, gaps, True, extra, convolution.groups)

    moments = _weighted(apply, x, convolution.weight, convolution.bias)
    return pooled(moments, {axis - 2 - count: list(sets.values()) for axis, sets in meetings.items()})


def pooled(x: Moments, shares: dict[int, list[float]]) -> Moments:
    """Moments of a value at a random position, given the shares of the positions along some axes.

    E = mean E_p, Var = mean Var_p + spread E_p.
    """

    def averaged(values: Tensor) -> Tensor:
        for axis, fractions in shares.items():
            values = (values.movedim(axis, -1) @ constant(tuple(fractions), values)).unsqueeze(-1).movedim(-1, axis)
        return values

    if not shares:
        return x
    mean = averaged(x.mean)
    return Moments(mean, averaged(x.var + (x.mean - mean).square()))


rule(
    aten.convolution,
    approximate=either(border, _pools_phases),
    convolution=either(of_conv, of_transposed),
    transposed=lambda *args: args[6],
    **_LAYER,
)(either(conv, conv_transpose))


@rule(aten.bilinear, operation="bilinear", multilinear=True, mixes_positions=True, weighted=True, channels=-1)
def bilinear(x: Value, y: Value, weight: Value, bias: Value | None = None) -> Moments:
    """z_o = sum_ij W_oij x_i y_j + b_o with all x_i, y_j, and W_oij and b_o if random, independent; exact.

    Var = sum_i Var x_i (sum_j W_oij E y_j)^2 + sum_j Var y_j (sum_i W_oij E x_i)^2 + sum_ij W_oij^2 Var x_i
    Var y_j, with E W_oij for W_oij, + sum_ij Var W_oij E x_i^2 E y_j^2 + Var b_o.
    """
    x, y = write_out(lift(x), -1), write_out(lift(y), -1)
    spread = None
    if isinstance(weight, Moments):
        weight, spread = weight.mean, weight.var
    given_x = torch.einsum("oij,...i->...oj", weight, x.mean)
    given_y = torch.einsum("oij,...j->...oi", weight, y.mean)
    mean = torch.einsum("...oj,...j->...o", given_x, y.mean)
    var = torch.einsum("...oj,...j->...o", given_x.square(), y.var)
    var = var + torch.einsum("...oi,...i->...o", given_y.square(), x.var)
    products = torch.einsum("oij,...i->...oj", weight.square(), x.var)
    var = var + torch.einsum("...oj,...j->...o", products, y.var)
    if spread is not None:
        powers = (value.mean.square() + value.var for value in (x, y))
        var = var + torch.einsum("oij,...i,...j->...o", spread, *powers)
    if isinstance(bias, Moments):
        return Moments(mean + bias.mean, var + bias.var)
    return Moments(mean if bias is None else mean + bias, var)
