"""Functions of one random value, a row each: where they bend, whether they rise, and a closed form if there is one.

Without a closed form the moments come from quadrature over panels that end at the points given (mathematics.md, 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gaussian import activations, closed, rectifier
from ..gaussian.normal import Pair, working_dtype
from ..graph import ops
from ..moments import Moments
from .bend import INFINITY, SMOOTH_STEP, Bend, clamp_bend, clamp_bounds
from .gelu import gelu as gelu_of_many
from .registry import elementwise, first_is_random

aten = torch.ops.aten
LOGNORMAL = "a variable that must be positive is matched by a log-normal one: good while its std is below its mean"
HALF_STEP = tuple(edge / 2 for edge in SMOOTH_STEP)  # tanh, whose argument counts twice
GAUSSIAN_STEP = (0.0, -5.0, 5.0)
SLOW_STEP = (0.0, -2.5, 2.5, -12.0, 12.0, -60.0, 60.0)
# Smooth functions count as flat where their slope is below a twentieth of the steepest, and as linear where it is
# within a twentieth of 1.
_LOGISTIC = 2 * math.acosh(math.sqrt(20.0))
_ERROR = math.sqrt(math.log(20.0))
_NORMAL = math.sqrt(2.0) * _ERROR
_GELU, _SILU = 2.35, 4.1
FAR = 1e3  # a bound that no value of a normalized unit comes near
POSITIVE, SHARE, UNIT = (0.0, INFINITY), (0.0, 1.0), (-1.0, 1.0)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _cast(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """The same numbers; truth values become numbers, since two of them add up to one truth value."""
    other = next((a.dtype if isinstance(a, Tensor) else a for a in args if isinstance(a, (Tensor, torch.dtype))), dtype)
    return x.to(working_dtype(x.device)) if x.dtype is torch.bool and other not in (None, torch.bool) else x


# Copies and changes of dtype are the identity.
elementwise(
    aten.clone, aten.nan_to_num, aten.alias, aten.contiguous, aten.lift_fresh_copy, aten.positive,
    monotone=True, evaluate=_same, affine=_same, copies=True,
)  # fmt: skip
elementwise(aten.detach, monotone=True, evaluate=_same, affine=_same, copies=True, stops_gradients=True)
elementwise(aten._to_copy, aten.to, monotone=True, evaluate=_cast, affine=_same, copies=True)

elementwise(aten.relu, kinks=(0.0,), monotone=True, bend=Bend(rectifier=0.0), bounds=POSITIVE)(activations.relu)
elementwise(aten.abs, kinks=(0.0,), bounds=POSITIVE)(activations.abs)
elementwise(
    aten.hardsigmoid, kinks=(-3.0, 3.0), monotone=True, bend=Bend(-3.0, 3.0), bounds=SHARE, kernel=("hardsigmoid",)
)(activations.hardsigmoid)
elementwise(aten.hardswish, kinks=(-3.0, 3.0), dips=True, bend=Bend(rectifier=-3.0, linear=3.0), kernel=("hardswish",))(
    activations.hardswish
)
elementwise(
    aten.sigmoid,
    aten.special_expit,
    knots=SMOOTH_STEP,
    monotone=True,
    bend=Bend(-_LOGISTIC, _LOGISTIC),
    bounds=SHARE,
    kernel=("sigmoid",),
)(activations.sigmoid)
elementwise(aten.special_ndtr, knots=GAUSSIAN_STEP, monotone=True, bend=Bend(-_NORMAL, _NORMAL), bounds=SHARE)
elementwise(aten.special_log_ndtr, knots=GAUSSIAN_STEP, monotone=True)
elementwise(aten.asinh, knots=SLOW_STEP, monotone=True)
elementwise(aten.atan, knots=SLOW_STEP, monotone=True)(activations.atan)
elementwise(aten.acos, aten.asin, aten.erfinv)
elementwise(aten.logit, kinks=lambda eps=None: () if eps is None else (eps, 1 - eps))
elementwise(aten.sinc, swings=True)
elementwise(
    aten.tanh, knots=HALF_STEP, monotone=True, bend=Bend(-_LOGISTIC / 2, _LOGISTIC / 2), bounds=UNIT, kernel=("tanh",)
)(activations.tanh)
elementwise(aten.silu, knots=SMOOTH_STEP, dips=True, bend=Bend(rectifier=-_SILU, linear=_SILU), kernel=("silu",))(
    activations.silu
)
elementwise(aten.mish, knots=SMOOTH_STEP, dips=True, kernel=("mish",))(activations.mish)
elementwise(aten.log_sigmoid, knots=SMOOTH_STEP, monotone=True)(activations.logsigmoid)
elementwise(aten.erf, knots=GAUSSIAN_STEP, monotone=True, bend=Bend(-_ERROR, _ERROR), bounds=UNIT, kernel=("erf",))(
    activations.erf
)
elementwise(aten.erfc, knots=GAUSSIAN_STEP, bend=Bend(-_ERROR, _ERROR), bounds=(0.0, 2.0))
elementwise(aten.exp, knots=(-3.0, -30.0), monotone=True, bounds=POSITIVE)(closed.exp)
elementwise(aten.expm1, monotone=True)(closed.expm1)
elementwise(aten.exp2, monotone=True, bounds=POSITIVE)
elementwise(aten.square, bounds=POSITIVE)(lambda mean, std: closed.power(mean, std, 2))
elementwise(aten.sin, bounds=UNIT, swings=True)(closed.sin)
elementwise(aten.cos, bounds=UNIT, swings=True)(closed.cos)
elementwise(aten.sinh, monotone=True)
elementwise(aten.cosh)
elementwise(ops.softsign, kinks=(0.0,), knots=SLOW_STEP[1:], monotone=True, bounds=UNIT)(activations.softsign)
elementwise(aten.sign, aten.sgn, jumps=(0.0,), monotone=True, bounds=UNIT)(rectifier.sign)
elementwise(aten.heaviside, jumps=(0.0,), monotone=True, handles=first_is_random)(
    lambda mean, std, _values: rectifier.step(mean, std)
)
elementwise(aten.leaky_relu, kinks=(0.0,), monotone=lambda slope=0.01: slope >= 0)(activations.leaky_relu)


def _channels(weight: Tensor, ndim: int) -> Tensor:
    """PReLU's slopes beside a tensor whose channels are its second axis."""
    return weight.view(-1, *[1] * (ndim - 2)) if weight.numel() > 1 and ndim > 1 else weight


@elementwise(
    aten.prelu,
    kinks=(0.0,),
    evaluate=lambda x, w: torch.where(x > 0, x, _channels(w, x.ndim - 1) * x),  # one axis more is in front
    handles=first_is_random,
)
def prelu(mean: Tensor, std: Tensor, weight: Tensor) -> Pair:
    """Two slopes (mathematics.md, 2.6), the lower one learned."""
    return activations.leaky_relu(mean, std, _channels(weight, mean.ndim))


elementwise(
    aten._prelu_kernel,
    kinks=(0.0,),
    evaluate=lambda x, w: torch.where(x > 0, x, w * x),
    handles=first_is_random,
)(activations.leaky_relu)


def _ends(low: Any, high: Any) -> list[Any]:
    return [end for end in (low, high) if end is not None]


def _clamp_kernel(low: Any, high: Any) -> tuple[Any, ...] | None:
    """Kernels start from a bound, whose size takes digits off the mean: far ones are left to the closed form."""
    near = all(isinstance(end, (int, float)) and (abs(end) <= FAR or math.isinf(end)) for end in (low, high))
    return ("clamp", low, high) if near else None


def _clamp(*clamps: Any, ends: Callable[..., tuple[Any, Any]]) -> None:
    """Register operations that cut off below and above (mathematics.md, 2.8); the ends follow from their arguments."""

    def of_ends(fact: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *numbers: fact(*ends(*numbers))

    elementwise(
        *clamps,
        kinks=of_ends(_ends),
        monotone=True,
        bend=of_ends(clamp_bend),
        bounds=of_ends(clamp_bounds),
        kernel=of_ends(_clamp_kernel),
        handles=first_is_random,
    )(lambda mean, std, *numbers: rectifier.clamp(mean, std, *ends(*numbers)))


_clamp(aten.relu6, ends=lambda: (0.0, 6.0))
_clamp(aten.hardtanh, ends=lambda low=-1.0, high=1.0: (low, high))
_clamp(aten.clamp, aten.clip, ends=lambda low=None, high=None: (low, high))
_clamp(aten.clamp_min, ends=lambda low: (low, None))
_clamp(aten.clamp_max, ends=lambda high: (None, high))


@elementwise(
    aten.gelu,
    knots=GAUSSIAN_STEP,
    dips=True,
    bend=Bend(rectifier=-_GELU, linear=_GELU),
    kernel=lambda approximate="none": ("gelu_tanh" if approximate == "tanh" else "gelu",),
)
def gelu(mean: Tensor, std: Tensor, *, approximate: str = "none") -> Pair:
    """x Phi(x), or its approximation by tanh."""
    return (activations.gelu_tanh if approximate == "tanh" else gelu_of_many)(mean, std)


elementwise(
    aten.elu,
    kinks=(0.0,),
    knots=(-36.0,),
    monotone=lambda alpha=1.0, scale=1.0, input_scale=1.0: min(alpha, scale, input_scale) >= 0,
    kernel=lambda alpha=1.0, scale=1.0, input_scale=1.0: ("elu", alpha, scale, input_scale),
)(activations.elu)
elementwise(
    aten.selu,
    kinks=(0.0,),
    knots=(-36.0,),
    monotone=True,
    kernel=("elu", activations.SELU_ALPHA, activations.SELU_SCALE, 1.0),
)(activations.selu)
elementwise(
    aten.celu,
    kinks=(0.0,),
    knots=lambda alpha=1.0: (-36.0 * alpha,),
    monotone=True,
    handles=lambda _x, alpha=1.0: alpha > 0,
    kernel=lambda alpha=1.0: ("elu", alpha, 1.0, 1.0 / alpha),
)(activations.celu)

elementwise(
    aten.softplus,
    knots=lambda beta=1.0, threshold=20.0: [e / beta for e in SMOOTH_STEP],
    monotone=True,
    bounds=POSITIVE,
    kernel=lambda beta=1.0, threshold=20.0: ("softplus", beta) if threshold >= 20 else None,
)(activations.softplus)
elementwise(aten.hardshrink, jumps=lambda lambd=0.5: (-lambd, lambd), monotone=True)(activations.hardshrink)
elementwise(aten.softshrink, kinks=lambda lambd=0.5: (-lambd, lambd), monotone=True)(activations.softshrink)
elementwise(
    aten.threshold,
    jumps=lambda threshold, _value: (threshold,),
    bend=lambda threshold, _value: Bend(rectifier=threshold),
)(activations.threshold)


# Roots, logarithms and reciprocals have no moments under a Gaussian; their argument is positive in any real model.
def _of_positive(op: Any, closed_form: Callable[..., Pair], **facts: Any) -> None:
    elementwise(op, positive=0, approximate=LOGNORMAL, **facts)(closed_form)


def _log(base: float) -> Callable[..., Pair]:
    def scaled(mean: Tensor, std: Tensor) -> Pair:
        factor, (m, v) = 1 / math.log(base), closed.lognormal_log(mean, std)
        return factor * m, factor * factor * v

    return scaled


_of_positive(aten.sqrt, lambda mean, std: closed.lognormal_power(mean, std, 0.5), monotone=True, bounds=POSITIVE)
_of_positive(aten.rsqrt, lambda mean, std: closed.lognormal_power(mean, std, -0.5))
_of_positive(aten.reciprocal, lambda mean, std: closed.lognormal_power(mean, std, -1))
_of_positive(aten.log, closed.lognormal_log, monotone=True)
_of_positive(aten.log1p, lambda mean, std: closed.lognormal_log(1 + mean, std), monotone=True)
_of_positive(aten.log2, _log(2), monotone=True)
_of_positive(aten.log10, _log(10), monotone=True)


def _is_polynomial(exponent: Any) -> bool:
    if isinstance(exponent, Tensor):  # one without values may be any, and one that is trained does not stay whole
        known = not (exponent.is_meta or exponent.requires_grad)
        return known and all(map(_is_polynomial, exponent.flatten().tolist()))
    return isinstance(exponent, (int, float)) and exponent >= 0 and float(exponent).is_integer()


@elementwise(
    aten.pow,
    aten.float_power.Tensor_Scalar,
    positive=lambda _base, exponent: None if _is_polynomial(exponent) else 0,
    # a constant base with a random exponent is exact
    approximate=lambda base, exponent: (
        LOGNORMAL if isinstance(base, Moments) and not _is_polynomial(exponent) else None
    ),
)
def power(mean: Tensor, std: Tensor, exponent: float | Tensor) -> Pair:
    """Whole powers exactly, others of a positive variable."""
    if not _is_polynomial(exponent):
        return closed.lognormal_power(mean, std, exponent)
    if not isinstance(exponent, Tensor):
        return closed.power(mean, std, int(exponent))
    mean, std, exponents = torch.broadcast_tensors(mean, std, exponent)
    first, var = torch.zeros_like(mean), torch.zeros_like(mean)
    for whole in exponents.unique().tolist():
        found = closed.power(mean, std, int(whole))
        first, var = (torch.where(exponents == whole, *pair) for pair in zip(found, (first, var), strict=True))
    return first, var
