"""Functions of one random value, a row each: where they bend, whether they rise, and a closed form if there is one.

Without a closed form the moments come from quadrature over panels that end at the points given (mathematics.md, 4).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..gaussian import activations, rectifier
from ..gaussian.gelu import gelu_of_many
from ..gaussian.normal import Pair, cdf, in_float64, pdf, ratio, working_dtype
from ..graph import ops
from ..moments import Moments
from .registry import INFINITY, RANDOM, SMOOTH_STEP, Bend, clamp_bend, clamp_bounds, elementwise, first_is_random

aten = torch.ops.aten

_WIDE = 0.5  # std from which three harmonics describe the remainder to 1e-30
_NEAR = range(-5, 7)  # the steps within 10 std of a narrower Gaussian, counted from the one below its mean
_RESOLVED = range(-4, 5)
_FRACTIONS = [k for k in range(-16, 17) if k]  # frac does not jump at zero
_FEW = range(-20, 22)  # the steps within 10 std of a Gaussian of std 2
_BERNOULLI = [1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330]
APPROXIMATE = f"exact alone; in a longer expression only the steps from {_RESOLVED[0]} to {_RESOLVED[-1]} are resolved"

FAR = f"exact alone; in a longer expression only the steps from {_FRACTIONS[0]} to {_FRACTIONS[-1]} are resolved"
STEPS = f"only the steps from {_FRACTIONS[0]} to {_FRACTIONS[-1]} are resolved"


def _steps(mean: Tensor, std: Tensor, near: range = _NEAR, zero: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of floor(X) as a sum of steps at whole numbers, and Cov(X, floor X) / std; for narrow Gaussians.

    Without the step at zero it is, up to a constant, X rounded towards zero.

    With p_j = P(X >= j): E = sum p_j, Var = sum_j p_j [(1 - p_j) + 2 sum_{i<j} (1 - p_i)], all terms positive;
    Cov(X, floor X) = std sum phi((j - mean) / std) by Stein's lemma.
    """
    base = mean.detach().floor()
    count, var, density, missed = base + near[0] - 1, *(torch.zeros_like(mean) for _ in range(3))
    for k in near:
        there = 1.0 if zero else (base + k != 0).to(mean.dtype)
        gap = mean - (base + k)
        a = ratio(gap, std)
        above = torch.where(std > 0, cdf(a), (gap >= 0).to(a.dtype))
        below = torch.where(std > 0, cdf(-a), (gap < 0).to(a.dtype))
        count, var, density = count + above, var + there * above * (below + 2 * missed), density + there * pdf(a)
        missed = missed + there * below
    return count, var, density


def _harmonics(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E R, Var R and Cov(X, R) / std^2 of the remainder R = X - floor X by its Fourier series; for wide Gaussians.

    R = 1/2 - sum sin(2 pi k X) / (pi k), R^2 = 1/3 + sum [cos(2 pi k X) / (pi k)^2 - sin(2 pi k X) / (pi k)], of which
    the Gaussian damps every term by exp(-2 (pi k std)^2); Cov(X, R) = std^2 E R' by Stein's lemma.
    """
    first, second, slope = torch.full_like(mean, 0.5), torch.full_like(mean, 1 / 3), torch.zeros_like(mean)
    for k in (1, 2, 3):
        damping = torch.exp(-2 * (math.pi * k * std).square())
        wave = damping * torch.sin(2 * math.pi * k * mean) / (math.pi * k)
        tide = damping * torch.cos(2 * math.pi * k * mean)
        first, second, slope = first - wave, second + tide / (math.pi * k) ** 2 - wave, slope - 2 * tide
    return first, second - first.square(), slope


@elementwise(aten.floor, jumps=_RESOLVED, monotone=True, approximate=APPROXIMATE)
@in_float64
def floor(mean: Tensor, std: Tensor) -> Pair:
    """The next whole number below a Gaussian; exact."""
    wide = std > _WIDE
    count, var, _ = _steps(mean, std.clamp_max(_WIDE))
    first, spread, slope = _harmonics(mean, std.clamp_min(_WIDE))
    variance = (std.square() * (1 - 2 * slope) + spread).clamp_min(0)
    return torch.where(wide, mean - first, count), torch.where(wide, variance, var)


def _by_a_constant(x: Any, divisor: Any, **_: Any) -> bool:
    return x is RANDOM and divisor is not RANDOM


def _multiples(divisor: Any) -> list[Any]:
    return [k * divisor for k in _RESOLVED]


@elementwise(aten.remainder.Scalar, jumps=_multiples, approximate=APPROXIMATE)
@in_float64
def remainder(mean: Tensor, std: Tensor, divisor: float) -> Pair:
    """X - d floor(X / d) of a Gaussian; exact."""
    mean, std = mean / divisor, std / abs(divisor)
    wide, narrow = std > _WIDE, std.clamp_max(_WIDE)
    count, var, density = _steps(mean, narrow)
    first, spread, _ = _harmonics(mean, std.clamp_min(_WIDE))
    var = (narrow.square() + var - 2 * narrow * density).clamp_min(0)
    return divisor * torch.where(wide, first, mean - count), divisor**2 * torch.where(wide, spread, var)


def _unresolved(x: Any) -> str | None:
    """Why `frac` is approximate in a longer expression; None if its argument surely stays where jumps are resolved.

    Half of that range counts as sure, since the variable may be scaled before. On the meta device nothing is known.
    """
    reach = (x.mean.abs() + 6 * x.std).detach()
    return FAR if reach.is_meta or bool((reach > _FRACTIONS[-1] / 2).any()) else None


@elementwise(aten.frac, jumps=_FRACTIONS, bounds=(-1.0, 1.0), approximate=_unresolved)
@in_float64
def frac(mean: Tensor, std: Tensor) -> Pair:
    """X rounded towards zero taken off X, of a Gaussian; exact.

    With R = X - floor X it is R where X > 0 and R - 1 elsewhere: E = E R - P(X < 0). Of a wide Gaussian
    E[frac^2] = E[R^2] + 2 I with I the integral of (R - 1/2) over the density on X > 0, by Euler and Maclaurin
    -sum_m B_2m / (2m)! p^(2m-2)(0), p the density.
    """
    wide, narrow, broad = std > 2.0, std.clamp_max(2.0), std.clamp_min(2.0)
    count, steps, density = _steps(mean, narrow, _FEW, zero=False)
    negative = torch.where(std > 0, cdf(ratio(-mean, std)), (mean < 0).to(mean.dtype))
    first, spread, _ = _harmonics(mean, broad)
    second = spread + first.square() + 2 * _half_sawtooth(mean, broad)
    average = torch.where(wide, first, mean - count) - negative
    var = torch.where(wide, second - (first - negative).square(), narrow.square() + steps - 2 * narrow * density)
    return torch.where(std > 0, average, mean.frac()), torch.where(std > 0, var, 0.0).clamp_min(0)


def _half_sawtooth(mean: Tensor, std: Tensor) -> Tensor:
    """The integral over x > 0 of (x - floor x - 1/2) times a wide Gaussian's density."""
    z, last, power, total = -mean / std, torch.zeros_like(mean), torch.ones_like(mean), torch.zeros_like(mean)
    scale = pdf(z) / std
    for order in range(2 * len(_BERNOULLI) - 1):  # the Hermite polynomial of this order is `power`
        if order % 2 == 0:
            total = total - _BERNOULLI[order // 2] / math.factorial(order + 2) * power * scale
        last, power, scale = power, z * power - order * last, scale / std
    return total


@elementwise(aten.ceil, jumps=_RESOLVED, monotone=True, approximate=APPROXIMATE)
def ceil(mean: Tensor, std: Tensor) -> Pair:
    """-floor(-x)."""
    below, var = floor(-mean, std)
    return -below, var


@elementwise(aten.round.default, jumps=[k + 0.5 for k in _RESOLVED], monotone=True, approximate=APPROXIMATE)
def round_half(mean: Tensor, std: Tensor) -> Pair:
    """floor(x + 1/2): halves, which torch rounds to even numbers, have probability zero."""
    rounded, var = floor(mean + 0.5, std)
    return torch.where(std > 0, rounded, mean.round()), var


elementwise(
    aten.trunc, aten.fix, jumps=_FRACTIONS, monotone=True, approximate=lambda x: STEPS if _unresolved(x) else None
)


@elementwise(
    aten.floor_divide.Scalar,
    aten.floor_divide.default,
    jumps=_multiples,
    monotone=False,
    approximate=APPROXIMATE,
    handles=_by_a_constant,
)
def floor_divide(mean: Tensor, std: Tensor, divisor: float | Tensor) -> Pair:
    """floor(x / d)."""
    size = divisor.abs() if isinstance(divisor, Tensor) else abs(divisor)
    return floor(mean / divisor, std / size)


_STEPS_OF_MODE: dict[str | None, list[int]] = {None: [], "floor": [0, *_FRACTIONS], "trunc": _FRACTIONS}
elementwise(
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    jumps=lambda divisor, rounding_mode=None: [k * divisor for k in _STEPS_OF_MODE[rounding_mode]],
    affine=lambda a, b, rounding_mode=None: a / b if rounding_mode is None else None,
    handles=_by_a_constant,
    approximate=lambda _x, _divisor, rounding_mode=None: STEPS if rounding_mode else None,
)

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
UNREACHED = 1e3  # a bound that no value of a normalized unit comes near
POSITIVE, SHARE, UNIT = (0.0, INFINITY), (0.0, 1.0), (-1.0, 1.0)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    return x


def _cast(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """The values unchanged; truth values become numbers, since two of them add up to one truth value."""
    target = next(
        (a.dtype if isinstance(a, Tensor) else a for a in args if isinstance(a, (Tensor, torch.dtype))), dtype
    )
    return x.to(working_dtype(x.device)) if x.dtype is torch.bool and target not in (None, torch.bool) else x


# Copies and changes of dtype are the identity.
elementwise(
    aten.clone, aten.nan_to_num, aten.alias, aten.contiguous, aten.lift_fresh_copy, aten.positive,
    monotone=True, evaluate=_same, affine=_same, copies=True,
)  # fmt: skip
elementwise(aten.detach, monotone=True, evaluate=_same, affine=_same, copies=True, stops_gradients=True)
elementwise(aten._to_copy, aten.to, monotone=True, evaluate=_cast, affine=_same, copies=True, casts=0)

elementwise(aten.relu, operation="relu", kinks=(0.0,), monotone=True, bend=Bend(rectifier=0.0), bounds=POSITIVE)(
    activations.relu
)
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
elementwise(aten.exp, knots=(-3.0, -30.0), monotone=True, bounds=POSITIVE)(activations.exp)
elementwise(aten.expm1, monotone=True)(activations.expm1)
elementwise(aten.exp2, monotone=True, bounds=POSITIVE)
elementwise(aten.square, operation="power", bounds=POSITIVE)(lambda mean, std: activations.power(mean, std, 2))
elementwise(aten.sin, bounds=UNIT, swings=True)(activations.sin)
elementwise(aten.cos, bounds=UNIT, swings=True)(activations.cos)
elementwise(aten.sinh, monotone=True)
elementwise(aten.cosh)
elementwise(ops.softsign, kinks=(0.0,), knots=SLOW_STEP[1:], monotone=True, bounds=UNIT)(activations.softsign)
elementwise(aten.sign, aten.sgn, jumps=(0.0,), monotone=True, bounds=UNIT)(rectifier.sign)
elementwise(aten.heaviside, jumps=(0.0,), monotone=True, handles=first_is_random)(
    lambda mean, std, _values: rectifier.step(mean, std)
)
elementwise(aten.leaky_relu, operation="leaky relu", kinks=(0.0,), monotone=lambda slope=0.01: slope >= 0)(
    activations.leaky_relu
)


def _channels(weight: Tensor, ndim: int) -> Tensor:
    """PReLU's slopes beside a tensor whose channels are its second axis."""
    return weight.view(-1, *[1] * (ndim - 2)) if weight.numel() > 1 and ndim > 1 else weight


@elementwise(
    aten.prelu,
    operation="prelu",
    kinks=(0.0,),
    evaluate=lambda x, w: torch.where(x > 0, x, _channels(w, x.ndim - 1) * x),  # one axis more is in front
    handles=first_is_random,
)
def prelu(mean: Tensor, std: Tensor, weight: Tensor) -> Pair:
    """Two slopes (mathematics.md, 2.6), the lower one learned."""
    return activations.leaky_relu(mean, std, _channels(weight, mean.ndim))


elementwise(
    aten._prelu_kernel,
    operation="prelu of broadcast slopes",
    kinks=(0.0,),
    evaluate=lambda x, w: torch.where(x > 0, x, w * x),
    handles=first_is_random,
)(activations.leaky_relu)


def _ends(low: Any, high: Any) -> list[Any]:
    return [end for end in (low, high) if end is not None]


def _clamp_kernel(low: Any, high: Any) -> tuple[Any, ...] | None:
    """Kernels start from a bound, whose size takes digits off the mean: far ones are left to the closed form."""
    near = all(isinstance(end, (int, float)) and (abs(end) <= UNREACHED or math.isinf(end)) for end in (low, high))
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
    operation="gelu",
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


def _log(mean: Tensor, std: Tensor, base: float) -> Pair:
    factor, (m, v) = 1 / math.log(base), activations.lognormal_log(mean, std)
    return factor * m, factor * factor * v


_of_positive(aten.sqrt, lambda mean, std: activations.lognormal_power(mean, std, 0.5), monotone=True, bounds=POSITIVE)
_of_positive(aten.rsqrt, lambda mean, std: activations.lognormal_power(mean, std, -0.5))
_of_positive(aten.reciprocal, lambda mean, std: activations.lognormal_power(mean, std, -1))
_of_positive(aten.log, activations.lognormal_log, monotone=True)
_of_positive(aten.log1p, lambda mean, std: activations.lognormal_log(1 + mean, std), monotone=True)
_of_positive(aten.log2, functools.partial(_log, base=2), monotone=True)
_of_positive(aten.log10, functools.partial(_log, base=10), monotone=True)


def _is_polynomial(exponent: Any) -> bool:
    if isinstance(exponent, Tensor):  # one without values may be any, and one that is trained does not stay whole
        readable_now = not (exponent.is_meta or exponent.requires_grad)
        return readable_now and all(map(_is_polynomial, exponent.flatten().tolist()))
    return isinstance(exponent, (int, float)) and exponent >= 0 and float(exponent).is_integer()


@elementwise(
    aten.pow,
    aten.float_power.Tensor_Scalar,
    operation="power",
    positive=lambda _base, exponent: None if _is_polynomial(exponent) else 0,
    # a constant base with a random exponent is exact
    approximate=lambda base, exponent: (
        LOGNORMAL if isinstance(base, Moments) and not _is_polynomial(exponent) else None
    ),
)
def power(mean: Tensor, std: Tensor, exponent: float | Tensor) -> Pair:
    """Whole powers exactly, others of a positive variable."""
    if not _is_polynomial(exponent):
        return activations.lognormal_power(mean, std, exponent)
    if not isinstance(exponent, Tensor):
        return activations.power(mean, std, int(exponent))
    mean, std, exponents = torch.broadcast_tensors(mean, std, exponent)
    first, var = torch.zeros_like(mean), torch.zeros_like(mean)
    for degree in exponents.unique().tolist():
        moments = activations.power(mean, std, int(degree))
        first, var = (torch.where(exponents == degree, *pair) for pair in zip(moments, (first, var), strict=True))
    return first, var
