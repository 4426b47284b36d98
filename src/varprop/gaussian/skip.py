"""The rectifier of a sum with a rectified term, as at the end of a residual block: max(0, X + Y), X = max(0, U).

X is far from Gaussian: it is never negative, so that the sum is negative less often than a Gaussian of its moments. X
is therefore matched by two Gaussians of one variance, which together have its mean, its variance, and the skewness of
a rectified Gaussian with the same ratio of mean and std (mathematics.md, 2.9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .normal import LEAST_STD, Pair, Slopes, cdf, promote, ratio, safe_sqrt
from .rectifier import by_variance, two_slopes, two_slopes_and_derivatives

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


def relu_of_sum(mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor) -> Pair:
    """Moments of max(0, X + Y), X a rectified variable (the first), Y Gaussian and independent; approximate."""
    dtype, given = promote(mean, var, other_mean, other_var)
    low, high, within, share = mixture(*given)
    (m1, v1), (m2, v2) = two_slopes(low, within, 1.0, 0.0), two_slopes(high, within, 1.0, 0.0)
    gap = m2 - m1
    v = v1 + share * (v2 - v1) + share * (1.0 - share) * gap.square()
    return (m1 + share * gap).to(dtype), v.to(dtype)


@dataclass(frozen=True)
class _Shape:
    """The two Gaussians that stand for a rectified variable, by r = mean / std; names in _r are derivatives by r.

    Attributes:
        between: The share of the variance that lies between them.
        down: From the mean to the lower one, in units of std.
        up: From the mean to the upper one.
        share: Weight of the upper one.
    """

    between: Tensor
    between_r: Tensor
    down: Tensor
    down_r: Tensor
    up: Tensor
    up_r: Tensor
    share: Tensor
    share_r: Tensor


def _shape(r: Tensor, skew: float, fall: float, split: float) -> _Shape:
    between = 1.0 / (1.0 + split * r**4)
    between_r = -4.0 * split * r**3 * between.square()
    root = between.sqrt()
    root_r = 0.5 * between_r / root
    d = 0.5 * skew * torch.exp(-fall * r * r) / (r * between * root)
    d_r = d * (6.0 * split * r**3 * between - 2.0 * fall * r - 1.0 / r)
    hypotenuse = (1.0 + d * d).sqrt()
    e = d + hypotenuse
    e_r = d_r * e / hypotenuse
    share = 1.0 / (1.0 + e * e)
    down, up = root / e, root * e
    down_r, up_r = (root_r - down * e_r) / e, root_r * e + root * e_r
    return _Shape(between, between_r, down, down_r, up, up_r, share, -2.0 * e * e_r * share.square())


def relu_of_sum_and_derivatives(x: Pair, y: Pair, skew: float, fall: float, split: float) -> Slopes:
    """As `relu_of_sum`, with the derivatives by mean and variance of either (mathematics.md, 2.9)."""
    (m1, v1), (m2, v2) = x, y
    std = v1.sqrt()
    held = std.clamp(min=LEAST_STD)
    r = (m1 / held).clamp(LEAST_RATIO, MOST_RATIO)
    free = ((r > LEAST_RATIO) & (r < MOST_RATIO)).to(std.dtype)  # whether r follows its arguments
    s = _shape(r, skew, fall, split)
    within, centre = v2 + (1.0 - s.between) * v1, m1 + m2
    low, by_low = _rectified(centre - s.down * std, within)
    high, by_high = _rectified(centre + s.up * std, within)
    (gap, wider), rest = high - low, 1.0 - s.share
    moments = torch.stack([low[0] + s.share * gap, low[1] + s.share * wider + s.share * rest * gap * gap])
    by_share = torch.stack([gap, wider + (rest - s.share) * gap * gap])
    by_low, by_high = by_low * rest, by_high * s.share
    by_low[1] -= 2.0 * s.share * gap * by_low[0]
    by_high[1] += 2.0 * rest * gap * by_high[0]
    (by_lower, low_within), (by_upper, high_within) = by_low.unbind(1), by_high.unbind(1)
    by_within = low_within + high_within
    # what every part changes by r, and what it changes by std where r stays
    by_r = (by_upper * s.up_r - by_lower * s.down_r - by_within * s.between_r * std) * std + by_share * s.share_r
    by_r = by_r * free / held
    by_std = by_upper * s.up - by_lower * s.down + by_within * (2.0 * (1.0 - s.between) * std) - by_r * r
    by_mean = by_lower + by_upper
    return moments, [torch.stack([by_mean + by_r, by_std * (0.5 / held)], 1), torch.stack([by_mean, by_within], 1)]


def _rectified(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the rectifier as two rows, and their derivatives by mean and variance."""
    moments, [derivatives] = by_variance((mean, var), two_slopes_and_derivatives, 1.0, 0.0)
    return moments, derivatives
