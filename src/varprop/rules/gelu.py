"""x Phi(x) of many Gaussians at once: a closed form, some twenty times cheaper than quadrature."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..gaussian import activations
from ..gaussian.normal import cdf, differentiated, gauss_legendre, in_float64, pdf

_MANY = 1 << 13  # elements from which the closed form is worth a look at where it holds
_LOWEST, _NARROWEST = -3.0, 0.05  # beyond, differences of nearly equal terms cost more than six digits


@functools.cache
def _rule() -> list[tuple[float, float]]:
    return [((1 + x) / 2, w / 2) for x, w in zip(*gauss_legendre(16), strict=True)]


def _owen(h: Tensor, k: Tensor) -> Tensor:
    """Owen's T(h, k) = int_0^k exp(-h^2 (1 + x^2) / 2) / (1 + x^2) dx / 2 pi for 0 <= k <= 1."""
    total = torch.zeros_like(h)
    for x, w in _rule():
        square = 1 + (x * k).square()
        total = total + w * torch.exp(-0.5 * h.square() * square) / square
    return total * k / (2 * math.pi)


@in_float64
def _closed(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """By Stein's lemma, E[X h(X)] = m E h + s^2 E h', down to E Phi^2 = Phi(a) - 2 T(a, (1 + 2 s^2)^(-1/2)).

    With r^2 = 1 + s^2, a = m / r: E g = m Phi(a) + s^2 phi(a) / r, E[phi Phi] = phi(a) / r Phi(a / sqrt(1 + 2 s^2)),
    E phi^2 = exp(-m^2 / (1 + 2 s^2)) / (2 pi sqrt(1 + 2 s^2)).
    """
    var = std.square()
    r, wide = (1 + var).sqrt(), (1 + 2 * var).sqrt()
    a = mean / r
    first = mean * cdf(a) + var / r * pdf(a)
    square = cdf(a) - 2 * _owen(a, 1 / wide)  # E Phi^2
    both = pdf(a) / r * cdf(a / wide)  # E phi Phi
    density = torch.exp(-(mean / wide).square()) / (2 * math.pi * wide)  # E phi^2
    product = (mean * both + var * density) / (1 + var)  # E X phi Phi
    second = mean * (mean * square + 2 * var * both) + var * (square + 2 * product)
    return first, (second - first.square()).clamp_min(0.0)


def gelu(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """The closed form where it holds, if there are many elements and no derivative is asked for; else quadrature."""
    many = mean.numel() >= _MANY and mean.device.type == "cpu"
    if torch.compiler.is_compiling() or not many or differentiated(mean, std):
        return activations.gelu(mean, std)
    holds = (std >= _NARROWEST) & (mean >= _LOWEST * (1 + std.square()).sqrt())
    m, v = _closed(torch.where(holds, mean, 0.0), torch.where(holds, std, 1.0))
    if not bool(holds.all()):
        m[~holds], v[~holds] = activations.gelu(mean[~holds], std[~holds])
    return m, v
