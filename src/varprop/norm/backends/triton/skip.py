# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device function: the rectifier behind a skip connection, as `gaussian.rectifier` computes it."""

import triton
import triton.language as tl

from ....gaussian.normal import LEAST_STD
from ....gaussian.rectifier import LEAST_RATIO, MOST_RATIO
from .gauss import two_slopes

_LEAST_RATIO = tl.constexpr(LEAST_RATIO)
_MOST_RATIO = tl.constexpr(MOST_RATIO)
_LEAST_STD = tl.constexpr(LEAST_STD)


@triton.jit
def _by_r_and_std(by_lower, by_upper, by_within, by_share, std, down_r, up_r, between_r, share_r, down, up, between):
    """How a moment changes by r, and by std where r stays."""
    by_r = (by_upper * up_r - by_lower * down_r - by_within * between_r * std) * std + by_share * share_r
    return by_r, by_upper * up - by_lower * down + by_within * (2.0 * (1.0 - between) * std)


@triton.jit
def after_skip(numbers, m1, v1, m2, v2):
    """Mean and variance of max(0, x + y), x rectified, and both by mean and variance of x, then of y."""
    split = tl.load(numbers + 2)
    skew = tl.load(numbers + 6)
    fall = tl.load(numbers + 7)
    std = tl.sqrt(tl.maximum(v1, 0.0))
    held = tl.maximum(std, _LEAST_STD)
    r = tl.minimum(tl.maximum(m1 / held, _LEAST_RATIO), _MOST_RATIO)
    free = tl.where((r > _LEAST_RATIO) & (r < _MOST_RATIO), 1.0 / held, 0.0)
    cube = r * r * r
    between = 1.0 / (1.0 + split * cube * r)
    between_r = -4.0 * split * cube * between * between
    root = tl.sqrt(between)
    root_r = 0.5 * between_r / root
    d = 0.5 * skew * tl.exp(-fall * r * r) / (r * between * root)
    d_r = d * (6.0 * split * cube * between - 2.0 * fall * r - 1.0 / r)
    hypotenuse = tl.sqrt(1.0 + d * d)
    e = d + hypotenuse
    e_r = d_r * e / hypotenuse
    share = 1.0 / (1.0 + e * e)
    share_r = -2.0 * e * e_r * share * share
    rest = 1.0 - share
    down = root / e
    up = root * e
    down_r = (root_r - down * e_r) / e
    up_r = root_r * e + root * e_r
    within = tl.sqrt(tl.maximum(v2 + (1.0 - between) * v1, 0.0))
    per_within = 0.5 / tl.maximum(within, _LEAST_STD)
    f1, g1, fm1, fs1, gm1, gs1 = two_slopes(m1 + m2 - down * std, within, 1.0, 0.0)
    f2, g2, fm2, fs2, gm2, gs2 = two_slopes(m1 + m2 + up * std, within, 1.0, 0.0)
    gap = f2 - f1
    wider = g2 - g1
    lean = 2.0 * share * rest * gap
    f_low = rest * fm1
    f_high = share * fm2
    f_within = (rest * fs1 + share * fs2) * per_within
    g_low = rest * gm1 - lean * fm1
    g_high = share * gm2 + lean * fm2
    g_within = (rest * gs1 + share * gs2 + lean * (fs2 - fs1)) * per_within
    g_share = wider + (rest - share) * gap * gap
    f_r, f_std = _by_r_and_std(f_low, f_high, f_within, gap, std, down_r, up_r, between_r, share_r, down, up, between)
    g_r, g_std = _by_r_and_std(
        g_low, g_high, g_within, g_share, std, down_r, up_r, between_r, share_r, down, up, between
    )
    f_r *= free
    g_r *= free
    per_std = 0.5 / held
    mean = f1 + share * gap
    var = g1 + share * wider + share * rest * gap * gap
    return (
        mean, var,
        f_low + f_high + f_r, (f_std - f_r * r) * per_std, g_low + g_high + g_r, (g_std - g_r * r) * per_std,
        f_low + f_high, f_within, g_low + g_high, g_within,
    )  # fmt: skip
