"""The maximum of Gaussian variables: two correlated ones, k identical ones, k independent ones."""

import functools
import math

import torch
from torch import Tensor

from . import alike_maximum
from .normal import ROOT_HALF, Pair, Scalar, as_tensor, batches, cdf, in_float64, promote, ratio, rowwise, safe_sqrt
from .rectifier import two_slopes

NODES = 128
_HALVINGS = 10  # of the range, in search of its lower end
_NEVER = -25.0  # log of a probability that is neglected
_BELOW, _ABOVE = 6.2, 8.5  # standard deviations that hold all but 3e-10 of an entry
_START = 0.01  # of the smallest std: the first node above the lower end of the maximum
_SHARP = 1e-7  # of the range: an entry of smaller std counts as constant


def pair(mean1: Tensor, var1: Tensor, mean2: Tensor, var2: Tensor, cov: Scalar = 0.0) -> Pair:
    """max(X1, X2) of a Gaussian pair with covariance `cov`; exact (Clark 1961; mathematics.md, 7.1).

    As X2 + max(X1 - X2, 0), ordered so that mean1 <= mean2: with theta^2 = var1 + var2 - 2 cov and
    Q = Phi((mean1 - mean2) / theta),  m = mean2 + E D_+,  v = var2 (1 - 2Q) + 2 cov Q + Var D_+,  D = X1 - X2.
    """
    covariance = cov if isinstance(cov, Tensor) else as_tensor(cov, mean1)
    dtype, (mean1, var1, mean2, var2, c) = promote(mean1, var1, mean2, var2, covariance)
    swap = mean1 > mean2
    gap = torch.where(swap, mean2 - mean1, mean1 - mean2)
    var = torch.where(swap, var1, var2)
    theta = safe_sqrt(var1 + var2 - 2.0 * c)
    over, spread = two_slopes(gap, theta, 1.0, 0.0)
    # theta^2 has an error of 1e-16 (var1 + var2): a smaller theta tells nothing but a large derivative.
    least = 1e-9 * safe_sqrt(var1 + var2).detach()
    q = cdf(ratio(gap, torch.maximum(theta, least)))
    v = var + 2.0 * q * (c - var) + spread
    return (torch.where(swap, mean1, mean2) + over).to(dtype), v.clamp(min=0.0).to(dtype)


def order_statistic(k: int) -> tuple[float, float]:
    """Mean and variance of the largest of k standard normals, by the trapezoidal rule on its density."""
    return _order_statistic(k)


# What torch.compiler.assume_constant_result does; but that imports the whole compiler, half of our time to import.
order_statistic._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=1024)
def _order_statistic(k: int) -> tuple[float, float]:
    step, nodes = 0.02, [-9.0 + 0.02 * i for i in range(1051)]
    log_below = [_log_cdf(z) for z in nodes]
    density = [k * math.exp((k - 1) * b - 0.5 * z * z) * step for z, b in zip(nodes, log_below, strict=True)]
    total = math.fsum(density)
    mean = math.fsum(z * p for z, p in zip(nodes, density, strict=True)) / total
    var = math.fsum((z - mean) ** 2 * p for z, p in zip(nodes, density, strict=True)) / total
    return mean, var


def _log_cdf(z: float) -> float:
    return math.log1p(-0.5 * math.erfc(ROOT_HALF * z)) if z > -5.0 else math.log(0.5 * math.erfc(-ROOT_HALF * z))


@in_float64
def iid(mean: Tensor, std: Tensor, k: int) -> Pair:
    """The largest of k independent N(mean, std^2): m = mean + std e_k, v = std^2 v_k; exact."""
    e, v = order_statistic(k)
    return mean + e * std, v * std.square()


def _log_below(t: Tensor, mean: Tensor, std: Tensor, sharp: Tensor) -> Tensor:
    """log P(max < t) along the last axis, for t above the lower end; sharp entries lie below it."""
    above = cdf(ratio(mean - t.unsqueeze(-1), std)).clamp(max=1.0 - 1e-15)
    return torch.log1p(torch.where(sharp, 0.0, -above)).sum(-1)


def _independent(mean: Tensor, std: Tensor) -> Pair:
    top = mean.detach().amax(-1, keepdim=True)
    mean = mean - top  # exact where it matters, so that small deviations keep their digits
    m, v = alike_maximum.independent(mean, std) or _of_any_scale(mean, std)
    return top.squeeze(-1) + m, v


def _of_any_scale(mean: Tensor, std: Tensor) -> Pair:
    mu, sd = mean.detach(), std.detach()
    high = (mu + _ABOVE * sd).amax(-1)
    sharp = sd <= _SHARP * (high - (mu - _BELOW * sd).amax(-1)).unsqueeze(-1)
    end = (mean - torch.where(sharp, 0.0, _BELOW * sd)).amax(-1)
    low = end.detach()
    for i in range(1, _HALVINGS):  # many entries: their maximum is never near the lower end of any one
        t = low + (high - end.detach()) * 0.5**i
        low = torch.where(_log_below(t, mu, sd, sharp) < _NEVER, t, low)
    span = high - low
    over = mu + _ABOVE * sd > low.unsqueeze(-1)
    finest = torch.where(sharp | ~over, math.inf, sd).amin(-1)
    span = span.clamp(min=1e-100)
    first = _START * torch.minimum(finest, span / 16.0)
    h = torch.log(span / first) / (NODES - 1)

    held = torch.exp(_log_below(low, mean, std, sharp))  # P(M = l), if a constant entry is the lower end
    above = -torch.expm1(_log_below(low + first, mean, std, sharp))
    slope = (held + above - 1.0) / first
    # The nodes below the first, of which there are infinitely many, with P(M > t) linear down there.
    e, f, g = (h * first**n / torch.expm1(n * h) for n in (1, 2, 3))
    one, two = (1.0 - held) * e + slope * f, 2.0 * ((1.0 - held) * f + slope * g)
    for q in batches(NODES, mean):
        y = first * torch.exp(q.reshape(-1, *[1] * first.dim()) * h)
        mass = h * y * -torch.expm1(_log_below(low + y, mean, std, sharp))
        one, two = one + mass.sum(0), two + 2.0 * (y * mass).sum(0)
    one = one + (end - end.detach()) * held.detach()
    return low + one, (two - one.square()).clamp(min=0.0)


def independent(mean: Tensor, std: Tensor, dim: int) -> Pair:
    """The largest of independent N(mean_i, std_i^2) along `dim`; exact up to quadrature, also with zero std.

    E[M - l] = int_l P(M > t) dt and E[(M - l)^2] = int_l 2 (t - l) P(M > t) dt from the lower end
    l >= max(mean_i - 6.2 std_i), with P(M > t) = 1 - prod Phi_i(t) (mathematics.md, section 7). An entry with
    its centre at a distance d above l has a std of at least d / 6.2, so the trapezoidal rule in log(t - l), 128
    nodes, resolves entries of every scale; rows of similar scales need fewer (`alike_maximum`). Entries whose std is
    below 1e-7 of the range of M count as constant.
    Error measured: 1e-8 of the sd for the mean, 1e-7 for the variance.
    """
    dtype, (mean, std) = promote(mean, std)
    mean, std = mean.movedim(dim, -1).clamp(min=-1e100), std.movedim(dim, -1)
    m, v = rowwise(_independent, mean, std)
    return m.to(dtype), v.to(dtype)
