"""Dropout and other random draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..gaussian import rectifier
from ..gaussian.normal import cdf
from ..moments import Moments
from .arithmetic import mean_of, moments, var_of
from .axes import Value, extents
from .registry import rule, source

aten = torch.ops.aten

# What alpha dropout sets dropped values to: -lambda alpha of SELU (Klambauer et al., 2017).
_DROPPED = -1.7580993408473766


def _dropout_kernel(p: float, train: bool | None = True) -> tuple[str, float] | None:
    return ("dropout", p) if train is not False and 0 < p < 1 else None


Outcomes = list[tuple[float, float, float]]  # the chance of each, and slope and offset of the line that it is


def _dropout_outcomes(_x: Any, p: float, train: bool | None = True) -> Outcomes:
    if train is False or p == 0:
        return [(1.0, 1.0, 0.0)]
    return [(1.0, 0.0, 0.0)] if p == 1 else [(p, 0.0, 0.0), (1 - p, 1 / (1 - p), 0.0)]


def _alpha_dropout_outcomes(_x: Any, p: float, train: bool = True) -> Outcomes:
    if not train or p in (0, 1):
        return _dropout_outcomes(_x, p, train)
    scale = _alpha_scale(p)
    return [(p, 0.0, scale * (1 - p) * _DROPPED), (1 - p, scale, -scale * p * _DROPPED)]


def _alpha_scale(p: float) -> float:
    """By which the variance stays 1: (q + p q d^2)^{-1/2} with q = 1 - p."""
    return float((1 - p + p * (1 - p) * _DROPPED**2) ** -0.5)


_FEATURES: dict[str, Any] = {"per_channel": True, "kernel": _dropout_kernel, "mixture": _dropout_outcomes}
_DROPOUT: dict[str, Any] = {"operation": "dropout", "noise": True, **_FEATURES}


@rule(aten.feature_dropout, multilinear=True, **_FEATURES)
@rule(aten.dropout, **_DROPOUT)
def dropout(x: Moments, p: float, train: bool = True) -> Moments:
    """E' = E, Var' = (Var + p E^2) / (1 - p); exact for any distribution (mathematics.md, 8).

    For whole features the same holds of every element (that they drop together is not carried on).
    """
    if not train or p == 0:
        return Moments(x.mean, x.var)
    if p == 1:
        return Moments(torch.zeros_like(x.mean), torch.zeros_like(x.var))
    return Moments(x.mean, (x.var + p * x.mean.square()) / (1 - p))


@rule(aten.native_dropout, **_DROPOUT)
def native_dropout(x: Moments, p: float, train: bool | None = None) -> tuple[Moments, None]:
    """Moments as by `dropout`; the mask has none."""
    return dropout(x, p, train is not False), None


@rule(aten.feature_alpha_dropout, multilinear=True, per_channel=True, mixture=_alpha_dropout_outcomes)
@rule(aten.alpha_dropout, noise=True, per_channel=True, mixture=_alpha_dropout_outcomes)
def alpha_dropout(x: Moments, p: float, train: bool) -> Moments:
    """y = a (b x + (1 - b) d) - a p d with b kept with chance q = 1 - p, a = (q + p q d^2)^{-1/2}; exact.

    E' = a q E, Var' = a^2 (q Var + p q (E - d)^2): a mixture of the value and of d (Klambauer et al.,
    2017).
    """
    if not train or p in (0, 1):
        return dropout(x, p, train)
    keep = 1 - p
    scale = _alpha_scale(p)
    var = keep * x.var + p * keep * (x.mean - _DROPPED).square()
    return Moments(scale * keep * x.mean, scale**2 * var)


def _slopes_are_drawn(_x: Any, *arguments: Any, training: bool = False, **_: Any) -> bool:
    """Behind the two ends of the slopes: whether they are drawn."""
    return bool(arguments[2]) if len(arguments) > 2 else training


@rule(aten.rrelu, per_channel=True, skews=True, draws=_slopes_are_drawn)
def rrelu(
    x: Moments, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any
) -> Moments:
    """y = x+ - s x-, the slope s uniform and independent of x in training, else its average.

    Exact for Gaussian x: E' = E x+ - E[s] E x-, Var' = Var(x+ - E[s] x-) + Var(s) E[(x-)^2].
    """
    mean, var = rectifier.two_slopes(x.mean, x.std, 1.0, (lower + upper) / 2)
    if training:
        below, spread = rectifier.two_slopes(-x.mean, x.std, 1.0, 0.0)
        var = var + (upper - lower) ** 2 / 12 * (spread + below.square())
    return Moments(mean, var)


@rule(
    aten.rrelu_with_noise_functional,
    skews=True,
    draws=lambda x, noise, *arguments, **named: _slopes_are_drawn(x, *arguments, **named),
)
def rrelu_with_noise_functional(x: Moments, noise: Value, *args: Any, **kwargs: Any) -> tuple[Moments, None]:
    """Moments as by `rrelu`; the slopes that are drawn have none."""
    return rrelu(x, *args, **kwargs), None


def _draw(
    law: tuple[float, float],
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Moments:
    """Independent draws from one distribution: uniform along every axis. Integers get the default dtype."""
    dtype = dtype if dtype is not None and dtype.is_floating_point else torch.get_default_dtype()
    mean, var = (torch.full([1] * len(size), float(number), dtype=dtype, device=device) for number in law)
    return Moments(mean, var, size)


def _of_size(*draws: Any, law: Callable[..., tuple[float, float]], **facts: Any) -> None:
    """Register draws of a size, which is their last argument; those before it give mean and variance."""

    @source(*draws, **facts)
    def draw(*arguments: Any, **settings: Any) -> Moments:
        *numbers, size = arguments
        return _draw(law(*numbers), size, **settings)


def _like(*draws: Any, law: Callable[..., tuple[float, float]], **facts: Any) -> None:
    """Register draws in the form of their first argument; those behind it give mean and variance."""

    @source(*draws, **facts)
    def draw(
        x: Value, *numbers: Any, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
    ) -> Moments:
        return _draw(law(*numbers), extents(x), dtype or x.dtype, device or x.device)


# torch draws 24 bits in float32: neither zero nor one comes nearer than this, which keeps logarithms of a draw finite.
_NEAREST = 2.0**-25


def _uniform(low: float = 0.0, high: float = 1.0) -> tuple[float, float]:
    """On [a, b): E = (a + b)/2, Var = (b - a)^2/12."""
    return (low + high) / 2, (high - low) ** 2 / 12


def _uniform_drawn(z: Tensor, _form: Any, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return low + (high - low) * cdf(z).clamp(_NEAREST, 1 - _NEAREST)


_of_size(aten.rand, law=_uniform, drawn=_uniform_drawn)
_like(aten.rand_like, aten.uniform, law=_uniform, drawn=_uniform_drawn)


def _normal(mean: float = 0.0, std: float = 1.0) -> tuple[float, float]:
    return mean, std**2


_of_size(aten.randn, aten.normal.float_float, law=_normal)
_like(aten.randn_like, aten.normal_functional, law=_normal)


@source(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Value | float, std: Value | float = 1.0, **_: Any) -> Moments:
    """Normal about a mean with a standard deviation, themselves random or not: Var = Var[mean] + E[std^2]."""
    centre, var = mean_of(mean), var_of(mean) + (mean_of(std) * mean_of(std) + var_of(std))
    like = centre if isinstance(centre, Tensor) else var
    return moments(torch.as_tensor(centre, dtype=like.dtype, device=like.device), var)


def _exponential_drawn(z: Tensor, _form: Any, rate: float = 1.0, **_: Any) -> Tensor:
    drawn: Tensor = -torch.special.log_ndtr(z) / rate
    return drawn


_like(aten.exponential, law=lambda rate=1.0: (1 / rate, 1 / rate**2), drawn=_exponential_drawn)


def _integers(*ends: int) -> tuple[float, float]:
    """From a, which is 0 if left out, to b - 1: E = (a + b - 1)/2, Var = ((b - a)^2 - 1)/12."""
    low, high = (0, *ends)[-2:]
    return (low + high - 1) / 2, ((high - low) ** 2 - 1) / 12


def _integer_outcomes(x: Moments, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """Equally likely ones between the ends, the only whole numbers among the arguments."""
    low, high = (0, *(a for a in args if isinstance(a, int)))[-2:]
    values = torch.arange(low, high, dtype=x.dtype, device=x.device)
    return values, torch.full((len(values), *x.shape), 1 / len(values), dtype=x.dtype, device=x.device)


_of_size(aten.randint.default, aten.randint.low, law=_integers, outcomes=_integer_outcomes)
_like(aten.randint_like.default, aten.randint_like.low_dtype, law=_integers, outcomes=_integer_outcomes)


def _coin_outcomes(x: Moments, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device), torch.stack([1 - x.mean, x.mean])


_like(aten.bernoulli.p, law=lambda p=0.5: (p, p * (1 - p)), outcomes=_coin_outcomes)


@source(aten.bernoulli.default, outcomes=_coin_outcomes)
def bernoulli(chance: Value, **_: Any) -> Moments:
    """One with the given chance, itself random or not: E = E[p], Var = E[p] (1 - E[p])."""
    mean = mean_of(chance)
    return Moments(mean, (mean * (1 - mean)).clamp_min(0), extents(chance))


@source(aten.bernoulli.Tensor, outcomes=_coin_outcomes)
def bernoulli_tensor(x: Value, chance: Value, **_: Any) -> Moments:
    """Draws as by `bernoulli`, with chances that broadcast to the shape of x."""
    drawn = bernoulli(chance)
    return Moments(drawn.mean.expand(extents(x)), drawn.var.expand(extents(x)))


def _module_outcomes(module: nn.AlphaDropout, x: Any) -> Outcomes:
    return _alpha_dropout_outcomes(x, module.p, module.training)


@rule(nn.FeatureAlphaDropout, multilinear=True, mixture=_module_outcomes)
@rule(nn.AlphaDropout, noise=True, mixture=_module_outcomes)
def alpha_dropout_module(module: nn.AlphaDropout, x: Moments) -> Moments:
    """The module whole: export writes it out as products with a mask that then looks independent of itself."""
    return alpha_dropout(x, module.p, module.training)
