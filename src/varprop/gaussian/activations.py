"""Mean and variance after the activation functions of PyTorch, for a Gaussian input.

Piecewise linear ones are exact; the others are integrated by `quadrature.expectation` to about 1e-12, which
needs to know where each function bends (`curves.KNOTS`) and where it has kinks. Formulas: mathematics.md, sections 2-4.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import curves
from .curves import KNOTS
from .normal import Pair, Scalar, as_tensor, in_float64
from .quadrature import Points, Pointwise, expectation, shifted
from .rectifier import clamp, two_slopes

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946

Activation = Callable[[Tensor, Tensor], Pair]


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


def _smooth(curve: Pointwise, knots: Points = (), breaks: Points = ()) -> Activation:
    """Moments after a curve that is smooth but for breaks, by quadrature."""

    @in_float64
    def moments(mean: Tensor, std: Tensor) -> Pair:
        return expectation(curve, mean, std, knots=knots, breaks=breaks)

    return moments


def _step(curve: Pointwise, tail: Pointwise, low: float, high: float, knots: Points, breaks: Points = ()) -> Activation:
    """The same for a curve f that rises from low to high with f(-x) = low + high - f(x); tail = f - low for x < 0.

    It is integrated on the side of its lower limit, `shifted` by that; points are those of that side's variable.
    """

    @in_float64
    def moments(mean: Tensor, std: Tensor) -> Pair:
        right = mean > 0.0
        left = torch.where(right, -mean, mean)
        m, v = shifted(curve, tail, low, left < -1.0, left, std, knots=knots, breaks=breaks)
        return torch.where(right, (low + high) - m, m), v

    return moments


silu = _smooth(curves.silu, KNOTS["sigmoid"])
gelu = _smooth(curves.gelu, KNOTS["gelu"])
gelu_tanh = _smooth(curves.gelu_tanh, KNOTS["gelu"])
mish = _smooth(curves.mish, KNOTS["mish"])
hardswish = _smooth(curves.hardswish, breaks=KNOTS["hardswish"])
sigmoid = _step(torch.sigmoid, torch.sigmoid, 0.0, 1.0, KNOTS["sigmoid"])
tanh = _step(torch.tanh, lambda x: 2.0 * torch.sigmoid(2.0 * x), -1.0, 1.0, KNOTS["tanh"])
erf = _step(torch.erf, lambda x: torch.erfc(-x), -1.0, 1.0, KNOTS["erf"])
softsign = _step(
    F.softsign,
    lambda x: torch.where(x < 0.0, 1.0, 1.0 + 2.0 * x) / (1.0 + x.abs()),
    -1.0,
    1.0,
    KNOTS["softsign"],
    breaks=(0.0,),  # of f''
)
# pi/2 + arctan x = arg(-x + i)
atan = _step(torch.atan, lambda x: torch.atan2(torch.ones_like(x), -x), -0.5 * math.pi, 0.5 * math.pi, KNOTS["atan"])


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
        smooth = curves.softplus(x)
        return smooth if not jumps else torch.where(x > threshold, x, smooth)

    m, v = expectation(f, beta * mean, size * std, jumps=jumps, knots=KNOTS["sigmoid"])
    return m / beta, v / beta.square()


@in_float64
def logsigmoid(mean: Tensor, std: Tensor) -> Pair:
    """Log S(x) = -softplus(-x)."""
    m, v = softplus(-mean, std)
    return -m, v


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
