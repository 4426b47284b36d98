# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""The moment pass in one launch forward and one backward, whatever the depth; see `moments` for its tables.

A program takes a block of components and runs its list of operations; what an operation writes, the next reads from
global memory behind a barrier of the block, which is enough because no other program touches it. All moments are
float64: there are some 10^4 channels, and the pass is bound by latency. The forward saves the derivatives of every
computed channel by its arguments, so that the backward evaluates no function: it is a sparse product. Channels enter
the layers through a table of entries sorted by program and channel, which the backward sums in the same order: no
atomics.
"""

import triton
import triton.language as tl

from ...fold.layout import EPS
from .functions import (
    CLAMP,
    FIRST_INTEGRATED,
    LINEAR,
    MUL,
    PAIRS,
    SKIP,
    SLOPE,
    TWO_SLOPES,
    after_skip,
    clamp,
    integrated,
    learned_slope,
    two_slopes,
)

_EPSILON = tl.constexpr(EPS)
PROGRAM_FIELDS = tl.constexpr(9)
_FIRST_PAIR = tl.constexpr(PAIRS[0])
_LAST_PAIR = tl.constexpr(PAIRS[-1])
_HAS_PAIRS = tl.constexpr(sum(1 << code for code in PAIRS))
_LINEAR, _TWO_SLOPES, _CLAMP, _MUL, _SKIP, _SLOPE, _FIRST_INTEGRATED = (
    tl.constexpr(code) for code in (LINEAR, TWO_SLOPES, CLAMP, MUL, SKIP, SLOPE, FIRST_INTEGRATED)
)
_BIT = tl.constexpr(1)
_HAS_INTEGRATED = tl.constexpr(-1 << FIRST_INTEGRATED)
_HAS_CURVES = tl.constexpr(-1 << FIRST_INTEGRATED | 1 << TWO_SLOPES | 1 << CLAMP)
_SMALLEST_STD = tl.constexpr(1e-12)


# --- one operation ---


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


# --- the passes ---


@triton.jit
def _read(a, b, c, d, channel, mask, sources, constants, external):
    """Numbers of some channels, each from the buffer of its kind: source, constant, external or computed."""
    x = tl.load(a + channel, mask & (channel < sources), 0.0).to(tl.float64)
    channel -= sources
    x += tl.load(b + channel, mask & (channel >= 0) & (channel < constants), 0.0)
    channel -= constants
    x += tl.load(c + channel, mask & (channel >= 0) & (channel < external), 0.0).to(tl.float64)
    channel -= external
    return x + tl.load(d + channel, mask & (channel >= 0), 0.0)


@triton.jit
def _read_var(scale, b, c, d, channel, mask, sources, constants, external):
    """Variances of some channels; that of a source is its squared scale."""
    root = tl.load(scale + channel, mask & (channel < sources), 0.0).to(tl.float64)
    return root * root + _read(scale, b, c, d, channel, mask & (channel >= sources), sources, constants, external)


@triton.jit
def _operands(operations, first, second, output, n, exists, component, mask):
    """Code of operation n, and the channels it reads and writes."""
    code = tl.load(operations + 2 * n, exists, 0)
    position = tl.load(operations + 2 * n + 1, exists, 0) + component
    valid = mask & exists
    return (
        code,
        tl.load(first + position, valid, 0),
        tl.load(second + position, valid, 0),
        tl.load(output + position, valid, 0),
    )


@triton.jit
def _write(mean, var, slopes, results, computed, mask, SLOPES: tl.constexpr):
    """Write mean, variance and derivatives."""
    tl.store(mean, results[0], mask)
    tl.store(var, results[1], mask)
    for n in tl.static_range(SLOPES):
        tl.store(slopes + n * computed, results[2 + n], mask)


_SIZES = ["sources", "constants", "external", "computed"]


@triton.jit(do_not_specialize=_SIZES)
def forward(
    programs, operations, numbers, first, second, output, entry, entry_channel, nodes, knots, shift, scale,
    constant_mean, constant_var, external_mean, external_var, mean, var, slopes, entering_mean, entering_var,
    sources, constants, external, computed, OPS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Computes the channels of one program and writes those that enter a layer."""
    here = programs + tl.program_id(0) * PROGRAM_FIELDS
    begin = tl.load(here)
    end = tl.load(here + 1)
    component = tl.load(here + 2) + tl.arange(0, BLOCK)
    mask = component < tl.load(here + 3)
    if OPS:
        following = _operands(operations, first, second, output, begin, begin < end, component, mask)
        for n in range(begin, end):
            code, channel, partner, target = following
            # before this one is computed, so that nobody has to wait for it
            following = _operands(operations, first, second, output, n + 1, n + 1 < end, component, mask)
            m1 = _read(shift, constant_mean, external_mean, mean, channel, mask, sources, constants, external)
            v1 = _read_var(scale, constant_var, external_var, var, channel, mask, sources, constants, external)
            target -= sources + constants + external
            if _HAS_PAIRS & OPS:
                if (code >= _FIRST_PAIR) & (code <= _LAST_PAIR):
                    m2 = _read(shift, constant_mean, external_mean, mean, partner, mask, sources, constants, external)
                    v2 = _read_var(scale, constant_var, external_var, var, partner, mask, sources, constants, external)
                    results = two_arguments(code, numbers + 8 * n, m1, v1, m2, v2, OPS)
                    _write(mean + target, var + target, slopes + target, results, computed, mask, 8)
            if ~_HAS_PAIRS & OPS:
                if (code < _FIRST_PAIR) | (code > _LAST_PAIR):
                    results = one_argument(code, numbers + 8 * n, nodes, knots, m1, v1, OPS)
                    _write(mean + target, var + target, slopes + target, results, computed, mask, 4)
            tl.debug_barrier()
    last = tl.load(here + 5)
    for start in range(tl.load(here + 4), last, ENTRIES):
        row = start + tl.arange(0, ENTRIES)
        inside = row < last
        position = tl.load(entry + row, inside, 0)
        channel = tl.load(entry_channel + row, inside, 0)
        m = _read(shift, constant_mean, external_mean, mean, channel, inside, sources, constants, external)
        v = _read_var(scale, constant_var, external_var, var, channel, inside, sources, constants, external)
        tl.store(entering_mean + position, m.to(tl.float32), inside)
        tl.store(entering_var + position, (v + _EPSILON).to(tl.float32), inside)


@triton.jit
def _add_product(grad_mean, grad_var, channel, dm, dv, saved, computed, mask, sources, constants):
    """Adds gradients times derivatives to the gradients by the channels of an argument, except constants."""
    mm = tl.load(saved, mask, 0.0)
    mv = tl.load(saved + computed, mask, 0.0)
    vm = tl.load(saved + 2 * computed, mask, 0.0)
    vv = tl.load(saved + 3 * computed, mask, 0.0)
    mask = mask & ((channel < sources) | (channel >= sources + constants))
    tl.store(grad_mean + channel, tl.load(grad_mean + channel, mask, 0.0) + (dm * mm + dv * vm), mask)
    tl.store(grad_var + channel, tl.load(grad_var + channel, mask, 0.0) + (dm * mv + dv * vv), mask)


@triton.jit(do_not_specialize=_SIZES)
def backward(
    programs, operations, first, second, output, entry, summed, summed_span, slopes, scale, entering_grad_mean,
    entering_grad_var, direct_shift, direct_scale, grad_mean, grad_var, grad_shift, grad_scale, grad_external_mean,
    grad_external_var, sources, constants, external, computed,
    OPS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Sums the gradients by the channels of one program over their entries, and runs its operations backwards."""
    here = programs + tl.program_id(0) * PROGRAM_FIELDS
    begin = tl.load(here)
    end = tl.load(here + 1)
    component = tl.load(here + 2) + tl.arange(0, BLOCK)
    mask = component < tl.load(here + 3)
    summed_begin = tl.load(here + 6)
    summed_end = tl.load(here + 7)
    longest = tl.load(here + 8)
    for start in range(summed_begin, summed_end, CHANNELS):
        row = start + tl.arange(0, CHANNELS)
        inside = row < summed_end
        channel = tl.load(summed + row, inside, 0)
        low = tl.load(summed_span + 2 * row, inside, 0)
        high = tl.load(summed_span + 2 * row + 1, inside, 0)
        m = tl.zeros([CHANNELS], tl.float64)
        v = tl.zeros([CHANNELS], tl.float64)
        for step in range(0, longest, ENTRIES):
            at = tl.expand_dims(low, 1) + step + tl.expand_dims(tl.arange(0, ENTRIES), 0)
            exists = at < tl.expand_dims(high, 1)
            position = tl.load(entry + at, exists, 0)
            m += tl.sum(tl.load(entering_grad_mean + position, exists, 0.0).to(tl.float64), 1)
            v += tl.sum(tl.load(entering_grad_var + position, exists, 0.0).to(tl.float64), 1)
        tl.store(grad_mean + channel, m, inside)
        tl.store(grad_var + channel, v, inside)
    tl.debug_barrier()
    if OPS:
        following = _operands(operations, first, second, output, end - 1, begin < end, component, mask)
        for back in range(begin, end):
            n = begin + end - 1 - back
            code, channel, partner, target = following
            following = _operands(operations, first, second, output, n - 1, n > begin, component, mask)
            dm = tl.load(grad_mean + target, mask, 0.0)
            dv = tl.load(grad_var + target, mask, 0.0)
            saved = slopes + target - sources - constants - external
            _add_product(grad_mean, grad_var, channel, dm, dv, saved, computed, mask, sources, constants)
            if _HAS_PAIRS & OPS:
                if (code >= _FIRST_PAIR) & (code <= _LAST_PAIR):
                    tl.debug_barrier()  # both arguments may be one channel
                    second_saved = saved + 4 * computed
                    _add_product(grad_mean, grad_var, partner, dm, dv, second_saved, computed, mask, sources, constants)
            tl.debug_barrier()
    for start in range(summed_begin, summed_end, CHANNELS):
        row = start + tl.arange(0, CHANNELS)
        inside = row < summed_end
        channel = tl.load(summed + row, inside, 0)
        m = tl.load(grad_mean + channel, inside, 0.0)
        v = tl.load(grad_var + channel, inside, 0.0)
        source = inside & (channel < sources)
        root = tl.load(scale + channel, source, 0.0).to(tl.float64)
        by_shift = m + tl.load(direct_shift + channel, source, 0.0).to(tl.float64)
        by_scale = 2.0 * root * v + tl.load(direct_scale + channel, source, 0.0).to(tl.float64)
        tl.store(grad_shift + channel, by_shift.to(tl.float32), source)
        tl.store(grad_scale + channel, by_scale.to(tl.float32), source)
        channel -= sources + constants
        outside = inside & (channel >= 0) & (channel < external)
        tl.store(grad_external_mean + channel, m.to(tl.float32), outside)
        tl.store(grad_external_var + channel, v.to(tl.float32), outside)
