"""Mean and variance of GELU, x Phi(x), of Gaussian variables where there are many of them: without quadrature over x.

With X ~ N(m, s^2), r^2 = 1 + s^2 and a = m / r the mean is m Phi(a) + s^2 phi(a) / r. The variance is s^2 (E g')^2 and
what the second derivative g'' adds to that: a series in s^2 / r^2 where few of its terms do, else an integral of
E[g''(X) g''(Y)] over the covariance of X and Y.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import activations
from .normal import Pair, cdf, differentiated, unit_legendre

_MANY = 1 << 13  # elements from which it is worth it
_BLOCK = 1 << 16  # elements whose temporaries stay in the cache of a processor, enough for two threads
_LOWEST = -6.0  # how many deviations r below zero the number of terms is chosen for
_MOST_TERMS = 28  # beyond, the integral is cheaper
_NODES = ((2.0, 6), (4.0, 8), (16.0, 12), (math.inf, 20))  # by the largest std
_NODES_IN_FLOAT64 = 40
_PEAK = 1 / math.sqrt(2 * math.pi)  # of the normal density


def _product(square: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """2 pi E[g''(X) g''(Y)], with p = s^2 (1 + t), b = 1 / (1 + s^2 (1 - t)) and square = m^2.

    u = (X + Y) / sqrt 2 and w = (X - Y) / sqrt 2 are independent, and phi(X) phi(Y) makes of them Gaussians of
    variances 1 - a and 1 - b, a = 1 / (1 + p); (2 - X^2)(2 - Y^2) = 4 - 2 (u^2 + w^2) + (u^2 - w^2)^2 / 4.
    """
    a = 1.0 / (1.0 + p)
    rate = square * a
    spread, w = 1.0 - a, 1.0 - b
    u = torch.addcmul(spread, rate, a, value=2.0)
    fourth = u * (u + 4.0 * spread - 2.0 * w) + 3.0 * w * w - 2.0 * spread * spread
    return torch.sqrt(a * b) * torch.exp(-rate) * (4.0 - 2.0 * (u + w) + 0.25 * fourth)


def _integral(mean: Tensor, var: Tensor, wide: Tensor, nodes: int) -> Tensor:
    """Over x in q = s^2 (1 - t) = r^{2x} - 1, in which it is smooth for every s."""
    square, log, total = mean * mean, torch.log(wide), torch.zeros_like(mean)
    for x, weight in unit_legendre(nodes):
        q = torch.expm1(x * log)
        b = 1.0 / (1.0 + q)
        total = torch.addcdiv(total, q * _product(square, b, 2.0 * var - q), b, value=weight)
    return total * log / (2.0 * math.pi)


def _series(start: Tensor, first: Tensor, second: Tensor, var: Tensor, density: Tensor, terms: int) -> Tensor:
    """`start` and the terms from k = 2 on.

    They follow from f_k = (-s)^k E phi^(k)(X), f_{k+1} = first f_k - k second f_{k-1}, first = m s / r^2 and
    second = s^2 / r^2.
    """
    before, now, total = density, first * density, start
    for k in range(2, terms + 2):
        after = torch.mul(first, now).addcmul_(second, before, value=1 - k)
        term = torch.addcmul(after, var, before, value=-1.0)
        total.addcmul_(term, term, value=1.0 / math.factorial(k))
        before, now = now, after
    return total


def _terms(lowest: float, widest: float) -> int:
    """The remainder after K terms is (s^2 / r^2)^K exp(a^2 / 2) of the sum (Cramer's bound of Hermite polynomials)."""
    share = widest**2 / (1 + widest**2)
    if not share:
        return 1
    bound = math.log(1e-6) - min(0.0, max(lowest, _LOWEST)) ** 2 / 2
    return max(2, math.ceil(bound / math.log(share)))


def _moments(mean: Tensor, std: Tensor) -> Pair:
    var = std * std
    wide = 1.0 + var
    root = torch.rsqrt(wide)
    inverse, a = root * root, mean * root
    below, density = cdf(a), torch.exp(-0.5 * a * a).mul_(root).mul_(_PEAK)
    share = mean * inverse
    slope = torch.addcmul(below, share, density)
    lowest, widest = float(a.amin()), float(std.amax())
    terms = _terms(lowest, widest)
    total = var * slope * slope
    if mean.dtype == torch.float32 and terms <= _MOST_TERMS:
        total = _series(total, share * std, var * inverse, var, density, terms)
    else:
        coarse = next(n for most, n in _NODES if not widest > most)
        total = total + _integral(mean, var, wide, coarse if mean.dtype == torch.float32 else _NODES_IN_FLOAT64)
    return (mean * below).addcmul_(var, density), total


def gelu_of_many(mean: Tensor, std: Tensor) -> Pair:
    """Moments of GELU: by these closed forms where there are many elements and no derivative is asked for."""
    many = mean.numel() >= _MANY and mean.device.type == "cpu" and mean.dtype == std.dtype
    if torch.compiler.is_compiling() or not many or differentiated(mean, std):
        return activations.gelu(mean, std)
    mean, std = torch.broadcast_tensors(mean, std)
    blocks = zip(mean.reshape(-1).split(_BLOCK), std.reshape(-1).split(_BLOCK), strict=True)
    m, v = (torch.cat(pieces).view(mean.shape) for pieces in zip(*(_moments(*b) for b in blocks), strict=True))
    return m, v
