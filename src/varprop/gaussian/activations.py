"""The activation functions of PyTorch: values, slopes, where each bends, and mean and variance for a Gaussian input.

Piecewise linear ones are exact; the others are integrated by `quadrature.expectation` to about 1e-12, which
needs to know where each function bends (`KNOTS`) and where it has kinks. Formulas: mathematics.md, sections 2-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .normal import Pair, Scalar, as_tensor, cdf, in_float64, pdf
from .quadrature import Points, Pointwise, expectation, shifted
from .rectifier import clamp, two_slopes
from .shortcuts import with_formula

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946

Activation = Callable[[Tensor, Tensor], Pair]
ValueAndSlope = tuple[Tensor, Tensor]

# Where each function turns from one asymptote to the other, to double precision.
KNOTS = {
    "sigmoid": (-45.0, -9.0, 0.0, 9.0, 45.0),
    "tanh": (-22.0, -4.5, 0.0, 4.5, 22.0),
    "gelu": (-9.0, -3.0, 0.0, 3.0, 9.0),
    "erf": (-6.5, -2.2, 0.0, 2.2, 6.5),
    "mish": (-45.0, -9.0, 0.0, 9.0, 24.0),
    "elu": (-45.0, -9.0, 0.0),
    "hardswish": (-3.0, 3.0),
    "softsign": (-60.0, -12.0, -2.5, 2.5, 12.0, 60.0),
    "atan": (-60.0, -12.0, -2.5, 0.0, 2.5, 12.0, 60.0),
}
_TANH_RATE = 2.0 * math.sqrt(2.0 / math.pi)


def _softplus_curve(x: Tensor, beta: float = 1.0) -> Tensor:
    """log(1 + e^{beta x}) / beta."""
    return F.softplus(beta * x, threshold=40.0) / beta


def _hardswish_curve(x: Tensor) -> Tensor:
    """x relu6(x + 3) / 6."""
    return x * (x + 3.0).clamp(0.0, 6.0) / 6.0


def _sigmoid_and_slope(x: Tensor) -> ValueAndSlope:
    f = torch.sigmoid(x)
    return f, f * (1.0 - f)


def _tanh_and_slope(x: Tensor) -> ValueAndSlope:
    f = torch.tanh(x)
    return f, 1.0 - f * f


def _silu_and_slope(x: Tensor) -> ValueAndSlope:
    s = torch.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


def _gelu_and_slope(x: Tensor) -> ValueAndSlope:
    below = cdf(x)
    return x * below, below + x * pdf(x)


def _tanh_argument(x: Tensor) -> Tensor:
    """2u in the tanh form of GELU, x S(2u): u = sqrt(2/pi) (x + 0.044715 x^3)."""
    return _TANH_RATE * (x + 0.044715 * x * x * x)


def _gelu_tanh_and_slope(x: Tensor) -> ValueAndSlope:
    s = torch.sigmoid(_tanh_argument(x))
    return x * s, s + x * s * (1.0 - s) * _TANH_RATE * (1.0 + 3 * 0.044715 * x * x)


def _softplus_and_slope(x: Tensor, beta: float) -> ValueAndSlope:
    return _softplus_curve(x, beta), torch.sigmoid(beta * x)


def _elu_and_slope(x: Tensor, alpha: float, scale: float, rate: float) -> ValueAndSlope:
    below = rate * x.clamp(max=0.0)
    value = torch.where(x > 0, x, alpha * torch.expm1(below))
    return scale * value, scale * torch.where(x > 0, torch.ones_like(x), alpha * rate * torch.exp(below))


def _mish_and_slope(x: Tensor) -> ValueAndSlope:
    t, s = torch.tanh(_softplus_curve(x)), torch.sigmoid(x)
    return x * t, t + x * (1.0 - t * t) * s


def _erf_and_slope(x: Tensor) -> ValueAndSlope:
    return torch.erf(x), 2.0 / math.sqrt(math.pi) * torch.exp(-x * x)


def _hardswish_and_slope(x: Tensor) -> ValueAndSlope:
    return _hardswish_curve(x), torch.where(x.abs() < 3.0, x / 3.0 + 0.5, (x > 0).to(x.dtype))


@dataclass(frozen=True)
class Curve:
    """A function of one variable and some numbers."""

    with_slope: Callable[..., ValueAndSlope]  # its values and slopes
    knots: Callable[..., Sequence[float]]  # where it bends, for its numbers
    narrow: float  # the standard deviation up to which 64 equidistant nodes integrate it (0: never, for it has a kink)


def _scaled(name: str, rate: float) -> list[float]:
    return [knot / rate for knot in KNOTS[name]]


CURVES = {
    "sigmoid": Curve(_sigmoid_and_slope, lambda: KNOTS["sigmoid"], 2.5),
    "tanh": Curve(_tanh_and_slope, lambda: KNOTS["tanh"], 1.2),
    "silu": Curve(_silu_and_slope, lambda: KNOTS["sigmoid"], 2.5),
    "gelu": Curve(_gelu_and_slope, lambda: KNOTS["gelu"], 2.2),
    "gelu_tanh": Curve(_gelu_tanh_and_slope, lambda: KNOTS["gelu"], 2.0),
    "softplus": Curve(_softplus_and_slope, lambda beta: _scaled("sigmoid", beta), 2.5),
    "elu": Curve(_elu_and_slope, lambda _alpha, _scale, rate: _scaled("elu", rate), 0.0),
    "mish": Curve(_mish_and_slope, lambda: KNOTS["mish"], 1.8),
    "erf": Curve(_erf_and_slope, lambda: KNOTS["erf"], 1.5),
    "hardswish": Curve(_hardswish_and_slope, lambda: KNOTS["hardswish"], 0.0),
}


def relu(mean: Tensor, std: Tensor) -> Pair:
    """max(x, 0); exact."""
    return two_slopes(mean, std, 1.0, 0.0)


def leaky_relu(mean: Tensor, std: Tensor, slope: Scalar = 0.01) -> Pair:
    """max(x, 0) + slope min(x, 0), also PReLU and RReLU in evaluation; exact."""
    return two_slopes(mean, std, 1.0, slope)


def abs(mean: Tensor, std: Tensor) -> Pair:
    """|x|; exact."""
    return two_slopes(mean, std, 1.0, -1.0)


@in_float64
def hardsigmoid(mean: Tensor, std: Tensor) -> Pair:
    """relu6(x + 3) / 6; exact."""
    m, v = clamp(mean + 3.0, std, 0.0, 6.0)
    return m / 6.0, v / 36.0


def _smooth(name: str, curve: Pointwise, knots: Points = (), breaks: Points = ()) -> Activation:
    """Moments after a curve that is smooth but for breaks, by quadrature."""

    @in_float64
    @with_formula(name)
    def moments(mean: Tensor, std: Tensor) -> Pair:
        return expectation(curve, mean, std, knots=knots, breaks=breaks)

    return moments


def _step(
    name: str, curve: Pointwise, tail: Pointwise, low: float, high: float, knots: Points, breaks: Points = ()
) -> Activation:
    """Moments after a curve f that rises from low to high, f(-x) = low + high - f(x); tail = f - low for x < 0.

    It is integrated on the side of its lower limit, `shifted` by that; points are those of that side's variable.
    """

    @in_float64
    @with_formula(name)
    def moments(mean: Tensor, std: Tensor) -> Pair:
        right = mean > 0.0
        left = torch.where(right, -mean, mean)
        m, v = shifted(curve, tail, low, left < -1.0, left, std, knots=knots, breaks=breaks)
        return torch.where(right, (low + high) - m, m), v

    return moments


silu = _smooth("silu", lambda x: x * torch.sigmoid(x), KNOTS["sigmoid"])
gelu = _smooth("gelu", lambda x: x * cdf(x), KNOTS["gelu"])
gelu_tanh = _smooth("gelu_tanh", lambda x: x * torch.sigmoid(_tanh_argument(x)), KNOTS["gelu"])
mish = _smooth("mish", lambda x: x * torch.tanh(_softplus_curve(x)), KNOTS["mish"])
hardswish = _smooth("hardswish", _hardswish_curve, breaks=KNOTS["hardswish"])
sigmoid = _step("sigmoid", torch.sigmoid, torch.sigmoid, 0.0, 1.0, KNOTS["sigmoid"])
tanh = _step("tanh", torch.tanh, lambda x: 2.0 * torch.sigmoid(2.0 * x), -1.0, 1.0, KNOTS["tanh"])
erf = _step("erf", torch.erf, lambda x: torch.erfc(-x), -1.0, 1.0, KNOTS["erf"])
softsign = _step(
    "softsign",
    F.softsign,
    lambda x: torch.where(x < 0.0, 1.0, 1.0 + 2.0 * x) / (1.0 + x.abs()),
    -1.0,
    1.0,
    KNOTS["softsign"],
    breaks=(0.0,),  # of f''
)
# pi/2 + arctan x = arg(-x + i)
atan = _step(
    "atan", torch.atan, lambda x: torch.atan2(torch.ones_like(x), -x), -0.5 * math.pi, 0.5 * math.pi, KNOTS["atan"]
)


@in_float64
def elu(mean: Tensor, std: Tensor, alpha: Scalar = 1.0, scale: Scalar = 1.0, input_scale: Scalar = 1.0) -> Pair:
    """scale (x for x > 0, alpha (e^{input_scale x} - 1) else); quadrature, shifted by the limit -alpha."""
    alpha, scale, rate = (as_tensor(p, mean) for p in (alpha, scale, input_scale))
    m, v = shifted(
        lambda x: torch.where(x > 0.0, x, alpha * torch.expm1(rate * x.clamp(max=0.0))),
        lambda x: torch.where(x > 0.0, x + alpha, alpha * torch.exp(rate * x.clamp(max=0.0))),
        -alpha,
        rate * mean < -1.0,
        mean,
        std,
        breaks=(0.0,),
        knots=(-9.0 / rate.detach(), -45.0 / rate.detach()),
    )
    return scale * m, scale.square() * v


@in_float64
def selu(mean: Tensor, std: Tensor) -> Pair:
    """ELU with the constants of Klambauer et al. (2017)."""
    return elu(mean, std, SELU_ALPHA, SELU_SCALE)


@in_float64
def celu(mean: Tensor, std: Tensor, alpha: Scalar = 1.0) -> Pair:
    """max(x, 0) + min(alpha (e^{x/alpha} - 1), 0) = alpha ELU(x / alpha)."""
    alpha = as_tensor(alpha, mean)
    m, v = elu(mean / alpha, std / alpha.abs())
    return alpha * m, alpha.square() * v


@in_float64
def softplus(mean: Tensor, std: Tensor, beta: Scalar = 1.0, threshold: float = 20.0) -> Pair:
    """log(1 + e^{beta x}) / beta; quadrature.

    PyTorch's switch to x beyond beta x > threshold, a jump of e^{-threshold}, is ignored from 20 up, where it
    is only that library's way to avoid overflow.
    """
    beta = as_tensor(beta, mean)
    size = beta.abs()
    jumps = () if threshold >= 20.0 else (threshold,)

    def f(x: Tensor) -> Tensor:
        smooth = _softplus_curve(x)
        return smooth if not jumps else torch.where(x > threshold, x, smooth)

    m, v = expectation(f, beta * mean, size * std, jumps=jumps, knots=KNOTS["sigmoid"])
    return m / beta, v / beta.square()


@in_float64
def logsigmoid(mean: Tensor, std: Tensor) -> Pair:
    """Log S(x) = -softplus(-x)."""
    m, v = softplus(-mean, std)
    return -m, v


# smooth ones whose moments are integrals at every place: at many places it is faster to interpolate between a few
INTEGRATED = frozenset({silu, mish, sigmoid, tanh, erf, atan, softplus, logsigmoid})


@in_float64
def softshrink(mean: Tensor, std: Tensor, lambd: Scalar = 0.5) -> Pair:
    """x -+ lambd beyond +-lambd, 0 between; quadrature, kinks at +-lambd."""
    lambd = as_tensor(lambd, mean)
    return expectation(lambda x: (x - lambd).relu() - (-x - lambd).relu(), mean, std, breaks=(-lambd, lambd))


@in_float64
def hardshrink(mean: Tensor, std: Tensor, lambd: Scalar = 0.5) -> Pair:
    """x beyond +-lambd, 0 between; quadrature, jumps at +-lambd."""
    lambd = as_tensor(lambd, mean)
    return expectation(lambda x: torch.where(x.abs() > lambd, x, 0.0), mean, std, jumps=(-lambd, lambd))


@in_float64
def threshold(mean: Tensor, std: Tensor, threshold: Scalar, value: Scalar) -> Pair:
    """x for x > threshold, else value; quadrature, jump at threshold."""
    at, value = as_tensor(threshold, mean), as_tensor(value, mean)
    return expectation(lambda x: torch.where(x > at, x, value), mean, std, jumps=(at,))


def _exp(x: Tensor) -> Tensor:
    """exp that stops at the largest float instead of inf, so that 0 * exp(x) is 0."""
    return torch.exp(x.clamp(max=math.log(torch.finfo(x.dtype).max) - 1e-4))


@in_float64
def power(mean: Tensor, std: Tensor, n: int) -> Pair:
    """f(x) = x^n for an integer n >= 0; exact for Gaussian x.

    Raw moments M_j = mean M_{j-1} + (j-1) std^2 M_{j-2}; v = sum_{k>=1} C(n,k)^2 k! std^{2k} M_{n-k}^2, the
    squared Hermite coefficients of f (Mehler; mathematics.md, section 9): every term is positive.
    """
    var = std.square()
    raw = [mean.pow(0), mean]
    for j in range(2, n + 1):
        raw.append(mean * raw[-1] + (j - 1) * var * raw[-2])
    v = 0.0 * std
    for k in range(n, 0, -1):
        weight = math.comb(n, k) ** 2 * math.factorial(k)
        factor = float(weight) if weight.bit_length() <= 1023 else math.inf
        v = v + factor * (std**k * raw[n - k]).square()
    return raw[n], v


@in_float64
def exp(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = e^x: m = exp(mean + var/2), v = exp(2 mean + 2 var) (1 - exp(-var)); exact for Gaussian x."""
    var = std.square()
    return _exp(mean + 0.5 * var), _exp(2.0 * (mean + var)) * -torch.expm1(-var)


@in_float64
def expm1(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = e^x - 1: m = expm1(mean + var/2), v as for exp; exact for Gaussian x."""
    var = std.square()
    limit = math.log(torch.finfo(mean.dtype).max) - 1e-4
    return torch.expm1((mean + 0.5 * var).clamp(max=limit)), _exp(2.0 * (mean + var)) * -torch.expm1(-var)


def _wave(value: Tensor, slope: Tensor, var: Tensor) -> Pair:
    """Moments of a sine wave from its value and slope at the mean."""
    q, e = torch.exp(-var), -torch.expm1(-var)
    return torch.exp(-0.5 * var) * value, 0.5 * e * (e + 2.0 * q * slope.square())


@in_float64
def sin(mean: Tensor, std: Tensor) -> Pair:
    """m = e^{-var/2} sin mean, v = E (E + 2 q cos^2 mean) / 2, q = e^{-var}, E = 1 - q; exact."""
    return _wave(torch.sin(mean), torch.cos(mean), std.square())


@in_float64
def cos(mean: Tensor, std: Tensor) -> Pair:
    """m = e^{-var/2} cos mean, v = E (E + 2 q sin^2 mean) / 2, q = e^{-var}, E = 1 - q; exact."""
    return _wave(torch.cos(mean), torch.sin(mean), std.square())


def _log_scale(mean: Tensor, std: Tensor) -> Pair:
    """log |mean| and tau^2 = log(1 + var / mean^2) of the matching log-normal."""
    size = mean.abs().clamp(min=torch.finfo(mean.dtype).tiny ** 0.25)
    return torch.log(size), torch.log1p((std / size).square())


@in_float64
def lognormal_power(mean: Tensor, std: Tensor, p: Scalar) -> Pair:
    """f(x) = x^p of a positive x, taken as the log-normal of the same mean and variance (an assumption).

    With tau^2 = log(1 + var/mean^2): m = mean^p exp(p(p-1) tau^2 / 2), v = m^2 expm1(p^2 tau^2). A variable
    of negative mean is taken as minus a log-normal: odd integer powers change sign, other powers see |x|.
    """
    p = as_tensor(p, mean)
    log, tau2 = _log_scale(mean, std)
    flip = (mean < 0.0) & (torch.remainder(p, 2.0) == 1.0)
    m = _exp(p * log + 0.5 * p * (p - 1.0) * tau2)
    v = _exp(2.0 * p * log + p * (2.0 * p - 1.0) * tau2) * -torch.expm1(-p * p * tau2)
    return torch.where(flip, -m, m), v


@in_float64
def lognormal_log(mean: Tensor, std: Tensor) -> Pair:
    """f(x) = log x of a positive x, taken as log-normal: m = log mean - tau^2/2, v = tau^2."""
    log, tau2 = _log_scale(mean, std)
    return log - 0.5 * tau2, tau2
