# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""Device functions: one operation of the moment pass, with its derivatives by mean and variance."""

import triton
import triton.language as tl

from .gauss import clamp, learned_slope, two_slopes
from .opcodes import CLAMP, FIRST_INTEGRATED, LINEAR, MUL, SKIP, SLOPE, TWO_SLOPES
from .quadrature import integrated
from .skip import after_skip

_LINEAR, _TWO_SLOPES, _CLAMP, _MUL, _SKIP, _SLOPE, _FIRST_INTEGRATED = (
    tl.constexpr(code) for code in (LINEAR, TWO_SLOPES, CLAMP, MUL, SKIP, SLOPE, FIRST_INTEGRATED)
)
_BIT = tl.constexpr(1)
_HAS_INTEGRATED = tl.constexpr(-1 << FIRST_INTEGRATED)
_HAS_CURVES = tl.constexpr(-1 << FIRST_INTEGRATED | 1 << TWO_SLOPES | 1 << CLAMP)
_SMALLEST_STD = tl.constexpr(1e-12)


@triton.jit
def one_argument(code, numbers, nodes, knots, mean, var, OPS: tl.constexpr):
    """Mean and variance of a function of one argument, and both by mean and by variance."""
    e = tl.load(numbers)
    d = tl.load(numbers + 1)
    rate = tl.load(numbers + 2)
    shift = tl.load(numbers + 3)
    gain = tl.load(numbers + 4)
    offset = tl.load(numbers + 5)
    p = tl.load(numbers + 6)
    n = tl.load(numbers + 7)
    std = tl.sqrt(tl.maximum(var, 0.0))
    per_var = 0.5 / tl.maximum(std, _SMALLEST_STD)
    top = mean + e * std
    m = mean
    v = var
    mm = mean
    mv = mean
    vm = mean
    vv = mean
    if _BIT << _LINEAR & OPS:
        if code == _LINEAR:
            m = rate * top + shift
            v = gain * d * var + offset * top * top
            mm = rate + tl.zeros_like(mean)
            mv = rate * e * per_var
            vm = 2.0 * offset * top
            vv = gain * d + vm * e * per_var
    if _HAS_CURVES & OPS:
        if code != _LINEAR:
            steep = tl.abs(rate) * tl.sqrt(d)
            x = rate * top + shift
            s = steep * std
            f = x
            g = x
            fm = x
            fs = x
            gm = x
            gs = x
            if _BIT << _TWO_SLOPES & OPS:
                if code == _TWO_SLOPES:
                    f, g, fm, fs, gm, gs = two_slopes(x, s, p, n)
            if _BIT << _CLAMP & OPS:
                if code == _CLAMP:
                    f, g, fm, fs, gm, gs = clamp(x, s, p, n, nodes)
            if _HAS_INTEGRATED & OPS:
                if code >= _FIRST_INTEGRATED:
                    f, g, fm, fs, gm, gs = integrated(code, x, s, p, n, nodes, knots, OPS)
            m = gain * f + offset
            v = gain * gain * g
            mm = gain * rate * fm
            mv = gain * (steep * fs + rate * e * fm) * per_var
            vm = gain * gain * rate * gm
            vv = gain * gain * (steep * gs + rate * e * gm) * per_var
    return m, v, mm, mv, vm, vv


@triton.jit
def two_arguments(code, numbers, m1, v1, m2, v2, OPS: tl.constexpr):
    """Mean and variance of a function of two arguments, and both by mean and by variance of either."""
    alpha = tl.load(numbers + 6)
    zero = tl.zeros_like(m1)
    m = m1 + alpha * m2
    v = v1 + alpha * alpha * v2
    mm1 = zero + 1.0
    mv1 = zero
    vm1 = zero
    vv1 = zero + 1.0
    mm2 = zero + alpha
    mv2 = zero
    vm2 = zero
    vv2 = zero + alpha * alpha
    if _BIT << _MUL & OPS:
        if code == _MUL:
            m = m1 * m2
            v = v1 * v2 + m1 * m1 * v2 + m2 * m2 * v1
            mm1 = m2
            vm1 = 2.0 * m1 * v2
            vv1 = v2 + m2 * m2
            mm2 = m1
            vm2 = 2.0 * m2 * v1
            vv2 = v1 + m1 * m1
    if _BIT << _SKIP & OPS:
        if code == _SKIP:
            m, v, mm1, mv1, vm1, vv1, mm2, mv2, vm2, vv2 = after_skip(numbers, m1, v1, m2, v2)
    if _BIT << _SLOPE & OPS:
        if code == _SLOPE:
            m, v, mm1, mv1, vm1, vv1, mm2, vm2 = learned_slope(m1, v1, m2)
            vv2 = zero
    return m, v, mm1, mv1, vm1, vv1, mm2, mv2, vm2, vv2
