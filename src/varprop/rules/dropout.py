"""Dropout and other random draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..gaussian import rectifier
from ..gaussian.normal import cdf
from ..moments import Moments
from .axes import Value, extents
from .registry import rule, source

aten = torch.ops.aten

# What alpha dropout sets dropped values to: -lambda alpha of SELU (Klambauer et al., 2017).
_DROPPED = -1.7580993408473766


def _dropout_kernel(p: float, train: bool | None = True) -> tuple[str, float] | None:
    return ("dropout", p) if train is not False and 0 < p < 1 else None


@rule(aten.feature_dropout, multilinear=True, per_channel=True, kernel=_dropout_kernel)
@rule(aten.dropout, noise=True, per_channel=True, kernel=_dropout_kernel)
def dropout(x: Moments, p: float, train: bool = True) -> Moments:
    """E' = E, Var' = (Var + p E^2) / (1 - p); exact for any distribution (mathematics.md, 8).

    For whole features the same holds of every element (that they drop together is not carried on).
    """
    if not train or p == 0:
        return Moments(x.mean, x.var)
    if p == 1:
        return Moments(torch.zeros_like(x.mean), torch.zeros_like(x.var))
    return Moments(x.mean, (x.var + p * x.mean.square()) / (1 - p))


@rule(aten.native_dropout, noise=True, per_channel=True, kernel=_dropout_kernel)
def native_dropout(x: Moments, p: float, train: bool | None = None) -> tuple[Moments, None]:
    """As `dropout`; the mask stays unknown."""
    return dropout(x, p, train is not False), None


@rule(aten.feature_alpha_dropout, multilinear=True, per_channel=True)
@rule(aten.alpha_dropout, noise=True, per_channel=True)
def alpha_dropout(x: Moments, p: float, train: bool) -> Moments:
    """y = a (b x + (1 - b) d) - a p d with b kept with chance q = 1 - p, a = (q + p q d^2)^{-1/2}; exact.

    E' = a q E, Var' = a^2 (q Var + p q (E - d)^2): a mixture of the value and of d (Klambauer et al.,
    2017).
    """
    if not train or p in (0, 1):
        return dropout(x, p, train)
    keep = 1 - p
    scale = (keep + p * keep * _DROPPED**2) ** -0.5
    var = keep * x.var + p * keep * (x.mean - _DROPPED).square()
    return Moments(scale * keep * x.mean, scale**2 * var)


@rule(aten.rrelu, per_channel=True)
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


@rule(aten.rrelu_with_noise_functional)
def rrelu_with_noise_functional(x: Moments, noise: Value, *args: Any, **kwargs: Any) -> tuple[Moments, None]:
    """As `rrelu`; the drawn slopes stay unknown."""
    return rrelu(x, *args, **kwargs), None


def _draw(
    mean: float,
    var: float,
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Moments:
    """Independent draws from one distribution: uniform along every axis. Integers get the default dtype."""
    dtype = dtype if dtype is not None and dtype.is_floating_point else torch.get_default_dtype()
    like = torch.empty([1] * len(size), dtype=dtype, device=device)
    return Moments(torch.full_like(like, mean), torch.full_like(like, var), size)


def _draw_like(
    x: Value,
    mean: float,
    var: float,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Moments:
    return _draw(mean, var, extents(x), dtype or x.dtype, device or x.device)


# torch draws 24 bits in float32: neither zero nor one comes nearer than this, which keeps logarithms of a draw finite.
_NEAREST = 2.0**-25


def _uniform_drawn(z: Tensor, *_: Any, **__: Any) -> Tensor:
    return cdf(z).clamp(_NEAREST, 1 - _NEAREST)


def _between_drawn(z: Tensor, x: Value, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return low + (high - low) * _uniform_drawn(z)


def _exponential_drawn(z: Tensor, x: Value, lambd: float = 1.0, **_: Any) -> Tensor:
    drawn: Tensor = -torch.special.log_ndtr(z) / lambd
    return drawn


@source(aten.rand, drawn=_uniform_drawn)
def rand(size: Sequence[int], **kwargs: Any) -> Moments:
    """Uniform on [0, 1): E = 1/2, Var = 1/12."""
    return _draw(1 / 2, 1 / 12, size, **kwargs)


@source(aten.rand_like, drawn=_uniform_drawn)
def rand_like(x: Value, **kwargs: Any) -> Moments:
    """Uniform on [0, 1): E = 1/2, Var = 1/12."""
    return _draw_like(x, 1 / 2, 1 / 12, **kwargs)


@source(aten.uniform, drawn=_between_drawn)
def uniform(x: Value, low: float = 0.0, high: float = 1.0, **_: Any) -> Moments:
    """Uniform on [a, b): E = (a + b)/2, Var = (b - a)^2/12."""
    return _draw_like(x, (low + high) / 2, (high - low) ** 2 / 12)


@source(aten.randn)
def randn(size: Sequence[int], **kwargs: Any) -> Moments:
    """Standard normal."""
    return _draw(0.0, 1.0, size, **kwargs)


@source(aten.randn_like)
def randn_like(x: Value, **kwargs: Any) -> Moments:
    """Standard normal."""
    return _draw_like(x, 0.0, 1.0, **kwargs)


@source(aten.normal_functional)
def normal_functional(x: Value, mean: float = 0.0, std: float = 1.0, **_: Any) -> Moments:
    """Normal with the given moments."""
    return _draw_like(x, mean, std**2)


@source(aten.normal.float_float)
def normal_size(mean: float, std: float, size: Sequence[int], **kwargs: Any) -> Moments:
    """Normal with the given moments."""
    return _draw(mean, std**2, size, **kwargs)


@source(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor)
def normal(mean: Value | float, std: Value | float = 1.0, **_: Any) -> Moments:
    """Normal about a mean with a standard deviation, themselves random or not: Var = Var[mean] + E[std^2]."""
    centre, noise = (mean.mean, mean.var) if isinstance(mean, Moments) else (mean, 0.0)
    second = std.mean.square() + std.var if isinstance(std, Moments) else std * std
    var = noise + second
    like = centre if isinstance(centre, Tensor) else var
    assert isinstance(like, Tensor)
    parts = (torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in (centre, var))
    return Moments(*torch.broadcast_tensors(*parts))


@source(aten.exponential, drawn=_exponential_drawn)
def exponential(x: Value, lambd: float = 1.0, **_: Any) -> Moments:
    """Exponential of rate r: E = 1/r, Var = 1/r^2."""
    return _draw_like(x, 1 / lambd, 1 / lambd**2)


def _equally_likely(x: Moments, low: int, high: int) -> tuple[Tensor, Tensor]:
    values = torch.arange(low, high, dtype=x.dtype, device=x.device)
    return values, torch.full((len(values), *x.shape), 1 / len(values), dtype=x.dtype, device=x.device)


def _below_outcomes(x: Moments, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
    """Of draws below a number: among the arguments it is the only whole one."""
    (high,) = (a for a in args if isinstance(a, int))
    return _equally_likely(x, 0, high)


def _between_outcomes(x: Moments, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
    low, high = (a for a in args if isinstance(a, int))
    return _equally_likely(x, low, high)


def _coin_outcomes(x: Moments, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.tensor([0.0, 1.0], dtype=x.dtype, device=x.device), torch.stack([1 - x.mean, x.mean])


def _integers(low: int, high: int) -> tuple[float, float]:
    """Moments of an integer drawn from low, ..., high - 1."""
    return (low + high - 1) / 2, ((high - low) ** 2 - 1) / 12


@source(aten.randint.default, outcomes=_below_outcomes)
def randint(high: int, size: Sequence[int], **kwargs: Any) -> Moments:
    """Integers below n: E = (n - 1)/2, Var = (n^2 - 1)/12."""
    return _draw(*_integers(0, high), size, **kwargs)


@source(aten.randint.low, outcomes=_between_outcomes)
def randint_low(low: int, high: int, size: Sequence[int], **kwargs: Any) -> Moments:
    """Integers from a to b - 1: E = (a + b - 1)/2, Var = ((b - a)^2 - 1)/12."""
    return _draw(*_integers(low, high), size, **kwargs)


@source(aten.randint_like.default, outcomes=_below_outcomes)
def randint_like(x: Value, high: int, **kwargs: Any) -> Moments:
    """Integers below n: E = (n - 1)/2, Var = (n^2 - 1)/12."""
    return _draw_like(x, *_integers(0, high), **kwargs)


@source(aten.randint_like.low_dtype, outcomes=_between_outcomes)
def randint_like_low(x: Value, low: int, high: int, **kwargs: Any) -> Moments:
    """Integers from a to b - 1: E = (a + b - 1)/2, Var = ((b - a)^2 - 1)/12."""
    return _draw_like(x, *_integers(low, high), **kwargs)


@source(aten.bernoulli.p, outcomes=_coin_outcomes)
def bernoulli_p(x: Value, p: float, **_: Any) -> Moments:
    """One with chance p: E = p, Var = p (1 - p)."""
    return _draw_like(x, p, p * (1 - p))


@source(aten.bernoulli.default, outcomes=_coin_outcomes)
def bernoulli(chance: Value, **_: Any) -> Moments:
    """One with the given chance, itself random or not: E = E[p], Var = E[p] (1 - E[p])."""
    mean = chance.mean if isinstance(chance, Moments) else chance
    return Moments(mean, (mean * (1 - mean)).clamp_min(0), extents(chance))


@source(aten.bernoulli.Tensor, outcomes=_coin_outcomes)
def bernoulli_tensor(x: Value, chance: Value, **_: Any) -> Moments:
    """As `bernoulli`, with chances that broadcast to the shape of x."""
    drawn = bernoulli(chance)
    return Moments(drawn.mean.expand(extents(x)), drawn.var.expand(extents(x)))


@rule(nn.FeatureAlphaDropout, multilinear=True)
@rule(nn.AlphaDropout, noise=True)
def alpha_dropout_module(module: nn.AlphaDropout, x: Moments) -> Moments:
    """The module whole: export writes it out as products with a mask that then looks independent of itself."""
    return alpha_dropout(x, module.p, module.training)
