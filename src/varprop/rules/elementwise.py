"""Functions of one random value, a row each: where they bend, whether they rise, and a closed form if there is one.

Without a closed form the moments come from quadrature over panels that end at the points given (mathematics.md, 4).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..gaussian import activations, closed, rectifier
from ..graph import ops
from ..moments import Moments
from .gelu import gelu as gelu_of_many
from .registry import elementwise

aten = torch.ops.aten
Pair = tuple[Tensor, Tensor]
LOGNORMAL = "a variable that must be positive is matched by a log-normal one: good while its std is below its mean"
SMOOTH_STEP = (0.0, -9.0, 9.0, -40.0, 40.0)  # logistic and its kin; doubled argument for tanh
HALF_STEP = tuple(edge / 2 for edge in SMOOTH_STEP)
GAUSSIAN_STEP = (0.0, -5.0, 5.0)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


# Copies and changes of dtype are the identity.
elementwise(
    aten.clone, aten.nan_to_num, aten.alias, aten.detach, aten.contiguous, aten._to_copy, aten.to,
    aten.lift_fresh_copy, aten.positive,
    monotone=True, evaluate=_same, affine=_same,
)  # fmt: skip

elementwise(aten.relu, kinks=(0.0,), monotone=True)(activations.relu)
elementwise(aten.relu6, kinks=(0.0, 6.0), monotone=True)(activations.relu6)
elementwise(aten.abs, kinks=(0.0,))(activations.abs)
elementwise(aten.hardsigmoid, kinks=(-3.0, 3.0), monotone=True)(activations.hardsigmoid)
elementwise(aten.hardswish, kinks=(-3.0, 3.0))(activations.hardswish)
elementwise(aten.special_expit, knots=SMOOTH_STEP, monotone=True)(activations.sigmoid)
elementwise(aten.special_ndtr, aten.special_log_ndtr, knots=GAUSSIAN_STEP, monotone=True)
elementwise(aten.asinh, knots=(0.0, -2.5, 2.5, -12.0, 12.0, -60.0, 60.0), monotone=True)
elementwise(aten.acos, aten.asin, aten.erfinv, aten.logit, aten.sinc)
elementwise(aten.sigmoid, knots=SMOOTH_STEP, monotone=True)(activations.sigmoid)
elementwise(aten.tanh, knots=HALF_STEP, monotone=True)(activations.tanh)
elementwise(aten.silu, knots=SMOOTH_STEP)(activations.silu)
elementwise(aten.mish, knots=SMOOTH_STEP)(activations.mish)
elementwise(aten.log_sigmoid, knots=SMOOTH_STEP, monotone=True)(activations.logsigmoid)
elementwise(aten.erf, knots=GAUSSIAN_STEP, monotone=True)(activations.erf)
elementwise(aten.erfc, knots=GAUSSIAN_STEP)
elementwise(aten.exp, monotone=True)(closed.exp)
elementwise(aten.expm1, monotone=True)(closed.expm1)
elementwise(aten.exp2, monotone=True)
elementwise(aten.square)(lambda mean, std: closed.power(mean, std, 2))
elementwise(aten.sin)(closed.sin)
elementwise(aten.cos)(closed.cos)
elementwise(aten.sinh, monotone=True)
elementwise(aten.cosh)
elementwise(aten.atan, knots=(0.0, -2.5, 2.5, -12.0, 12.0, -60.0, 60.0), monotone=True)
elementwise(ops.softsign, kinks=(0.0,), knots=(-2.5, 2.5, -12.0, 12.0, -60.0, 60.0), monotone=True)(
    activations.softsign
)
elementwise(aten.sign, aten.sgn, jumps=(0.0,), monotone=True)(rectifier.sign)
elementwise(aten.heaviside, jumps=(0.0,), monotone=True)(lambda mean, std, _values: rectifier.step(mean, std))


@elementwise(aten.leaky_relu, kinks=(0.0,))
def leaky_relu(mean: Tensor, std: Tensor, negative_slope: float = 0.01) -> Pair:
    """Two slopes (mathematics.md, 2.6)."""
    return rectifier.two_slopes(mean, std, 1.0, negative_slope)


def _channels(weight: Tensor, ndim: int) -> Tensor:
    """PReLU's slopes beside a tensor whose channels are its second axis."""
    return weight.view(-1, *[1] * (ndim - 2)) if weight.numel() > 1 and ndim > 1 else weight


@elementwise(
    aten.prelu, kinks=(0.0,), evaluate=lambda x, w: torch.where(x > 0, x, _channels(w, x.ndim - 1) * x)
)  # the evaluation has one axis more in front
def prelu(mean: Tensor, std: Tensor, weight: Tensor) -> Pair:
    """Two slopes (mathematics.md, 2.6), the lower one learned."""
    return rectifier.two_slopes(mean, std, 1.0, _channels(weight, mean.ndim))


elementwise(aten._prelu_kernel, kinks=(0.0,), evaluate=lambda x, w: torch.where(x > 0, x, w * x))(
    lambda mean, std, weight: rectifier.two_slopes(mean, std, 1.0, weight)
)


def _bounds(low: Any = None, high: Any = None) -> list[Any]:
    return [bound for bound in (low, high) if bound is not None]


@elementwise(aten.clamp, aten.clip, kinks=_bounds, monotone=True)
def clamp(mean: Tensor, std: Tensor, min: Any = None, max: Any = None) -> Pair:
    """Clamped Gaussian (mathematics.md, 2.8)."""
    return rectifier.clamp(mean, std, min, max)


elementwise(aten.hardtanh, kinks=lambda low=-1.0, high=1.0: (low, high), monotone=True)(
    lambda mean, std, low=-1.0, high=1.0: rectifier.clamp(mean, std, low, high)
)
elementwise(aten.clamp_min, kinks=_bounds, monotone=True)(lambda mean, std, low: rectifier.clamp(mean, std, low, None))
elementwise(aten.clamp_max, kinks=_bounds, monotone=True)(
    lambda mean, std, high: rectifier.clamp(mean, std, None, high)
)


@elementwise(aten.gelu, knots=GAUSSIAN_STEP)
def gelu(mean: Tensor, std: Tensor, *, approximate: str = "none") -> Pair:
    """x Phi(x), or its approximation by tanh."""
    return (activations.gelu_tanh if approximate == "tanh" else gelu_of_many)(mean, std)


@elementwise(aten.elu, kinks=(0.0,), knots=(-36.0,))
def elu(mean: Tensor, std: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Pair:
    """Exponential linear unit; SELU and CELU are cases of it."""
    return activations.elu(mean, std, alpha, scale, input_scale)


elementwise(aten.selu, kinks=(0.0,), knots=(-36.0,), monotone=True)(activations.selu)
elementwise(aten.celu, kinks=(0.0,), knots=lambda alpha=1.0: (-36.0 * alpha,))(activations.celu)


@elementwise(aten.softplus, knots=lambda beta=1.0, threshold=20.0: [e / beta for e in SMOOTH_STEP], monotone=True)
def softplus(mean: Tensor, std: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Pair:
    """log(1 + exp(beta x)) / beta."""
    return activations.softplus(mean, std, beta, threshold)


@elementwise(aten.hardshrink, jumps=lambda lambd=0.5: (-lambd, lambd), monotone=True)
def hardshrink(mean: Tensor, std: Tensor, lambd: float = 0.5) -> Pair:
    """x outside [-lambd, lambd], zero inside."""
    return activations.hardshrink(mean, std, lambd)


@elementwise(aten.softshrink, kinks=lambda lambd=0.5: (-lambd, lambd), monotone=True)
def softshrink(mean: Tensor, std: Tensor, lambd: float = 0.5) -> Pair:
    """x shrunk towards zero by lambd."""
    return activations.softshrink(mean, std, lambd)


@elementwise(aten.threshold, jumps=lambda threshold, _value: (threshold,))
def threshold(mean: Tensor, std: Tensor, threshold: float, value: float) -> Pair:
    """x above the threshold, a fixed value below."""
    return activations.threshold(mean, std, threshold, value)


# Roots, logarithms and reciprocals have no moments under a Gaussian; their argument is positive in any real model.
elementwise(aten.sqrt, positive=0, approximate=LOGNORMAL, monotone=True)(
    lambda mean, std: closed.lognormal_power(mean, std, 0.5)
)
elementwise(aten.rsqrt, positive=0, approximate=LOGNORMAL)(lambda mean, std: closed.lognormal_power(mean, std, -0.5))
elementwise(aten.reciprocal, positive=0, approximate=LOGNORMAL)(lambda mean, std: closed.lognormal_power(mean, std, -1))
elementwise(aten.log, positive=0, approximate=LOGNORMAL, monotone=True)(closed.lognormal_log)
elementwise(aten.log2, positive=0, approximate=LOGNORMAL, monotone=True)(
    lambda mean, std: _scaled(closed.lognormal_log(mean, std), 1 / math.log(2))
)
elementwise(aten.log10, positive=0, approximate=LOGNORMAL, monotone=True)(
    lambda mean, std: _scaled(closed.lognormal_log(mean, std), 1 / math.log(10))
)
elementwise(aten.log1p, positive=0, approximate=LOGNORMAL, monotone=True)(
    lambda mean, std: closed.lognormal_log(1 + mean, std)
)


def _scaled(pair: Pair, factor: float) -> Pair:
    return factor * pair[0], factor * factor * pair[1]


def _is_polynomial(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent >= 0 and float(exponent).is_integer()


def _is_root(base: Any, exponent: Any) -> bool:
    """Whether a random base is raised to a power that is not whole; a constant base with a random exponent is exact."""
    return isinstance(base, Moments) and not _is_polynomial(exponent)


@elementwise(
    aten.pow,
    aten.float_power.Tensor_Scalar,
    positive=lambda _base, exponent: None if _is_polynomial(exponent) else 0,
    approximate=lambda base, exponent: LOGNORMAL if _is_root(base, exponent) else None,
)
def power(mean: Tensor, std: Tensor, exponent: float) -> Pair:
    """Whole powers exactly, others of a positive variable."""
    if _is_polynomial(exponent):
        return closed.power(mean, std, int(exponent))
    return closed.lognormal_power(mean, std, exponent)
