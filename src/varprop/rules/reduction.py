"""Sums, averages, extremes, products and sample variances over axes of independent values.

Maxima and minima are exact up to the quadrature of `gaussian.maximum`, as in `pooling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as product
from typing import Any

import torch
from torch import Tensor

from ..gaussian import maximum
from ..gaussian.normal import safe_sqrt
from ..graph import ops
from ..moments import Moments
from .axes import at_random_place, negative, write_out
from .registry import rule, structural

aten = torch.ops.aten
Dims = int | Sequence[int] | None

_ROOT = (
    "the sample variance is taken as gamma distributed (exact for equal means and variances; else off by "
    "0.01 std and 2 %, at worst 0.06 std and 14 % if variances differ by factors)"
)


def reduced_axes(x: Moments, dim: Dims) -> list[int]:
    """The reduced axes, non-negative; all of them for None or an empty list."""
    given = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    return [axis % x.ndim for axis in given] if x.ndim else []


def _copies(x: Moments, axes: Sequence[int]) -> int:
    """How many elements each stored one stands for along the axes."""
    return product([x.full[axis] // max(1, x.shape[axis]) for axis in axes])


@rule(aten.sum.dim_IntList, aten.sum.default, aten.nansum, averages=True)
def sum_dim(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """E = sum E_i, Var = sum Var_i of independent values, none of which is ever NaN."""
    axes, x = reduced_axes(x, dim), x.to(dtype or x.dtype)
    copies = _copies(x, axes)
    return Moments(x.mean.sum(axes, keepdim) * copies, x.var.sum(axes, keepdim) * copies)


@rule(aten.mean.dim, aten.mean.default, aten.nanmean, averages=True)
def mean_dim(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """E = mean E_i, Var = mean Var_i / n of n independent values, none of which is ever NaN."""
    axes, x = reduced_axes(x, dim), x.to(dtype or x.dtype)
    count = product([x.full[axis] for axis in axes])
    return Moments(x.mean.mean(axes, keepdim), x.var.mean(axes, keepdim) / count)


@structural(ops.position_average)
def position_average(x: Moments, dims: Sequence[int], keepdim: bool) -> Moments:
    """Mean and variance of the value at a random position: those of an average of positions that all vary together.

    So a global average counts in the deep form of the normalization (`norm.global_average`); `propagate` takes the
    positions as independent (`mean_dim`).
    """
    axes = list(dims)
    mean, var = at_random_place(x, axes)
    kept = range(x.ndim) if keepdim else [axis for axis in range(x.ndim) if axis not in axes]
    full = [1 if axis in axes else x.full[axis] for axis in kept]
    if not keepdim:
        mean, var = mean.squeeze(tuple(axes)), var.squeeze(tuple(axes))
    return Moments(mean, var, full)


@rule(aten.cumsum, multilinear=True, mixes_positions=True, entangles=True)
def cumsum(x: Moments, dim: int, *, dtype: torch.dtype | None = None) -> Moments:
    """E = partial sums of E_i, Var = partial sums of Var_i (each sum's own variance; they share terms)."""
    x = write_out(x, dim).to(dtype or x.dtype) if x.ndim else x
    return Moments(x.mean.cumsum(dim), x.var.cumsum(dim))


def joined_last(x: Tensor, axes: list[int]) -> Tensor:
    """The reduced axes joined into one, at the end."""
    return x.movedim(axes, list(range(-len(axes), 0))).flatten(-len(axes)) if axes else x.unsqueeze(-1)


def restored(x: Moments, axes: list[int], keepdim: bool) -> Moments:
    """The reduced axes back in place with extent 1, if they are to be kept."""
    mean, var = x.mean, x.var
    for axis in sorted(axes) if keepdim else ():
        mean, var = mean.unsqueeze(axis), var.unsqueeze(axis)
    return Moments(mean, var)


@rule(aten.amax, aten.max.default, order_statistic=True, maximum=True)
def amax(x: Moments, dim: Dims = (), keepdim: bool = False) -> Moments:
    """Maximum of independent Gaussians; over uniform axes only, of equal ones (mathematics.md, 7)."""
    axes = reduced_axes(x, dim)
    copies = _copies(x, axes)
    if all(x.shape[axis] == 1 for axis in axes):
        mean, var = maximum.iid(joined_last(x.mean, axes)[..., 0], joined_last(x.std, axes)[..., 0], copies)
    else:
        x = write_out(x, *axes)
        mean, var = maximum.independent(joined_last(x.mean, axes), joined_last(x.std, axes), -1)
    return restored(Moments(mean, var), axes, keepdim)


@rule(aten.amin, aten.min.default, order_statistic=True)
def amin(x: Moments, dim: Dims = (), keepdim: bool = False) -> Moments:
    """min x = -max(-x)."""
    return negative(amax(negative(x), dim, keepdim))


@rule(aten.max.dim, order_statistic=True, maximum=True)
def max_dim(x: Moments, dim: int, keepdim: bool = False) -> tuple[Moments, None]:
    """As `amax`; where the maximum was found stays unknown."""
    return amax(x, dim, keepdim), None


@rule(aten.min.dim, order_statistic=True)
def min_dim(x: Moments, dim: int, keepdim: bool = False) -> tuple[Moments, None]:
    """As `amin`; where the minimum was found stays unknown."""
    return amin(x, dim, keepdim), None


@rule(aten.aminmax)
def aminmax(x: Moments, *, dim: int | None = None, keepdim: bool = False) -> tuple[Moments, Moments]:
    """As `amin` and `amax`."""
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@rule(aten.prod.dim_int, aten.prod.default, multilinear=True, mixes_positions=True)
def prod_dim(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """E = prod E_i, Var = sum_k (prod_{j<k} E_j^2) Var_k (prod_{j>k} E[x_j^2]); exact for any distributions.

    The sum telescopes to prod E[x_i^2] - prod E_i^2 and, unlike it, has only positive terms.
    """
    axes = reduced_axes(x, dim)
    x = write_out(x, *axes).to(dtype or x.dtype)
    mean, var = joined_last(x.mean, axes), joined_last(x.var, axes)
    one = torch.ones_like(mean[..., :1])
    before = torch.cat([one, mean.square()[..., :-1]], -1).cumprod(-1)
    after = torch.cat([one, (mean.square() + var).flip(-1)[..., :-1]], -1).cumprod(-1).flip(-1)
    return restored(Moments(mean.prod(-1), (before * var * after).sum(-1)), axes, keepdim)


def _sample_variance(x: Moments, dim: Dims, correction: float | None, keepdim: bool) -> Moments:
    """The quadratic form s = x'Px / (n - c), P the centering matrix, of independent Gaussians; exact.

    With d = P E[x]: E s = ((1 - 1/n) sum Var_i + sum d_i^2) / (n - c), Var s = (2 tr (P diag Var)^2 +
    4 sum d_i^2 Var_i) / (n - c)^2, tr (P diag Var)^2 = (1 - 2/n) sum Var_i^2 + (sum Var_i / n)^2 (Mathai &
    Provost, Quadratic Forms in Random Variables, 1992).
    """
    axes = reduced_axes(x, dim)
    count, copies = product([x.full[axis] for axis in axes]), _copies(x, axes)

    def total(t: Tensor) -> Tensor:
        return copies * t.sum(axes, keepdim)

    spread = (x.mean - x.mean.mean(axes, keepdim=True)).square()
    mean = (1 - 1 / count) * total(x.var) + total(spread)
    square = (1 - 2 / count) * total(x.var.square()) + (total(x.var) / count).square()
    divisor = max(count - (1 if correction is None else correction), 0)
    return Moments(mean / divisor, (2 * square + 4 * total(spread * x.var)) / divisor**2)


def root(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Square root of a Gamma variable, given its moments: for a sum of squares, where s = var / mean^2 <= 2.

    Var = (var / mean) g(s), E^2 = mean - Var; g(1/k) = k - (Gamma(k + 1/2) / Gamma(k))^2 = 1/4 - s/32 - ..., fitted on
    [0, 2] to 1e-4. Exact for the length of a standard normal vector.
    """
    mean = mean.clamp_min(max(1e-100, torch.finfo(mean.dtype).tiny))
    s = var / mean / mean
    g = 0.25 + s * (-0.03125 + s * (-0.00847427 + s * (0.00515201 - s * 0.00082144)))
    spread = var / mean * g
    return safe_sqrt(mean - spread), spread


def _of_sample(suffix: str, read: Callable[..., tuple[Dims, float | None, bool]]) -> None:
    """Register ``var``, ``std``, ``var_mean`` and ``std_mean`` of a form that gives axes, correction and keepdim."""

    def var(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        """Sample variance of independent Gaussians; exact."""
        return _sample_variance(x, *read(*args, **kwargs))

    def std(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        """Root of the sample variance, taken as gamma distributed with its exact moments."""
        sample = var(x, *args, **kwargs)
        return Moments(*root(sample.mean, sample.var))

    def average(x: Moments, *args: Any, **kwargs: Any) -> Moments:
        dim, _, keepdim = read(*args, **kwargs)
        return mean_dim(x, dim, keepdim)

    rule(getattr(aten.var, suffix))(var)
    rule(getattr(aten.std, suffix), approximate=_ROOT)(std)
    rule(getattr(aten.var_mean, suffix))(lambda *args, **kwargs: (var(*args, **kwargs), average(*args, **kwargs)))
    rule(getattr(aten.std_mean, suffix), approximate=_ROOT)(
        lambda *args, **kwargs: (std(*args, **kwargs), average(*args, **kwargs))
    )


_of_sample("correction", lambda dim=None, *, correction=None, keepdim=False: (dim, correction, keepdim))
_of_sample("dim", lambda dim, unbiased=True, keepdim=False: (dim, int(unbiased), keepdim))
_of_sample("default", lambda unbiased=True: (None, int(unbiased), False))
