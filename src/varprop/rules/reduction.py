"""Sums, averages, products, sample variances, extremes and order statistics over axes of independent values.

Maxima and minima are exact up to the quadrature of `gaussian.maximum`, as in `pooling`. For other order statistics, let
N(t) be the number of values above t: P(r-th largest > t) = P(N(t) >= r); N is a sum of independent indicators, whose
distribution follows by adding one after another. Moments are integrals of that over t, by the trapezoidal rule, which
is exact to rounding while no std is far below the range of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod as product
from typing import Any

import torch
from torch import Tensor

from ..gaussian import maximum
from ..gaussian.normal import Pair, cdf, pdf, promote, ratio, rowwise, safe_sqrt
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
    axes = [dim] if isinstance(dim, int) else list(dim or range(x.ndim))
    return [axis % x.ndim for axis in axes] if x.ndim else []


def _copies(x: Moments, axes: Sequence[int]) -> int:
    """How many elements each stored one stands for along the axes."""
    return product([x.full[axis] // max(1, x.shape[axis]) for axis in axes])


@rule(aten.sum.dim_IntList, aten.sum.default, aten.nansum, averages=True, reduces=True)
def sum_dim(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """E = sum E_i, Var = sum Var_i of independent values, none of which is ever NaN."""
    axes, x = reduced_axes(x, dim), x.to(dtype or x.dtype)
    copies = _copies(x, axes)
    return Moments(x.mean.sum(axes, keepdim) * copies, x.var.sum(axes, keepdim) * copies)


@rule(aten.mean.dim, aten.mean.default, aten.nanmean, operation="mean", averages=True, reduces=True)
def mean_dim(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """E = mean E_i, Var = mean Var_i / n of n independent values, none of which is ever NaN."""
    axes, x = reduced_axes(x, dim), x.to(dtype or x.dtype)
    count = product([x.full[axis] for axis in axes])
    return Moments(x.mean.mean(axes, keepdim), x.var.mean(axes, keepdim) / count)


@structural(ops.position_average)
def position_average(x: Moments, dims: Sequence[int], keepdim: bool) -> Moments:
    """Mean and variance of the value at a random position: those of an average of positions that all vary together.

    So a global average counts in the deep form of the normalization (`norm.modes`); `propagate` takes the
    positions as independent (`mean_dim`).
    """
    axes = list(dims)
    mean, var = at_random_place(x, axes)
    remaining = range(x.ndim) if keepdim else [axis for axis in range(x.ndim) if axis not in axes]
    full = [1 if axis in axes else x.full[axis] for axis in remaining]
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
    for axis in sorted(axes) if keepdim else ():
        x = Moments(x.mean.unsqueeze(axis), x.var.unsqueeze(axis))
    return x


@rule(aten.amax, aten.max.default, order_statistic=True, maximum=True, reduces=True)
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
    """Moments as by `amax`; the index of the maximum has none."""
    return amax(x, dim, keepdim), None


@rule(aten.min.dim, order_statistic=True)
def min_dim(x: Moments, dim: int, keepdim: bool = False) -> tuple[Moments, None]:
    """Moments as by `amin`; the index of the minimum has none."""
    return amin(x, dim, keepdim), None


@rule(aten.aminmax, skews=True)
def aminmax(x: Moments, *, dim: int | None = None, keepdim: bool = False) -> tuple[Moments, Moments]:
    """Moments as by `amin` and `amax`."""
    return amin(x, dim, keepdim), amax(x, dim, keepdim)


@rule(aten.prod.dim_int, aten.prod.default, multilinear=True, mixes_positions=True, skews=True)
def prod_dim(x: Moments, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Moments:
    """E = prod E_i, Var = sum_k (prod_{j<k} E_j^2) Var_k (prod_{j>k} E[x_j^2]); exact for any distributions.

    The sum telescopes to prod E[x_i^2] - prod E_i^2 and, unlike it, has only positive terms.
    """
    axes = reduced_axes(x, dim)
    x = write_out(x, *axes).to(dtype or x.dtype)
    mean, var = joined_last(x.mean, axes), joined_last(x.var, axes)
    unit = torch.ones_like(mean[..., :1])
    before = torch.cat([unit, mean.square()[..., :-1]], -1).cumprod(-1)
    after = torch.cat([unit, (mean.square() + var).flip(-1)[..., :-1]], -1).cumprod(-1).flip(-1)
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

    rule(getattr(aten.var, suffix), skews=True)(var)
    rule(getattr(aten.std, suffix), approximate=_ROOT, skews=True)(std)
    rule(getattr(aten.var_mean, suffix), skews=True)(
        lambda *args, **kwargs: (var(*args, **kwargs), average(*args, **kwargs))
    )
    rule(getattr(aten.std_mean, suffix), approximate=_ROOT, skews=True)(
        lambda *args, **kwargs: (std(*args, **kwargs), average(*args, **kwargs))
    )


_of_sample("correction", lambda dim=None, *, correction=None, keepdim=False: (dim, correction, keepdim))
_of_sample("dim", lambda dim, unbiased=True, keepdim=False: (dim, int(unbiased), keepdim))
_of_sample("default", lambda unbiased=True: (None, int(unbiased), False))

_NODES = 256
_REACH = 7.0  # standard deviations that hold all but 1e-12 of a value
_FINEST = 0.8  # of a step between nodes: a smaller std is raised to this
ORDER = f"integrals over {_NODES} nodes: a std below a {_NODES}th of the range of the values is raised to that"


def _grid(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes along a new first axis, their distance, and the stds they resolve."""
    mu, sd = mean.detach(), std.detach()
    low, high = (mu - _REACH * sd).amin(-1, keepdim=True), (mu + _REACH * sd).amax(-1, keepdim=True)
    step = ((high - low) / (_NODES - 1)).clamp_min(1e-100)
    nodes = torch.arange(_NODES, dtype=mean.dtype, device=mean.device).reshape(-1, *[1] * mean.ndim)
    return low + nodes * step, step, torch.maximum(std, _FINEST * step)


def _largest(mean: Tensor, std: Tensor, count: int) -> Pair:
    """Moments of the ``count`` largest values along the last axis, in falling order."""
    t, step, wide = _grid(mean, std)
    above = cdf(ratio(mean - t, wide))
    first = torch.ones_like(above[..., :1])
    exactly = torch.cat([first, torch.zeros_like(first).expand(*first.shape[:-1], count - 1)], -1)  # P(N = 0, 1, ...)
    for p in above.split(1, -1):
        exactly = exactly * (1 - p) + p * torch.cat([torch.zeros_like(first), exactly[..., :-1]], -1)
    exceeds = (1 - exactly.cumsum(-1)).clamp_min(0.0)
    start = t[0]
    first_moment = step * (exceeds.sum(0) - 0.5)
    # step^2 / 6: the error of the trapezoidal rule where 2 (t - start) begins
    second_moment = step * (2 * (t - start) * exceeds).sum(0) + step.square() / 6
    return start + first_moment, (second_moment - first_moment.square()).clamp_min(0.0)


def largest(x: Moments, count: int, dim: int) -> Moments:
    """The ``count`` largest values along an axis; constants are sorted as they are."""
    x = write_out(x, dim)
    dtype, (mean, std) = promote(x.mean.movedim(dim, -1), x.std.movedim(dim, -1))
    m, v = rowwise(lambda a, b: _largest(a, b, count), mean, std)
    still = (std == 0).all(-1, keepdim=True)
    m, v = torch.where(still, mean.topk(count, -1).values, m), torch.where(still, torch.zeros_like(v), v)
    return Moments(m.movedim(-1, dim).to(dtype), v.movedim(-1, dim).to(dtype))


def _rank(x: Moments, rank: int, dim: int, keepdim: bool) -> Moments:
    """The value with ``rank`` - 1 smaller ones along an axis."""
    top = largest(x, x.full[dim] - rank + 1, dim)
    return restored(Moments(top.mean.select(dim, -1), top.var.select(dim, -1)), [dim], keepdim)


def _flat(x: Moments) -> Moments:
    dense = x.dense()
    return Moments(dense.mean.flatten(), dense.var.flatten())


@rule(aten.topk, approximate=ORDER, order_statistic=True, entangles=True)
def topk(x: Moments, k: int, dim: int = -1, largest_first: bool = True, sorted: bool = True) -> tuple[Moments, None]:
    """The k largest (or smallest) values in order; where they were found stays unknown."""
    return (largest(x, k, dim) if largest_first else negative(largest(negative(x), k, dim))), None


@rule(aten.sort.default, aten.sort.stable, approximate=ORDER, order_statistic=True, entangles=True)
def sort(x: Moments, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> tuple[Moments, None]:
    """All values in order; where they came from stays unknown. Equal values have probability zero."""
    return topk(x, x.full[dim], dim, descending)


@rule(aten.msort, approximate=ORDER, order_statistic=True, entangles=True)
def msort(x: Moments) -> Moments:
    """Values sorted along the first axis."""
    return sort(x, 0)[0]


@rule(aten.kthvalue, approximate=ORDER, order_statistic=True)
def kthvalue(x: Moments, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Moments, None]:
    """The k-th smallest value along an axis."""
    return _rank(x, k, dim, keepdim), None


@rule(aten.median.dim, approximate=ORDER, order_statistic=True)
def median(x: Moments, dim: int, keepdim: bool = False) -> tuple[Moments, None]:
    """The value in the middle along an axis; of two, the lower one, as torch has it."""
    return _rank(x, (x.full[dim] + 1) // 2, dim, keepdim), None


@rule(aten.median.default, approximate=ORDER, order_statistic=True)
def median_all(x: Moments) -> Moments:
    """The median of all elements."""
    return median(_flat(x), 0)[0]


@rule(aten.cummax, order_statistic=True, maximum=True, running=True, entangles=True)
def cummax(x: Moments, dim: int) -> tuple[Moments, None]:
    """The maximum of every beginning of an axis; exact up to quadrature."""
    x = write_out(x, dim)
    mean, std = x.mean.movedim(dim, -1), x.std.movedim(dim, -1)
    pairs = [maximum.independent(mean[..., : k + 1], std[..., : k + 1], -1) for k in range(mean.shape[-1])]
    m, v = (torch.stack(column, -1).movedim(-1, dim) for column in zip(*pairs, strict=True))
    return Moments(m, v), None


@rule(aten.cummin, order_statistic=True, running=True, entangles=True)
def cummin(x: Moments, dim: int) -> tuple[Moments, None]:
    """The minimum of every beginning of an axis: -cummax(-x)."""
    return negative(cummax(negative(x), dim)[0]), None


def _winner(mean: Tensor, std: Tensor) -> tuple[Tensor]:
    """P(x_i is the largest) = int phi_i prod_{j != i} Phi_j dt along the last axis."""
    t, step, wide = _grid(mean, std)
    z = ratio(mean - t, wide)
    below = cdf(-z).clamp_min(1e-300).log()
    density = step * pdf(z) / wide * torch.exp(below.sum(-1, keepdim=True) - below)
    chance = density.sum(0)
    return (chance / chance.sum(-1, keepdim=True),)


@rule(aten.argmax, approximate=ORDER, skews=True)
def argmax(x: Moments, dim: int | None = None, keepdim: bool = False) -> Moments:
    """E = sum i p_i, Var = sum p_i (i - E)^2, p_i the probability that the i-th value is the largest."""
    x, axis = (_flat(x), 0) if dim is None else (write_out(x, dim), dim)
    dtype, (mean, std) = promote(x.mean.movedim(axis, -1), x.std.movedim(axis, -1))
    still = (std == 0).all(-1, keepdim=True)
    fixed = torch.nn.functional.one_hot(mean.argmax(-1), mean.shape[-1]).to(mean)
    p = torch.where(still, fixed, rowwise(_winner, mean, std)[0])
    index = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device)
    m = (p * index).sum(-1, keepdim=True)
    v = (p * (index - m).square()).sum(-1, keepdim=True)
    m, v = (t.movedim(-1, axis) if keepdim else t.squeeze(-1) for t in (m, v))
    return Moments(m.to(dtype), v.to(dtype))


@rule(aten.argmin, approximate=ORDER, skews=True)
def argmin(x: Moments, dim: int | None = None, keepdim: bool = False) -> Moments:
    """The place of the maximum of -x."""
    return argmax(negative(x), dim, keepdim)
