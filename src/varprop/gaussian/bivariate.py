"""Covariances of functions of jointly Gaussian variables, for all pairs of two vectors of them.

With c_n = E[f(X) He_n(Z)] / sqrt(n!), X = mean + std Z, Mehler's formula is

    Cov(f(X), g(Y)) = sum over n of c_n d_n rho^n,

whose first term is E f' E g' Cov(X, Y). What rectifiers add to it is a single integral (mathematics.md, 9).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .normal import cdf, differentiated, pdf, ratio, unit_legendre
from .quadrature import Pointwise, expectation

TERMS = 8  # of the series: errors below 1e-3 of the std of both up to a correlation of .8
# Gauss-Legendre nodes of the integral for rectifiers, and the correlation up to which they leave an error below that of
# the dtype, or of 2e-6 (7e-10) for correlations of .999
NODES: dict[torch.dtype, tuple[tuple[int, float], ...]] = {
    torch.float32: ((4, 0.5), (8, 1.0)),
    torch.float64: ((20, 1.0),),
}
BLOCK = 1 << 14  # pairs whose temporaries stay in the cache of a processor
_LEGENDRE = {count: unit_legendre(count) for count in (4, 8, 20)}


@dataclass(frozen=True)
class Nonlinearity:
    """A function of every element of a Gaussian vector, as far as covariances depend on it."""

    std: Tensor  # standard deviations of the elements
    slope: Tensor  # E f'
    coefficients: Sequence[Tensor] = ()  # c_2, c_3, ... of the series
    # of a function of two straight parts: the change of its slope, and the mean of the element less the position
    # of the change, in standard deviations
    kink: tuple[Tensor, Tensor] | None = None


def rectifier(mean: Tensor, std: Tensor, at: Tensor, below: Tensor, above: Tensor) -> Nonlinearity:
    """The curve of a function of slope `below` on one side of a point `at` and `above` on the other."""
    a, bend = ratio(mean - at, std), above - below
    scale, before, hermite = bend * std * pdf(a), torch.zeros_like(a), torch.ones_like(a)
    coefficients = []
    for n in range(2, TERMS + 1):  # bend std phi(a) He_{n-2}(-a) / sqrt(n!)
        coefficients.append(scale * hermite / math.sqrt(math.factorial(n)))
        before, hermite = hermite, -a * hermite - (n - 2) * before
    return Nonlinearity(std, below + bend * cdf(a), coefficients, (bend, a))


def hermite(f: Pointwise, mean: Tensor, std: Tensor, **points: Any) -> list[Tensor]:
    """The coefficients c_1, c_2, ... of a function; `points` are those of `expectation`."""
    width = std.clamp_min(1e-6 * (1.0 + mean.detach().abs()))  # narrower ones have no covariance to speak of
    centre = f(mean.unsqueeze(0)).squeeze(0)

    def coefficient(n: int) -> Tensor:
        def integrand(x: Tensor) -> Tensor:
            z = (x - mean) / width
            before, polynomial = torch.zeros_like(z), torch.ones_like(z)
            for k in range(n):
                before, polynomial = polynomial, z * polynomial - k * before
            return (f(x) - centre) * polynomial

        return expectation(integrand, mean, width, **points)[0] / math.sqrt(math.factorial(n))

    return [coefficient(n) for n in range(1, TERMS + 1)]


def covariance(f: Nonlinearity, g: Nonlinearity, of_arguments: Tensor) -> Tensor:
    """Cov(f(X_i), g(Y_j)) from Cov(X_i, Y_j), (elements of X, elements of Y).

    Exact for two rectifiers (9.1), otherwise by the first terms of the series; not meant for Cov(f(X_i), f(X_i)), which
    is a variance.
    """
    count = max(1, BLOCK // max(1, of_arguments.shape[1]))
    starts = range(0, len(of_arguments), count)
    if f is not g or differentiated(of_arguments, f.std, f.slope):
        blocks = [_block(f, g, of_arguments, slice(start, start + count), slice(None)) for start in starts]
        return torch.cat(blocks) if blocks else torch.zeros_like(of_arguments)
    result = torch.empty_like(of_arguments)
    for start in starts:  # of a symmetric matrix one half
        rows, columns = slice(start, start + count), slice(start, None)
        block = _block(f, g, of_arguments, rows, columns)
        result[rows, columns], result[columns, rows] = block, block.mT
    return result


def _block(f: Nonlinearity, g: Nonlinearity, of_arguments: Tensor, rows: slice, columns: slice) -> Tensor:
    """`covariance` for some elements of X and of Y."""
    block, tiny = of_arguments[rows, columns], torch.finfo(of_arguments.dtype).tiny ** 0.5
    first = f.slope[rows, None] * block * g.slope[columns]
    limit = 1.0 - torch.finfo(block.dtype).eps  # where the derivative of the arc sine is finite
    rho = (block / f.std[rows, None].clamp_min(tiny) / g.std[columns].clamp_min(tiny)).clamp(-limit, limit)
    if f.kink is not None and g.kink is not None:
        (bend, a), (other_bend, b) = f.kink, g.kink
        joint = _rectified(a[rows, None], b[columns], rho)
        return first + (bend * f.std)[rows, None] * joint * (other_bend * g.std)[columns]
    total = torch.zeros_like(rho)
    for c, d in zip(reversed(f.coefficients), reversed(g.coefficients), strict=False):
        total = (total + c[rows, None] * d[columns]) * rho
    return first + total * rho


def _rectified(a: Tensor, b: Tensor, rho: Tensor) -> Tensor:
    """The covariance of two rectifiers minus rho Phi(a) Phi(b), for standard deviations of 1 (9.1).

    1 / 2 pi times the integral from 0 to asin rho of (rho - sin t) exp(-(a² + b² - 2 a b sin t) / (2 cos² t)) dt.
    """
    choices = NODES.get(rho.dtype, NODES[torch.float32])
    largest = float(rho.detach().abs().amax()) if len(choices) > 1 and rho.numel() else 1.0
    count = next(count for count, most in choices if largest <= most)
    product, squares, angle = a * b, 0.5 * (a * a + b * b), torch.asin(rho)
    total = torch.zeros_like(rho)
    for x, weight in _LEGENDRE[count]:
        sine = torch.sin(x * angle)
        total = total + weight * (rho - sine) * torch.exp((product * sine - squares) / (1.0 - sine * sine))
    return total * angle / (2.0 * math.pi)
