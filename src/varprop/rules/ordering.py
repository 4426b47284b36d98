"""Order statistics of independent Gaussians along an axis: sorted values, the largest few, medians, places of maxima.

With N(t) the number of values above t, P(r-th largest > t) = P(N(t) >= r); N is a sum of independent indicators, whose
distribution follows by adding one after another. Moments are integrals of that over t, by the trapezoidal rule, which
is exact to rounding while no std is far below the range of the values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..gaussian import maximum
from ..gaussian.normal import Pair, cdf, pdf, promote, ratio, rowwise
from ..moments import Moments
from .axes import negative, write_out
from .registry import rule

aten = torch.ops.aten
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
    one = step * (exceeds.sum(0) - 0.5)
    two = step * (2 * (t - start) * exceeds).sum(0) + step.square() / 6  # the rule's error where 2 (t - start) begins
    return start + one, (two - one.square()).clamp_min(0.0)


def largest(x: Moments, count: int, dim: int) -> Moments:
    """The ``count`` largest values along an axis; constants are sorted as they are."""
    x = write_out(x, dim)
    dtype, (mean, std) = promote(x.mean.movedim(dim, -1), x.std.movedim(dim, -1))
    m, v = rowwise(lambda a, b: _largest(a, b, count), mean, std)
    still = (std == 0).all(-1, keepdim=True)
    m = torch.where(still, mean.topk(count, -1).values, m)
    v = torch.where(still, torch.zeros_like(v), v)
    return Moments(m.movedim(-1, dim).to(dtype), v.movedim(-1, dim).to(dtype))


def _rank(x: Moments, rank: int, dim: int, keepdim: bool) -> Moments:
    """The value with ``rank`` - 1 smaller ones along an axis."""
    top = largest(x, x.full[dim] - rank + 1, dim)
    mean, var = top.mean.select(dim, -1), top.var.select(dim, -1)
    return Moments(mean.unsqueeze(dim), var.unsqueeze(dim)) if keepdim else Moments(mean, var)


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
    """As `sort`, along the first axis."""
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
    """As `median`, over all elements."""
    return median(_flat(x), 0)[0]


@rule(aten.cummax, order_statistic=True, maximum=True, entangles=True)
def cummax(x: Moments, dim: int) -> tuple[Moments, None]:
    """The maximum of every beginning of an axis; exact up to quadrature."""
    x = write_out(x, dim)
    mean, std = x.mean.movedim(dim, -1), x.std.movedim(dim, -1)
    found = [maximum.independent(mean[..., : k + 1], std[..., : k + 1], -1) for k in range(mean.shape[-1])]
    m, v = (torch.stack(part, -1).movedim(-1, dim) for part in zip(*found, strict=True))
    return Moments(m, v), None


@rule(aten.cummin, order_statistic=True, entangles=True)
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


@rule(aten.argmax, approximate=ORDER)
def argmax(x: Moments, dim: int | None = None, keepdim: bool = False) -> Moments:
    """E = sum i p_i, Var = sum p_i (i - E)^2, p_i the probability that the i-th value is the largest."""
    x, axis = (_flat(x), 0) if dim is None else (write_out(x, dim), dim)
    dtype, (mean, std) = promote(x.mean.movedim(axis, -1), x.std.movedim(axis, -1))
    still = (std == 0).all(-1, keepdim=True)
    fixed = torch.nn.functional.one_hot(mean.argmax(-1), mean.shape[-1]).to(mean)
    p = torch.where(still, fixed, rowwise(_winner, mean, std)[0])
    place = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device)
    m = (p * place).sum(-1, keepdim=True)
    v = (p * (place - m).square()).sum(-1, keepdim=True)
    kept = [t.movedim(-1, axis) if keepdim else t.squeeze(-1) for t in (m, v)]
    return Moments(kept[0].to(dtype), kept[1].to(dtype))


@rule(aten.argmin, approximate=ORDER)
def argmin(x: Moments, dim: int | None = None, keepdim: bool = False) -> Moments:
    """The place of the maximum of -x."""
    return argmax(negative(x), dim, keepdim)
