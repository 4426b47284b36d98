"""The rectifier of a sum with a rectified term, as at the end of a residual block: max(0, X + Y), X = max(0, U).

X is far from Gaussian: it is never negative, so that the sum is negative less often than a Gaussian of its moments. X
is therefore matched by two Gaussians of one variance, which together have its mean, its variance, and the skewness of
a rectified Gaussian with the same ratio of mean and std (mathematics.md, 2.9).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .normal import LEAST_STD, Moments, cdf, promote, ratio, safe_sqrt
from .rectifier import two_slopes

SKEW, FALL, SPLIT = 1.4, 0.42, 0.1  # skewness = SKEW exp(-FALL r²) / r; variance between the two = 1 / (1 + SPLIT r⁴)
LEAST_RATIO, MOST_RATIO = 1e-3, 50.0


def mixture(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of a rectified variable (the first) and an independent Gaussian one as a mixture of two Gaussians.

    Returns:
        The lower and the upper mean, the std of both, and the weight of the upper one.
    """
    std = safe_sqrt(var)
    r = (mean / std.clamp(min=LEAST_STD)).clamp(LEAST_RATIO, MOST_RATIO)
    rise = 1.0 + SPLIT * r.square().square()
    half_skew = 0.5 * SKEW * torch.exp(-FALL * r.square()) / r * rise * rise.sqrt()
    e = half_skew + (1.0 + half_skew.square()).sqrt()
    apart, centre = std / rise.sqrt(), mean + other_mean
    within = safe_sqrt(other_var + var * (1.0 - 1.0 / rise))
    return centre - apart / e, centre + apart * e, within, 1.0 / (1.0 + e.square())


def positive_sum(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> Tensor:
    """P(X + Y > 0), X a rectified variable (the first), Y Gaussian and independent; approximate."""
    dtype, given = promote(mean, var, other_mean, other_var)
    low, high, within, share = mixture(*given)
    below, above = (cdf(ratio(centre, within)) for centre in (low, high))
    return (below + share * (above - below)).to(dtype)


def relu_of_sum(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> Moments:
    """Moments of max(0, X + Y), X a rectified variable (the first), Y Gaussian and independent; approximate."""
    dtype, given = promote(mean, var, other_mean, other_var)
    low, high, within, share = mixture(*given)
    (m1, v1), (m2, v2) = two_slopes(low, within, 1.0, 0.0), two_slopes(high, within, 1.0, 0.0)
    gap = m2 - m1
    v = v1 + share * (v2 - v1) + share * (1.0 - share) * gap.square()
    return (m1 + share * gap).to(dtype), v.to(dtype)
