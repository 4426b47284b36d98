"""Rounding to whole numbers, and what it leaves over."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..gaussian.normal import Pair, cdf, in_float64, pdf, ratio
from .registry import RANDOM, elementwise

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
    """Of the remainder R = X - floor X: E R, Var R and Cov(X, R) / std^2, by its Fourier series; for wide Gaussians.

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
    whole = (std.square() * (1 - 2 * slope) + spread).clamp_min(0)
    return torch.where(wide, mean - first, count), torch.where(wide, whole, var)


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
    """Why `frac` is approximate in a longer expression of a variable, unless that stays well inside what is resolved.

    Half of it, since the variable may be stretched before; where only its form is known it may reach anywhere.
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
    var = torch.where(
        wide,
        second - (first - negative).square(),
        narrow.square() + steps - 2 * narrow * density,
    )
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
    whole, var = floor(mean + 0.5, std)
    return torch.where(std > 0, whole, mean.round()), var


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


def _quotient_steps(divisor: float | Tensor, *, rounding_mode: str | None = None) -> list[Any]:
    steps = {None: [], "floor": [0, *_FRACTIONS], "trunc": _FRACTIONS}[rounding_mode]
    return [k * divisor for k in steps]


elementwise(
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    jumps=_quotient_steps,
    affine=lambda a, b, rounding_mode=None: a / b if rounding_mode is None else None,
    handles=_by_a_constant,
    approximate=lambda _x, _divisor, rounding_mode=None: STEPS if rounding_mode else None,
)
