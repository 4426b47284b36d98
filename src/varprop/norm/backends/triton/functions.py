# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""The functions that the moment kernel computes: their encoding as instructions, and their device code, in float64.

Every function of one argument is `gain f(rate x + shift) + offset` behind the maximum of k equal Gaussians (mean + e
std, variance times d; e = 0, d = 1 where there is none), with few base functions f: tanh x = 2 S(2x) - 1, erf x =
2 Phi(sqrt 2 x) - 1, softplus with beta, hard sigmoid and one-sided clamps are others in disguise.

Piecewise linear functions are exact, smooth ones are integrated by Gauss-Legendre panels between their knots, and the
rectifier behind a skip connection is that of `gaussian.rectifier`. Device functions of one variable return (m, v,
m_mean, m_std, v_mean, v_std). Only exp, log, sqrt and erf are needed: Mills' ratio comes from a rational fit of
relative error 3.4e-9, below the rounding of the float32 results, because triton has no erfcx and calls of libdevice do
not run in its interpreter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import triton
import triton.language as tl

from ....gaussian.activations import KNOTS
from ....gaussian.normal import LEAST_STD
from ....gaussian.rectifier import LEAST_RATIO, MOST_RATIO
from ...fold.layout import Function

# --- instructions ---

# BY_TORCH and PAIR_BY_TORCH stand for all functions that no kernel computes, of one and of two arguments.
LINEAR, TWO_SLOPES, CLAMP, BY_TORCH, ADD, MUL, SKIP, SLOPE, PAIR_BY_TORCH = range(9)
SIGMOID, NORMAL_CDF, SILU, GELU, GELU_TANH, SOFTPLUS, ELU, MISH, HARDSWISH = range(9, 18)
PAIRS = (ADD, MUL, SKIP, SLOPE, PAIR_BY_TORCH)  # of two arguments
FIRST_INTEGRATED = SIGMOID
OPERATIONS = 18
PANELS = 6  # at most five knots

# Where an integrated base function bends or has a kink; panels of nodes end there.
BENDS: dict[int, tuple[float, ...]] = {
    SIGMOID: KNOTS["sigmoid"],
    NORMAL_CDF: tuple(math.sqrt(2.0) * x for x in KNOTS["erf"]),
    SILU: KNOTS["sigmoid"],
    GELU: KNOTS["gelu"],
    GELU_TANH: KNOTS["gelu"],
    SOFTPLUS: KNOTS["sigmoid"],
    ELU: KNOTS["elu"],
    MISH: KNOTS["mish"],
    HARDSWISH: KNOTS["hardswish"],
}


@dataclass(frozen=True)
class Instruction:
    """One operation on channels, the same for all components of a template."""

    code: int
    e: float = 0.0
    d: float = 1.0
    rate: float = 1.0
    shift: float = 0.0
    gain: float = 1.0
    offset: float = 0.0
    first: float = 0.0
    second: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The row of the parameter table."""
        return (self.e, self.d, self.rate, self.shift, self.gain, self.offset, self.first, self.second)

    @property
    def by_torch(self) -> bool:
        """True if the kernel does not compute it."""
        return self.code in (BY_TORCH, PAIR_BY_TORCH)


def _encode_linear(mean: float, constant: float, var: float, squared_mean: float) -> Instruction:
    """mean m + constant; var v + squared_mean m²."""
    return Instruction(LINEAR, rate=mean, shift=constant, gain=var, offset=squared_mean)


def _encode_clamp(low: float | None = None, high: float | None = None) -> Instruction:
    bottom = -math.inf if low is None else low
    top = math.inf if high is None else high
    if math.isinf(bottom) and math.isinf(top):
        return _encode_linear(1.0, 0.0, 1.0, 0.0)
    if math.isinf(bottom):
        return Instruction(TWO_SLOPES, shift=-top, offset=top, second=1.0)
    if math.isinf(top):
        return Instruction(TWO_SLOPES, shift=-bottom, offset=bottom, first=1.0)
    return Instruction(CLAMP, first=min(bottom, top), second=top)


BUILDERS: dict[str, Callable[..., Instruction]] = {
    "two_slopes": lambda p, n: Instruction(TWO_SLOPES, first=p, second=n),
    "clamp": _encode_clamp,
    "affine": lambda a, b: _encode_linear(a, b, a * a, 0.0),
    "gain": lambda a, b: _encode_linear(a, 0.0, b, 0.0),
    "maximum": lambda e, d: Instruction(LINEAR, e=e, d=d, offset=0.0),
    "dropout": lambda p: _encode_linear(1.0, 0.0, 1.0 / (1.0 - p), p / (1.0 - p)),
    "sigmoid": lambda: Instruction(SIGMOID),
    "tanh": lambda: Instruction(SIGMOID, rate=2.0, gain=2.0, offset=-1.0),
    "silu": lambda: Instruction(SILU),
    "gelu": lambda: Instruction(GELU),
    "gelu_tanh": lambda: Instruction(GELU_TANH),
    "softplus": lambda beta=1.0: Instruction(SOFTPLUS, rate=beta, gain=1.0 / beta),
    "elu": lambda alpha=1.0, scale=1.0, rate=1.0: Instruction(ELU, rate=rate, first=scale / rate, second=scale * alpha),
    "mish": lambda: Instruction(MISH),
    "erf": lambda: Instruction(NORMAL_CDF, rate=math.sqrt(2.0), gain=2.0, offset=-1.0),
    "hardswish": lambda: Instruction(HARDSWISH),
    "hardsigmoid": lambda: Instruction(CLAMP, shift=3.0, gain=1.0 / 6.0, first=0.0, second=6.0),
    "add": lambda alpha: Instruction(ADD, first=alpha),
    "mul": lambda: Instruction(MUL),
    "slope": lambda: Instruction(SLOPE),
    "skip": lambda skew, fall, split: Instruction(SKIP, rate=split, first=skew, second=fall),
}


def has_opcode(kernel: Sequence[str | float | None] | None) -> bool:
    """True if the moment kernel computes a function with this `Function.kernel`."""
    if not kernel:
        return False
    if kernel[0] == "compose":
        inner = kernel[4] if len(kernel) > 4 else None
        return kernel[1] == "maximum" and inner in BUILDERS and inner not in ("maximum", "add", "mul", "skip", "slope")
    return kernel[0] in BUILDERS


def encode(function: Function) -> Instruction:
    """The instruction of a function; BY_TORCH or PAIR_BY_TORCH if the moment kernel does not compute it."""
    kernel = function.kernel
    if kernel is None or not has_opcode(kernel):
        return Instruction(BY_TORCH if function.arity == 1 else PAIR_BY_TORCH)
    if kernel[0] != "compose":
        return BUILDERS[str(kernel[0])](*kernel[1:])
    inner = BUILDERS[str(kernel[4])](*kernel[5:])
    return Instruction(inner.code, float(kernel[2] or 0.0), float(kernel[3] or 0.0), *inner.numbers[2:])


# --- piecewise linear functions ---

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
    product = 2.0 * above * below
    m = above - t * below
    v = std * std * (var_above + t * t * var_below) + t * product
    v_mean = 2.0 * d * (above * down + t * below * up)
    v_std = 2.0 * std * (up + t * t * down) - 2.0 * m * d * p
    v_t = 2.0 * t * std * std * var_below + product
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
    """Moments of clamp(X) - low if std is larger, where those differences cancel: integrals of P(X > t) over the width.

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


# --- smooth functions, by quadrature ---

_BIT = tl.constexpr(1)
EDGES = tl.constexpr(PANELS + 1)
_SIGMOID, _NORMAL_CDF, _SILU, _GELU, _GELU_TANH, _SOFTPLUS, _ELU, _MISH, _HARDSWISH = (
    tl.constexpr(code) for code in range(FIRST_INTEGRATED, OPERATIONS)
)
_WINDOW = tl.constexpr(8.5)
_ROOT_HALF = tl.constexpr(0.7071067811865476)
_TANH_RATE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def _logistic(x):
    """S(x), to full relative accuracy where it is small."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0.0, e, 1.0) / (1.0 + e)


@triton.jit
def _softplus(x):
    """log(1 + e^x), with Kahan's correction of log(1 + u) for small u."""
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    exact = w - 1.0
    log = tl.where(exact == 0.0, u, tl.log(w) * (u / tl.where(exact == 0.0, 1.0, exact)))
    return tl.maximum(x, 0.0) + log


@triton.jit
def _base(code, x, p, n, far, OPS: tl.constexpr):
    """A base function and its derivative at x; `OPS` has a bit for each that occurs, so that no other is compiled."""
    f = x
    slope = x
    if _BIT << _SIGMOID & OPS:
        if code == _SIGMOID:
            f = _logistic(x)
            slope = f * _logistic(-x)
    if _BIT << _NORMAL_CDF & OPS:
        if code == _NORMAL_CDF:
            # erf near zero, where the fit's 3e-9 would show as a step; the tail beyond has its digits from the fit.
            f = tl.where(x < -5.0, upper(-x), 0.5 + 0.5 * tl.erf(_ROOT_HALF * x))
            slope = density(x)
    if _BIT << _SILU & OPS:
        if code == _SILU:
            s = _logistic(x)
            f = x * s
            slope = s + f * _logistic(-x)
    if _BIT << _GELU & OPS:
        if code == _GELU:
            up = tl.where(x < -5.0, upper(-x), 0.5 + 0.5 * tl.erf(_ROOT_HALF * x))
            f = x * up
            slope = up + x * density(x)
    if _BIT << _GELU_TANH & OPS:
        if code == _GELU_TANH:
            u = _TANH_RATE * (x + 0.044715 * x * x * x)
            s = _logistic(u)
            f = x * s
            slope = s + f * _logistic(-u) * _TANH_RATE * (1.0 + 0.134145 * x * x)
    if _BIT << _SOFTPLUS & OPS:
        if code == _SOFTPLUS:
            f = _softplus(x)
            slope = _logistic(x)
    if _BIT << _ELU & OPS:
        if code == _ELU:
            e = n * tl.exp(tl.minimum(x, 0.0))
            f = tl.where(x > 0.0, p * x + tl.where(far, n, 0.0), tl.where(far, e, e - n))
            slope = tl.where(x > 0.0, p, e)
    if _BIT << _MISH & OPS:
        if code == _MISH:
            w = tl.exp(tl.minimum(x, 40.0))
            y = w * (w + 2.0)
            t = y / (y + 2.0)
            f = x * t
            slope = t + x * _logistic(x) * 4.0 * (y + 1.0) / ((y + 2.0) * (y + 2.0))
    if _BIT << _HARDSWISH & OPS:
        if code == _HARDSWISH:
            f = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0
            slope = tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 1.0, (2.0 * x + 3.0) / 6.0))
    return f, slope


@triton.jit
def integrated(code, mean, std, p, n, nodes, knots, OPS: tl.constexpr):
    """A smooth or piecewise smooth base function, by Gauss-Legendre panels between its knots.

    S and Phi are integrated on the side of their limit 0 and ELU less its limit, so that saturation costs no digits.
    Values are taken less f(mean): one sweep over the nodes gives all six sums without cancellation.
    """
    flip = ((code == _SIGMOID) | (code == _NORMAL_CDF)) & (mean > 0.0)
    centre = tl.where(flip, -mean, mean)
    far = (code == _ELU) & (centre < -1.0)
    x = tl.expand_dims(centre, 1)
    s = tl.expand_dims(std, 1)
    wide_far = tl.expand_dims(far, 1)
    at_mean, _ = _base(code, x, p, n, wide_far, OPS)
    index = tl.arange(0, NODES)
    node = tl.expand_dims(tl.load(nodes + index), 0)
    weight = tl.expand_dims(tl.load(nodes + NODES + index), 0)
    total = tl.zeros_like(mean)
    f1 = tl.zeros_like(mean)
    f2 = tl.zeros_like(mean)
    d0 = tl.zeros_like(mean)
    d1 = tl.zeros_like(mean)
    fd0 = tl.zeros_like(mean)
    fd1 = tl.zeros_like(mean)
    for panel in range(EDGES - 1):
        low = (tl.load(knots + code * EDGES + panel) - x) / tl.maximum(s, TINY)
        high = (tl.load(knots + code * EDGES + panel + 1) - x) / tl.maximum(s, TINY)
        low = tl.minimum(tl.maximum(low, -_WINDOW), _WINDOW)
        high = tl.minimum(tl.maximum(high, -_WINDOW), _WINDOW)
        half = 0.5 * (high - low)
        z = 0.5 * (high + low) + half * node
        w = half * weight * tl.exp(-0.5 * z * z)
        f, slope = _base(code, x + s * z, p, n, wide_far, OPS)
        f -= at_mean
        total += tl.sum(w, 1)
        f1 += tl.sum(w * f, 1)
        f2 += tl.sum(w * f * f, 1)
        d0 += tl.sum(w * slope, 1)
        d1 += tl.sum(w * slope * z, 1)
        fd0 += tl.sum(w * f * slope, 1)
        fd1 += tl.sum(w * f * slope * z, 1)
    f1 /= total
    m_mean = d0 / total
    m_std = d1 / total
    v = tl.maximum(f2 / total - f1 * f1, 0.0)
    v_mean = 2.0 * (fd0 / total - f1 * m_mean)
    v_std = 2.0 * (fd1 / total - f1 * m_std)
    m = f1 + tl.sum(at_mean, 1) - tl.where(far, n, 0.0)
    m = tl.where(flip, 1.0 - m, m)
    sign = tl.where(flip, -1.0, 1.0)
    return m, v, m_mean, sign * m_std, sign * v_mean, v_std


# --- the rectifier behind a skip connection ---

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
    divisor = tl.maximum(std, _LEAST_STD)
    r = tl.minimum(tl.maximum(m1 / divisor, _LEAST_RATIO), _MOST_RATIO)
    free = tl.where((r > _LEAST_RATIO) & (r < _MOST_RATIO), 1.0 / divisor, 0.0)
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
    complement = 1.0 - share
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
    lean = 2.0 * share * complement * gap
    f_low = complement * fm1
    f_high = share * fm2
    f_within = (complement * fs1 + share * fs2) * per_within
    g_low = complement * gm1 - lean * fm1
    g_high = share * gm2 + lean * fm2
    g_within = (complement * gs1 + share * gs2 + lean * (fs2 - fs1)) * per_within
    g_share = wider + (complement - share) * gap * gap
    f_r, f_std = _by_r_and_std(f_low, f_high, f_within, gap, std, down_r, up_r, between_r, share_r, down, up, between)
    g_r, g_std = _by_r_and_std(
        g_low, g_high, g_within, g_share, std, down_r, up_r, between_r, share_r, down, up, between
    )
    f_r *= free
    g_r *= free
    per_std = 0.5 / divisor
    mean = f1 + share * gap
    var = g1 + share * wider + share * complement * gap * gap
    return (
        mean, var,
        f_low + f_high + f_r, (f_std - f_r * r) * per_std, g_low + g_high + g_r, (g_std - g_r * r) * per_std,
        f_low + f_high, f_within, g_low + g_high, g_within,
    )  # fmt: skip
