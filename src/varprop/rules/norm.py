"""Normalization layers: affine by stored statistics, exact, or by those of the input or of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import WrongMode
from ..gaussian import activations
from ..graph import ops
from ..moments import Moments
from .axes import at_random_place
from .reduction import root, sum_dim
from .registry import rule

aten = torch.ops.aten
Factor = Tensor | Moments | None

_SECOND_ORDER = (
    "second order in the spread of the input's own statistics (mean within 0.1 std; std error 0.3 %, at worst 3 %, "
    "over 16 values; 3 %, at worst 30 %, over 4)"
)


_GAMMA = "the squared norm is taken as a Gamma variable (std error up to 7 %, from 8 values on 4 %)"
STORED = "Batch norm has no statistics to normalize by here: call model.train(), or track running statistics."
BATCH = "the statistics of a batch are taken as those of infinitely many samples"


def affine(mean: Tensor, var: Tensor, weight: Factor, bias: Factor, shape: Sequence[int]) -> Moments:
    """Moments of weight x + bias, weight and bias (viewed as ``shape``) constant or independent of x.

    Var[w x] = Var[x] E[w]^2 + E[x^2] Var[w]; exact.
    """
    if isinstance(weight, Moments):
        scale, spread = weight.mean.view(shape), weight.var.view(shape)
        mean, var = mean * scale, var * (scale.square() + spread) + mean.square() * spread
    elif weight is not None:
        scale = weight.to(mean.dtype).view(shape)
        mean, var = mean * scale, var * scale.square()
    if isinstance(bias, Moments):
        mean, var = mean + bias.mean.view(shape), var + bias.var.view(shape)
    elif bias is not None:
        mean = mean + bias.to(mean.dtype).view(shape)
        var = var.expand_as(mean)
    return Moments(mean, var)


def standardize(
    mean: Tensor, var: Tensor, axes: Sequence[int], count: int, eps: float, center: bool
) -> tuple[Tensor, Tensor]:
    """Moments of xc / sqrt(avg xc^2 + eps) over ``axes``, where xc = x - avg x, or x itself without ``center``.

    Independent Gaussian x. With P the centering matrix, V = diag(var), q what stands under the root, D = E q, all in
    units of sqrt D: y = P mean, uc = diag(PVP), w = diag((PVP)^2), c = Cov(xc, q) = 2 PVy / n and
    r = Var q = avg(2w + 4 y^2 u) / n. To second order in q - D,

        E   = y (1 + 3r/8) - c/2
        Var = [uc - y c + y^2 r/4] + [uc r - 2w/n],

    the first bracket being the delta method (non-negative by Cauchy-Schwarz), the second the dependence of xc^2 on
    q, which keeps avg E[out^2] = 1 when the means vanish (moments spec, 8, has the first bracket only, without P).
    ``count`` = n is the model's number of elements; everything else is an average, so uniform axes stay stored once.
    """
    axes, fraction = list(axes), (1.0 / count if center else 0.0)

    def average(values: Tensor) -> Tensor:
        return values.mean(axes, keepdim=True)

    shifted = mean - average(mean) if center else mean
    power = average(shifted * shifted) + (1 - fraction) * average(var) + eps
    power = power.clamp_min(torch.finfo(mean.dtype).tiny ** 0.5)
    y, u = shifted * power.rsqrt(), var / power
    uu, uy, yy = u * u, u * y, y * y
    mean_u, mean_uu = average(u), average(uu)
    mean_uy = average(uy) if center else torch.zeros_like(mean_u)
    # w = (1 - 3 part) u^2 + both u + rest; the variance by powers of u and y, so that few passes are made over them
    cross_term, own_term = 2 * fraction * mean_u, fraction * (mean_uu - mean_u * mean_u)
    r = (2 * (mean_uu * (1 - 3 * fraction) + cross_term * mean_u + own_term) + 4 * average(uy * y)) / count
    by_u, by_yy = (1 - 2 * fraction) * (1 + r) - 2 * cross_term / count, 0.25 * r
    spread = torch.sub(u * by_u, uu, alpha=2 * (1 - 3 * fraction) / count)
    spread = torch.addcmul(spread, yy, by_yy - (2 / count) * u) + (fraction * mean_u * (1 + r) - 2 * own_term / count)
    spread = torch.addcmul(spread, y, 2 * mean_uy / count)
    return y * (1 + 0.375 * r) - (uy - mean_uy) / count, spread.clamp_min(0.0)


@rule(ops.standardize, approximate=_SECOND_ORDER, normalizes=True)
def standardized(x: Moments, dims: Sequence[int], eps: float, center: bool = True) -> Moments:
    """Layer normalization over any axes, without scale and shift; see `standardize`."""
    return Moments(*standardize(x.mean, x.var, dims, prod([x.full[axis] for axis in dims]), eps, center))


@rule(ops.rms_normalize, approximate=_SECOND_ORDER, normalizes=True)
def rms_normalized(x: Moments, dims: Sequence[int], eps: float) -> Moments:
    """x / sqrt(avg x^2 + eps) over any axes; see `standardize`."""
    return standardized(x, dims, eps, center=False)


@rule(ops.unit_normalize, approximate=_SECOND_ORDER, normalizes=True)
def unit_normalized(x: Moments, dims: Sequence[int], eps: float) -> Moments:
    """x / |x|, which is x / sqrt(avg x^2) / sqrt n; eps only keeps a zero vector finite."""
    count = prod([x.full[axis] for axis in dims])
    scaled = rms_normalized(x, dims, eps**2 / count)
    return Moments(scaled.mean / count**0.5, scaled.var / count)


@rule(aten.layer_norm, approximate=_SECOND_ORDER, normalizes=True, channels=-1)
def layer_norm(
    x: Moments, normalized_shape: Sequence[int], weight: Factor = None, bias: Factor = None, eps: float = 1e-5, *_: Any
) -> Moments:
    """Standardization over the trailing axes, then the affine map; see `standardize`."""
    y = standardized(x, range(-len(normalized_shape), 0), eps)
    return affine(y.mean, y.var, weight, bias, normalized_shape)


@rule(aten.native_layer_norm, approximate=_SECOND_ORDER, normalizes=True, channels=-1)
def native_layer_norm(x: Moments, *settings: Any) -> tuple[Moments, None, None]:
    """`layer_norm`; the saved statistics are not followed."""
    return layer_norm(x, *settings), None, None


@rule(aten.rms_norm, approximate=_SECOND_ORDER, normalizes=True, channels=-1)
def rms_norm(x: Moments, normalized_shape: Sequence[int], weight: Factor = None, eps: float | None = None) -> Moments:
    """x / sqrt(avg x^2 + eps) over the trailing axes, then the weight; see `standardize`."""
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = rms_normalized(x, range(-len(normalized_shape), 0), eps)
    return affine(y.mean, y.var, weight, None, normalized_shape)


@rule(aten.group_norm, approximate=_SECOND_ORDER, normalizes=True, channels=1)
def group_norm(
    x: Moments, num_groups: int, weight: Factor = None, bias: Factor = None, eps: float = 1e-5, *_: Any
) -> Moments:
    """Standardization over the channels of a group and all positions; see `standardize`."""
    groups = 1 if x.is_uniform(1) else num_groups  # channels stored once: so are the groups
    mean, var = (t.unflatten(1, (groups, -1)) for t in (x.mean, x.var))
    mean, var = standardize(mean, var, range(2, mean.ndim), prod(x.full[1:]) // num_groups, eps, True)
    return affine(mean.flatten(1, 2), var.flatten(1, 2), weight, bias, _channels(x))


@rule(aten.native_group_norm, approximate=_SECOND_ORDER, normalizes=True, channels=1)
def native_group_norm(
    x: Moments, weight: Factor, bias: Factor, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Moments, None, None]:
    """`group_norm`; the saved statistics are not followed."""
    return group_norm(x, group, weight, bias, eps), None, None


def _by_input(*arguments: Any) -> bool:
    return len(arguments) < 6 or bool(arguments[5])


@rule(
    aten.instance_norm,
    approximate=lambda *arguments: _SECOND_ORDER if _by_input(*arguments) else None,
    normalizes=_by_input,
    channels=1,
)
def instance_norm(
    x: Moments,
    weight: Factor,
    bias: Factor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Moments:
    """Standardization of every channel over its positions (`standardize`), or by stored statistics, exact."""
    if not use_input_stats:
        return _by_stored(x, weight, bias, running_mean, running_var, eps)
    mean, var = standardize(x.mean, x.var, range(2, x.ndim), prod(x.full[2:]), eps, True)
    return affine(mean, var, weight, bias, _channels(x))


def _channels(x: Moments) -> list[int]:
    return [-1] + [1] * (x.ndim - 2)


def _by_stored(
    x: Moments, weight: Factor, bias: Factor, mean: Tensor | None, var: Tensor | None, eps: float
) -> Moments:
    """(x - mean) / sqrt(var + eps) weight + bias with constant statistics by channel; exact."""
    if mean is None or var is None:
        raise WrongMode(STORED)
    shape = _channels(x)
    scale = (var.to(x.dtype) + eps).rsqrt().view(shape)
    shifted = (x.mean - mean.to(x.dtype).view(shape)) * scale
    return affine(shifted, (x.var * scale.square()).expand_as(shifted), weight, bias, shape)


def _by_batch(x: Moments, weight: Factor, bias: Factor, eps: float) -> Moments:
    """(x - m) / sqrt(v + eps) weight + bias with m and v of every channel over a large batch and all its positions.

    Where all positions are alike the mean is the bias, and the variance weight^2 but for eps.
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean, var = at_random_place(x, axes)
    scale = (var + eps).rsqrt()
    return affine((x.mean - mean) * scale, x.var * scale.square(), weight, bias, _channels(x))


@dataclass(frozen=True)
class Stored:
    """A batch norm in evaluation: scale and shift of every channel, and the statistics it has stored."""

    weight: Factor
    bias: Factor
    mean: Any
    var: Any
    eps: float


@rule(
    aten._native_batch_norm_legit_no_training,
    operation="batch norm",
    batch_norm=lambda _x, weight, bias, mean, var, _momentum, eps: Stored(weight, bias, mean, var, eps),
    multilinear=True,
    channels=1,
)
def batch_norm_no_training(
    x: Moments, weight: Factor, bias: Factor, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Moments, None, None]:
    """Batch norm in eval mode is affine: exact."""
    return _by_stored(x, weight, bias, mean, var, eps), None, None


def _trains(x: Any, weight: Any, bias: Any, *further: Any) -> bool:
    """True if a batch norm takes the statistics of the batch; some of its kin have no running ones to store them in."""
    return bool(further[2] if len(further) > 4 else further[0])


_BATCH_NORM: dict[str, Any] = {
    "approximate": lambda *arguments, **_: BATCH if _trains(*arguments) else None,
    "normalizes": _trains,
    "multilinear": True,
    "channels": 1,
}


@rule(
    aten.batch_norm,
    batch_norm=lambda _x, weight, bias, mean, var, _training, _momentum, eps, *_: Stored(weight, bias, mean, var, eps),
    **_BATCH_NORM,
)
def batch_norm(
    x: Moments,
    weight: Factor,
    bias: Factor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Moments:
    """Affine by stored statistics, exact; in training mode by those of a large batch (`_by_batch`)."""
    if training:
        return _by_batch(x, weight, bias, eps)
    return _by_stored(x, weight, bias, running_mean, running_var, eps)


@rule(aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional, **_BATCH_NORM)
def native_batch_norm(x: Moments, weight: Factor, bias: Factor, *further: Any) -> tuple[Any, ...]:
    """`batch_norm`; the statistics it would save are not followed, the running ones stay as they are."""
    stored = further if len(further) > 3 else (None, None, *further)
    return batch_norm(x, weight, bias, *stored), None, None, *stored[:2]


@rule(
    aten.linalg_vector_norm,
    skews=True,
    handles=lambda _x, ord=2, *_, **__: ord in (1, 2),
    approximate=lambda _x, ord=2, *_, **__: _GAMMA if ord == 2 else None,
)
def vector_norm(
    x: Moments,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Moments:
    """Euclidean norm: the `root` of q = sum x^2, E q = sum(m^2 + v), Var q = sum(2 v^2 + 4 m^2 v) for Gaussian x.

    Of order 1, the sum of independent |x|, exact.
    """
    axes = list(dim or range(x.ndim))
    if ord == 1:
        return sum_dim(Moments(*activations.abs(x.mean, x.std), x.full), axes, keepdim)
    times = prod([x.full[axis] for axis in axes]) / prod([x.shape[axis] for axis in axes])
    square, noise = x.mean.double().square(), x.var.double()
    power, spread = (square + noise).sum(axes, keepdim), (2 * noise.square() + 4 * square * noise).sum(axes, keepdim)
    return Moments(*root(times * power, times * spread)).to(x.dtype)
