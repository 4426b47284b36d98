"""The maximum of independent Gaussian variables of similar scales, by few evaluations of their distributions.

P(M < t) is a product of smooth steps none of which is much narrower than the range of M. The trapezoidal rule with even
steps then converges faster than any power of the step: some 25 nodes do for a window of nine, where entries of every
scale need 128 (`maximum`).
"""

from __future__ import annotations

import functools
from statistics import NormalDist

import torch
from torch import Tensor

from .normal import ROOT_HALF, Pair, readable

TAIL = 1e-10  # a probability that is neglected
STEP = 0.65  # times count^(-1/4): the step, in units of the least std, that keeps errors of equal entries below 1e-9
MOST_NODES = 128  # beyond which the general rule is faster
MOST_ENTRIES = 256  # in whose product factors of 2 do not overflow


def independent(mean: Tensor, std: Tensor) -> Pair | None:
    """Mean and variance of the largest along the last axis; None if a row has scales that differ too much.

    E[M - l] = int_l P(M > t) dt and E[(M - l)^2] = int_l 2 (t - l) P(M > t) dt from an l with P(M < l) < 1e-10. At l
    the first integrand is 1 and flat, the second rises by 2, which the trapezoidal rule misses by step^2 / 6.
    """
    count = mean.shape[-1]
    if not 2 <= count <= MOST_ENTRIES or not mean.numel() or not readable(mean):
        return None
    mu, sd = mean.detach(), std.detach()
    surely, possibly = NormalDist().inv_cdf(TAIL), -NormalDist().inv_cdf(TAIL / count)
    bottom, high = (mu + surely * sd).amax(-1), (mu + possibly * sd).amax(-1)
    live = mu + possibly * sd >= bottom.unsqueeze(-1)  # the others never are the largest
    quantile = _quantiles(count, mean.dtype)[live.sum(-1)].unsqueeze(-1)
    low = torch.maximum(torch.where(live, mu + quantile * sd, torch.inf).amin(-1), bottom)
    finest = torch.where(live, sd, torch.inf).amin(-1)
    intervals = float(((high - low) / (finest * STEP * count**-0.25)).amax())
    if not intervals < MOST_NODES:
        return None
    if not bool(live.all()):
        widest = torch.where(live, sd, 0.0).amax(-1, keepdim=True)
        mean, std = torch.where(live, mean, low.unsqueeze(-1) - 40 * widest), torch.where(live, std, widest)
    return _integrated(mean, std, low, (high - low) / max(1, int(intervals) + 1), int(intervals) + 2)


def _integrated(mean: Tensor, std: Tensor, low: Tensor, step: Tensor, nodes: int) -> Pair:
    """The two integrals by the trapezoidal rule."""
    over = torch.arange(nodes, dtype=mean.dtype).reshape(-1, *[1] * low.ndim) * step
    t, below = low + over, torch.full((), 0.5 ** mean.shape[-1], dtype=mean.dtype)
    for m, scale in zip(mean.movedim(-1, 0).contiguous(), (ROOT_HALF / std).movedim(-1, 0).contiguous(), strict=True):
        # 1 + erf, not erfc: only sums of 1 - P count, so tails need no digits of their own, and erf is faster
        below = torch.addcmul(below, below, torch.erf((t - m) * scale))
    above = 1.0 - below
    one = step * (above.sum(0) - 0.5 * above[0])
    two = 2.0 * step * (over * above).sum(0) + step.square() / 6.0
    return low + one, (two - one.square()).clamp(min=0.0)


@functools.lru_cache(maxsize=64)
def _quantiles(most: int, dtype: torch.dtype) -> Tensor:
    """For 0 ... most entries the standard deviations below which all of them lie with the neglected probability."""
    return torch.tensor([0.0, *(NormalDist().inv_cdf(TAIL ** (1 / k)) for k in range(1, most + 1))], dtype=dtype)
