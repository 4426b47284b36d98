# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Device functions: moments of functions of a Gaussian, with their derivatives by mean and std, in float64.

Each returns (m, v, m_mean, m_std, v_mean, v_std). Only exp, log, sqrt and erf are needed: Mills' ratio comes from a
rational fit of relative error 3.4e-9, below the rounding of the float32 results, because triton has no erfcx and calls
of libdevice do not run in its interpreter.
"""

import triton
import triton.language as tl

NODES = tl.constexpr(32)  # of a panel: 16 Gauss-Legendre nodes in either half
TINY = tl.constexpr(1e-150)
_PER_ROOT_TWO_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def density(x):
    """phi(x)."""
    return tl.exp(-0.5 * x * x) * _PER_ROOT_TWO_PI


@triton.jit
def ratio(mean, std):
    """mean / std cut to [-50, 50]."""
    return mean / tl.maximum(tl.maximum(std, tl.abs(mean) / 50.0), TINY)


@triton.jit
def mills(x):
    """H_n(x) = E[(Z - x)_+^n] / phi(x) for n = 0, 1, 2 and 0 <= x: none of the operations cancels."""
    p = 0.0118154742205 + x * 0.000846081567683
    p = 1.25331413309 + x * (0.937551843457 + x * (0.359660076546 + x * (0.0837584336881 + x * p)))
    q = 0.0431485281307 + x * (0.00590773579906 + x * 0.000423040785276)
    q = 1.0 + x * (1.09051293296 + x * (0.589624225261 + x * (0.197542933781 + x * q)))
    r = p / q
    c = 1.0 / (x + r)
    h = 1.0 / (x + c)
    return h, c * h, r * c * h


@triton.jit
def upper(x):
    """P(Z > x), to full relative accuracy where it is small."""
    h, _, _ = mills(tl.abs(x))
    tail = density(x) * h
    return tl.where(x > 0.0, tail, 1.0 - tail)


@triton.jit
def _half_lines(mean, std):
    """phi(a), Phi(a), Phi(-a) at a = mean/std, mean of X_+ and X_-, and their variances over std²."""
    a = ratio(mean, std)
    p = density(a)
    h0, h1, h2 = mills(tl.abs(a))
    tail = p * h0
    lift = 1.0 - 2.0 * tail
    g = std * p * h1
    r = p * (h2 - p * h1 * h1)
    up = tl.where(a > 0.0, 1.0 - tail, tail)
    down = tl.where(a > 0.0, tail, 1.0 - tail)
    above = tl.maximum(mean, 0.0) + g
    below = tl.maximum(-mean, 0.0) + g
    return p, up, down, above, below, r + tl.where(a > 0.0, lift, 0.0), r + tl.where(a > 0.0, 0.0, lift)


@triton.jit
def two_slopes(mean, std, s, t):
    """f(x) = s x for x > 0, t x for x < 0."""
    p, up, down, above, below, var_above, var_below = _half_lines(mean, std)
    d = s - t
    m = s * above - t * below
    v = std * std * (s * s * var_above + t * t * var_below) + 2.0 * s * t * above * below
    v_mean = 2.0 * d * (s * above * down + t * below * up)
    v_std = 2.0 * std * (s * s * up + t * t * down) - 2.0 * m * d * p
    return m, tl.maximum(v, 0.0), s * up + t * down, d * p, v_mean, v_std


@triton.jit
def learned_slope(mean, var, t):
    """f(x) = x for x > 0, t x for x < 0: mean, variance, and both by mean, by variance, and by t."""
    std = tl.sqrt(tl.maximum(var, 0.0))
    p, up, down, above, below, var_above, var_below = _half_lines(mean, std)
    per_var = 0.5 / tl.maximum(std, 1e-12)
    d = 1.0 - t
    both = 2.0 * above * below
    m = above - t * below
    v = std * std * (var_above + t * t * var_below) + t * both
    v_mean = 2.0 * d * (above * down + t * below * up)
    v_std = 2.0 * std * (up + t * t * down) - 2.0 * m * d * p
    v_t = 2.0 * t * std * std * var_below + both
    return m, tl.maximum(v, 0.0), up + t * down, d * p * per_var, v_mean, v_std * per_var, -below, v_t


@triton.jit
def _tail(x):
    """E(Z-x)_+, E(Z-x)_+² and Var(Z-x)_+ for x >= 0."""
    p = density(x)
    _, h1, h2 = mills(x)
    return p * h1, p * h2, p * (h2 - p * h1 * h1)


@triton.jit
def _clamp_narrow(std, to_low, to_high):
    """Moments of clamp(X) - low if std is at most half the width: differences of rectifiers."""
    a = ratio(to_low, std)
    g1, _, r1 = _tail(tl.abs(a))
    g2, h2, r2 = _tail(tl.abs(ratio(to_high, std)))
    over_low = tl.maximum(to_low, 0.0) + std * g1
    over_high = std * g2
    lift = tl.where(a > 0.0, 1.0 - 2.0 * upper(tl.abs(a)), 0.0)
    v = std * std * (r1 + lift + r2 - 2.0 * h2) - 2.0 * over_high * (to_low - to_high - over_low)
    return over_low - over_high, v


@triton.jit
def _clamp_wide(std, to_low, to_high, nodes):
    """The same if std is larger, where those differences cancel: integrals of P(X > t) over the width.

    The table `nodes` (nodes, then weights, on [-1, 1]) is that of two halves: 32 nodes.
    """
    width = to_low - to_high
    a = ratio(to_low, std)
    w = tl.minimum(ratio(width, std), 2.0)
    first = tl.zeros_like(a)
    second = tl.zeros_like(a)
    for n in range(NODES):
        t = 0.5 * (1.0 + tl.load(nodes + n))
        above = 0.5 * tl.load(nodes + NODES + n) * upper(t * w - a)
        first += above
        second += 2.0 * t * above
    return width * first, width * width * (second - first * first)


@triton.jit
def clamp(mean, std, low, high, nodes):
    """f(x) = min(max(x, low), high)."""
    mirror = 2.0 * mean > low + high
    to_low = tl.where(mirror, high - mean, mean - low)
    to_high = tl.where(mirror, low - mean, mean - high)
    m1, v1 = _clamp_narrow(std, to_low, to_high)
    m2, v2 = _clamp_wide(std, to_low, to_high, nodes)
    narrow = high - low >= 2.0 * std
    m = tl.where(narrow, m1, m2)
    v = tl.maximum(tl.where(narrow, v1, v2), 0.0)
    m = tl.where(mirror, high - m, low + m)
    a = ratio(low - mean, std)
    b = ratio(high - mean, std)
    pa = density(a)
    pb = density(b)
    inside = tl.where(a + b > 0.0, upper(a) - upper(b), upper(-b) - upper(-a))
    d = pa - pb
    off = mean - m
    v_std = 2.0 * (off * d + std * (inside + a * pa - b * pb))
    return m, v, inside, d, 2.0 * (off * inside + std * d), v_std
