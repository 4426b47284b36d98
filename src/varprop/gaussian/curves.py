"""The smooth activation functions themselves: value, slope, and where each bends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .normal import cdf, pdf

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


def silu(x: Tensor) -> Tensor:
    """x S(x)."""
    return x * torch.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x)."""
    return x * cdf(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU: x S(2u), u = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * torch.sigmoid(_TANH_RATE * (x + 0.044715 * x * x * x))


def softplus(x: Tensor, beta: float = 1.0) -> Tensor:
    """log(1 + e^{beta x}) / beta."""
    return F.softplus(beta * x, threshold=40.0) / beta


def mish(x: Tensor) -> Tensor:
    """x tanh(softplus(x))."""
    return x * torch.tanh(softplus(x))


def hardswish(x: Tensor) -> Tensor:
    """x relu6(x + 3) / 6."""
    return x * (x + 3.0).clamp(0.0, 6.0) / 6.0


def _sigmoid(x: Tensor) -> ValueAndSlope:
    f = torch.sigmoid(x)
    return f, f * (1.0 - f)


def _tanh(x: Tensor) -> ValueAndSlope:
    f = torch.tanh(x)
    return f, 1.0 - f * f


def _silu(x: Tensor) -> ValueAndSlope:
    s = torch.sigmoid(x)
    return x * s, s * (1.0 + x * (1.0 - s))


def _gelu(x: Tensor) -> ValueAndSlope:
    below = cdf(x)
    return x * below, below + x * pdf(x)


def _gelu_tanh(x: Tensor) -> ValueAndSlope:
    s = torch.sigmoid(_TANH_RATE * (x + 0.044715 * x * x * x))
    return x * s, s + x * s * (1.0 - s) * _TANH_RATE * (1.0 + 3 * 0.044715 * x * x)


def _softplus(x: Tensor, beta: float) -> ValueAndSlope:
    return softplus(x, beta), torch.sigmoid(beta * x)


def _elu(x: Tensor, alpha: float, scale: float, rate: float) -> ValueAndSlope:
    below = rate * x.clamp(max=0.0)
    value = torch.where(x > 0, x, alpha * torch.expm1(below))
    return scale * value, scale * torch.where(x > 0, torch.ones_like(x), alpha * rate * torch.exp(below))


def _mish(x: Tensor) -> ValueAndSlope:
    t, s = torch.tanh(softplus(x)), torch.sigmoid(x)
    return x * t, t + x * (1.0 - t * t) * s


def _erf(x: Tensor) -> ValueAndSlope:
    return torch.erf(x), 2.0 / math.sqrt(math.pi) * torch.exp(-x * x)


def _hardswish(x: Tensor) -> ValueAndSlope:
    return hardswish(x), torch.where(x.abs() < 3.0, x / 3.0 + 0.5, (x > 0).to(x.dtype))


@dataclass(frozen=True)
class Curve:
    """A function of one variable and some numbers.

    Attributes:
        with_slope: Its values and slopes.
        knots: Where it bends, for its numbers.
        narrow: The standard deviation up to which 64 equidistant nodes integrate it (0: never, for it has a kink).
    """

    with_slope: Callable[..., ValueAndSlope]
    knots: Callable[..., Sequence[float]]
    narrow: float


def _scaled(name: str, rate: float) -> list[float]:
    return [knot / rate for knot in KNOTS[name]]


CURVES = {
    "sigmoid": Curve(_sigmoid, lambda: KNOTS["sigmoid"], 2.5),
    "tanh": Curve(_tanh, lambda: KNOTS["tanh"], 1.2),
    "silu": Curve(_silu, lambda: KNOTS["sigmoid"], 2.5),
    "gelu": Curve(_gelu, lambda: KNOTS["gelu"], 2.2),
    "gelu_tanh": Curve(_gelu_tanh, lambda: KNOTS["gelu"], 2.0),
    "softplus": Curve(_softplus, lambda beta: _scaled("sigmoid", beta), 2.5),
    "elu": Curve(_elu, lambda _alpha, _scale, rate: _scaled("elu", rate), 0.0),
    "mish": Curve(_mish, lambda: KNOTS["mish"], 1.8),
    "erf": Curve(_erf, lambda: KNOTS["erf"], 1.5),
    "hardswish": Curve(_hardswish, lambda: KNOTS["hardswish"], 0.0),
}
