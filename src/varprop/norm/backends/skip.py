"""The rectifier behind a skip connection, as in `gaussian.skip`, with its derivatives (mathematics.md, 2.9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...gaussian.normal import LEAST_STD
from ...gaussian.rectifier import two_slopes_and_derivatives
from ...gaussian.skip import LEAST_RATIO, MOST_RATIO
from ..layout import Pair, Slopes


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


def after_skip(x: Pair, y: Pair, skew: float, fall: float, split: float) -> Slopes:
    """Moments of max(0, x + y), x rectified, and their derivatives."""
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


def _rectified(mean: Tensor, var: Tensor) -> Pair:
    """Moments of the rectifier as two rows, and their derivatives by mean and variance."""
    std = var.sqrt()
    moments, (m_mean, m_std, v_mean, v_std) = two_slopes_and_derivatives(mean, std, 1.0, 0.0)
    per_std = 0.5 / std.clamp(min=LEAST_STD)
    return torch.stack(moments), torch.stack([m_mean, per_std * m_std, v_mean, per_std * v_std]).view(2, 2, -1)
