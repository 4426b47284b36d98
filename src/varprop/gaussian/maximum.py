"""The maximum of Gaussian variables: two correlated ones, k identical ones, k independent ones."""

import functools
import math
from statistics import NormalDist

import torch
from torch import Tensor

from .normal import (
    ROOT_HALF,
    Pair,
    Scalar,
    as_tensor,
    batches,
    cdf,
    in_float64,
    promote,
    ratio,
    readable,
    rowwise,
    safe_sqrt,
)
from .rectifier import two_slopes

NODES = 128
_HALVINGS = 10  # of the range, in search of its lower end
_NEVER = -25.0  # log of a probability that is neglected
_BELOW, _ABOVE = 6.2, 8.5  # standard deviations that hold all but 3e-10 of an entry
_START = 0.01  # of the smallest std: the first node above the lower end of the maximum
_SHARP = 1e-7  # of the range: an entry of smaller std counts as constant
# For entries of similar scales
_TAIL = 1e-10  # a probability that is neglected
_STEP = 0.65  # times count^(-1/4): the step, in units of the least std, that keeps errors of equal entries below 1e-9
_MOST_NODES = 128  # beyond which the general rule is faster
_MOST_ENTRIES = 256  # in whose product factors of 2 do not overflow


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
    log_below = [
        math.log1p(-0.5 * math.erfc(ROOT_HALF * z)) if z > -5.0 else math.log(0.5 * math.erfc(-ROOT_HALF * z))
        for z in nodes
    ]
    density = [k * math.exp((k - 1) * b - 0.5 * z * z) * step for z, b in zip(nodes, log_below, strict=True)]
    total = math.fsum(density)
    mean = math.fsum(z * p for z, p in zip(nodes, density, strict=True)) / total
    var = math.fsum((z - mean) ** 2 * p for z, p in zip(nodes, density, strict=True)) / total
    return mean, var


@in_float64
def iid(mean: Tensor, std: Tensor, k: int) -> Pair:
    """The largest of k independent N(mean, std^2): m = mean + std e_k, v = std^2 v_k; exact."""
    e, v = order_statistic(k)
    return mean + e * std, v * std.square()


def independent(mean: Tensor, std: Tensor, dim: int) -> Pair:
    """The largest of independent N(mean_i, std_i^2) along `dim`; exact up to quadrature, also with zero std.

    E[M - l] = int_l P(M > t) dt and E[(M - l)^2] = int_l 2 (t - l) P(M > t) dt from the lower end
    l >= max(mean_i - 6.2 std_i), with P(M > t) = 1 - prod Phi_i(t) (mathematics.md, section 7). An entry with
    its centre at a distance d above l has a std of at least d / 6.2, so the trapezoidal rule in log(t - l), 128
    nodes, resolves entries of every scale; rows of similar scales need fewer (`of_similar_scales`). Entries whose std
    is below 1e-7 of the range of M count as constant.
    Error measured: 1e-8 of the sd for the mean, 1e-7 for the variance.
    """
    dtype, (mean, std) = promote(mean, std)
    mean, std = mean.movedim(dim, -1).clamp(min=-1e100), std.movedim(dim, -1)
    m, v = rowwise(_independent, mean, std)
    return m.to(dtype), v.to(dtype)


def _independent(mean: Tensor, std: Tensor) -> Pair:
    top = mean.detach().amax(-1, keepdim=True)
    mean = mean - top  # exact where it matters, so that small deviations keep their digits
    m, v = of_similar_scales(mean, std) or _of_any_scale(mean, std)
    return top.squeeze(-1) + m, v


def of_similar_scales(mean: Tensor, std: Tensor) -> Pair | None:
    """Mean and variance of the largest along the last axis; None if a row has scales that differ too much.

    P(M < t) is a product of smooth steps none of which is much narrower than the range of M. The trapezoidal rule with
    even steps then converges faster than any power of the step: some 25 nodes do for a window of nine, where entries of
    every scale need 128.

    E[M - l] = int_l P(M > t) dt and E[(M - l)^2] = int_l 2 (t - l) P(M > t) dt from an l with P(M < l) < 1e-10. At l
    the first integrand is 1 and flat, the second rises by 2, which the trapezoidal rule misses by step^2 / 6.
    """
    count = mean.shape[-1]
    if not 2 <= count <= _MOST_ENTRIES or not mean.numel() or not readable(mean):
        return None
    mu, sd = mean.detach(), std.detach()
    surely, possibly = NormalDist().inv_cdf(_TAIL), -NormalDist().inv_cdf(_TAIL / count)
    bottom, high = (mu + surely * sd).amax(-1), (mu + possibly * sd).amax(-1)
    live = mu + possibly * sd >= bottom.unsqueeze(-1)  # the others never are the largest
    quantile = _quantiles(count, mean.dtype)[live.sum(-1)].unsqueeze(-1)
    low = torch.maximum(torch.where(live, mu + quantile * sd, torch.inf).amin(-1), bottom)
    finest = torch.where(live, sd, torch.inf).amin(-1)
    intervals = float(((high - low) / (finest * _STEP * count**-0.25)).amax())
    if not intervals < _MOST_NODES:
        return None
    if not bool(live.all()):
        widest = torch.where(live, sd, 0.0).amax(-1, keepdim=True)
        mean, std = torch.where(live, mean, low.unsqueeze(-1) - 40 * widest), torch.where(live, std, widest)
    step, nodes = (high - low) / max(1, int(intervals) + 1), int(intervals) + 2
    over = torch.arange(nodes, dtype=mean.dtype).reshape(-1, *[1] * low.ndim) * step
    t, below = low + over, torch.full((), 0.5 ** mean.shape[-1], dtype=mean.dtype)
    for m, scale in zip(mean.movedim(-1, 0).contiguous(), (ROOT_HALF / std).movedim(-1, 0).contiguous(), strict=True):
        # 1 + erf, not erfc: only sums of 1 - P count, so tails need no digits of their own, and erf is faster
        below = torch.addcmul(below, below, torch.erf((t - m) * scale))
    above = 1.0 - below
    first_moment = step * (above.sum(0) - 0.5 * above[0])
    second_moment = 2.0 * step * (over * above).sum(0) + step.square() / 6.0
    return low + first_moment, (second_moment - first_moment.square()).clamp(min=0.0)


@functools.lru_cache(maxsize=64)
def _quantiles(most: int, dtype: torch.dtype) -> Tensor:
    """For 0 ... most entries the standard deviations below which all of them lie with the neglected probability."""
    return torch.tensor([0.0, *(NormalDist().inv_cdf(_TAIL ** (1 / k)) for k in range(1, most + 1))], dtype=dtype)


def _log_below(t: Tensor, mean: Tensor, std: Tensor, sharp: Tensor) -> Tensor:
    """log P(max < t) along the last axis, for t above the lower end; sharp entries lie below it."""
    above = cdf(ratio(mean - t.unsqueeze(-1), std)).clamp(max=1.0 - 1e-15)
    return torch.log1p(torch.where(sharp, 0.0, -above)).sum(-1)


def _of_any_scale(mean: Tensor, std: Tensor) -> Pair:
    """Mean and variance of the largest along the last axis, by 128 nodes that resolve entries of every scale."""
    mu, sd = mean.detach(), std.detach()
    high = (mu + _ABOVE * sd).amax(-1)
    sharp = sd <= _SHARP * (high - (mu - _BELOW * sd).amax(-1)).unsqueeze(-1)
    end = (mean - torch.where(sharp, 0.0, _BELOW * sd)).amax(-1)
    low = end.detach()
    for i in range(1, _HALVINGS):  # many entries: their maximum is never near the lower end of any of them
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
    first_moment, second_moment = (1.0 - held) * e + slope * f, 2.0 * ((1.0 - held) * f + slope * g)
    for q in batches(NODES, mean):
        y = first * torch.exp(q.reshape(-1, *[1] * first.dim()) * h)
        mass = h * y * -torch.expm1(_log_below(low + y, mean, std, sharp))
        first_moment, second_moment = first_moment + mass.sum(0), second_moment + 2.0 * (y * mass).sum(0)
    first_moment = first_moment + (end - end.detach()) * held.detach()
    return low + first_moment, (second_moment - first_moment.square()).clamp(min=0.0)
