# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""Device functions: moments of smooth functions of a Gaussian, by Gauss-Legendre panels between their knots."""

import triton
import triton.language as tl

from .gauss import NODES, TINY, density, upper
from .opcodes import FIRST_INTEGRATED, OPERATIONS, PANELS

EDGES = tl.constexpr(PANELS + 1)
_SIGMOID, _NORMAL_CDF, _SILU, _GELU, _GELU_TANH, _SOFTPLUS, _ELU, _MISH, _HARDSWISH = (
    tl.constexpr(code) for code in range(FIRST_INTEGRATED, OPERATIONS)
)
_BIT = tl.constexpr(1)
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
