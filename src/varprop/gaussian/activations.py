"""Mean and variance after the activation functions of PyTorch, for a Gaussian input.

Piecewise linear ones are exact; the others are integrated by `quadrature.expectation` to about 1e-12, which
needs to know where each function bends (`curves.KNOTS`) and where it has kinks. Formulas: mathematics.md, sections 2-4.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import curves
from .curves import KNOTS
from .normal import Pair, Scalar, as_tensor, in_float64
from .quadrature import expectation, reflected, shifted
from .rectifier import clamp, two_slopes

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


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


@in_float64
def hardswish(mean: Tensor, std: Tensor) -> Pair:
    """x relu6(x + 3) / 6; quadrature, kinks at -3 and 3."""
    return expectation(curves.hardswish, mean, std, breaks=KNOTS["hardswish"])


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
def sigmoid(mean: Tensor, std: Tensor) -> Pair:
    """1 / (1 + e^{-x}); quadrature on the side of its zero limit, as S(x) = 1 - S(-x)."""
    return reflected(torch.sigmoid, torch.sigmoid, 0.0, 1.0, mean, std, knots=KNOTS["sigmoid"])


@in_float64
def tanh(mean: Tensor, std: Tensor) -> Pair:
    """Tanh x; quadrature, shifted by its limits: 1 + tanh x = 2 S(2x)."""
    return reflected(torch.tanh, lambda x: 2.0 * torch.sigmoid(2.0 * x), -1.0, 1.0, mean, std, knots=KNOTS["tanh"])


@in_float64
def erf(mean: Tensor, std: Tensor) -> Pair:
    """Erf x; quadrature, shifted by its limits: 1 + erf x = erfc(-x)."""
    return reflected(torch.erf, lambda x: torch.erfc(-x), -1.0, 1.0, mean, std, knots=KNOTS["erf"])


@in_float64
def softsign(mean: Tensor, std: Tensor) -> Pair:
    """x / (1 + |x|); quadrature, shifted by its limits, f'' jumps at 0."""
    return reflected(
        F.softsign,
        lambda x: torch.where(x < 0.0, 1.0, 1.0 + 2.0 * x) / (1.0 + x.abs()),
        -1.0,
        1.0,
        mean,
        std,
        breaks=(0.0,),
        knots=KNOTS["softsign"],
    )


@in_float64
def atan(mean: Tensor, std: Tensor) -> Pair:
    """Arctan x; quadrature, shifted by its limits: pi/2 + arctan x = arg(-x + i)."""
    half = 0.5 * math.pi
    return reflected(
        torch.atan, lambda x: torch.atan2(torch.ones_like(x), -x), -half, half, mean, std, knots=KNOTS["atan"]
    )


@in_float64
def silu(mean: Tensor, std: Tensor) -> Pair:
    """x S(x), also called swish; quadrature."""
    return expectation(curves.silu, mean, std, knots=KNOTS["sigmoid"])


@in_float64
def gelu(mean: Tensor, std: Tensor) -> Pair:
    """x Phi(x); quadrature, with Phi from erfc for the digits of the lower tail."""
    return expectation(curves.gelu, mean, std, knots=KNOTS["gelu"])


@in_float64
def gelu_tanh(mean: Tensor, std: Tensor) -> Pair:
    """The tanh form of GELU, x S(2u) with u = sqrt(2/pi) (x + 0.044715 x^3); quadrature."""
    return expectation(curves.gelu_tanh, mean, std, knots=KNOTS["gelu"])


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
def mish(mean: Tensor, std: Tensor) -> Pair:
    """x tanh(softplus(x)); quadrature."""
    return expectation(curves.mish, mean, std, knots=KNOTS["mish"])


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
