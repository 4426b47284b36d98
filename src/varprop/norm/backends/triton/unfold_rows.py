# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""The gradients of one block of rows, and the sums over all blocks of a site. Shapes: see `tiles`."""

import triton
import triton.language as tl

from .tiles import (
    BLOCK_FIELDS,
    SITE_FIELDS,
    channel_axis,
    inverse_std,
    meet,
    of_eight,
    offsets,
    row_axis,
    rows_of,
    site,
    tap_axis,
)


@triton.jit
def _unfold(
    block,
    buffers,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    KIND: tl.constexpr,
    CROSS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    TAPS: tl.constexpr = KIND[0]
    INNER: tl.constexpr = KIND[1]
    ALIGNED: tl.constexpr = KIND[2]
    MANY: tl.constexpr = KIND[3]
    STRIDED: tl.constexpr = KIND[4]
    (
        sites, pointers, share, scale, mean, var, row_mean, row_var, tap_spread, grad_folded, grad_bias, grad_weight,
        grad_scale, partial_mean, partial_var,
    ) = buffers  # fmt: skip
    CHANNELS: tl.constexpr = 2 if INNER else 1
    TAP_AXIS: tl.constexpr = 1 if INNER else 2
    index = tl.load(block).to(tl.int64)
    (
        first_row,
        per_group,
        channels,
        taps,
        group_stride,
        row_stride,
        channel_stride,
        tap_stride,
        first_channel,
        first_weight,
        first_share,
        first_covariance,
        first_sum,
        first_partial,
        partials,
    ) = site(sites, index)
    weight = tl.load(pointers + index).to(tl.pointer_type(WEIGHT))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        first_weight = of_eight(first_weight)
        channels = of_eight(channels)
        tap_stride = of_eight(tap_stride)
    first = tl.load(block + 1)
    end = tl.load(block + 2)
    row, exists, group, member, start = rows_of(first, end, per_group, group_stride, row_stride, R, CROSS, ALIGNED)
    start = row_axis(start)
    there = row_axis(exists)
    mean += first_channel
    var += first_channel
    tap_spread += first_sum
    grad_folded += first_weight
    grad_weight += first_weight
    partial_mean += first_partial
    partial_var += first_partial
    met = group * channels
    products = tl.zeros([R, TAPS, C] if INNER else [R, C, TAPS], ACC)
    for t in range(0, taps if MANY else TAPS, TAPS):
        tap = t + tl.arange(0, TAPS)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = channel_axis(channel < channels, INNER) & there & tap_axis(tap < taps, INNER)
            at = start + offsets(channel, tap, channel_stride, tap_stride, INNER, STRIDED)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            g = tl.load(grad_folded + at, inside, 0.0).to(ACC)
            products += w * g
    dot = tl.sum(tl.sum(products, 2), 1)
    mu = tl.load(row_mean + first_row + row, exists, 0.0)
    spread = tl.load(row_var + first_row + row, exists, 1.0)
    inverse = inverse_std(spread)
    k = tl.load(scale + first_row + row, exists, 0.0).to(ACC) * inverse
    db = tl.load(grad_bias + first_row + row, exists, 0.0).to(ACC)
    dk = dot - db * mu
    tl.store(grad_scale + first_row + row, (dk * inverse).to(tl.float32), exists)
    alpha = tl.expand_dims(-db * k, 1)
    beta = tl.expand_dims(-0.5 * dk * k * (inverse * inverse), 1)
    k = row_axis(k)
    for c in range(0, channels, C):
        channel = c + tl.arange(0, C)
        channel_ok = channel < channels
        known = channel_axis(channel_ok, INNER)
        if CROSS:
            known = known & there
        m = meet(mean, met, channel, known, INNER, CROSS)
        v = meet(var, met, channel, known, INNER, CROSS)
        of_mean = tl.zeros([R, C], ACC)
        of_var = tl.zeros([R, C], ACC)
        for t in range(0, taps if MANY else TAPS, TAPS):
            tap = t + tl.arange(0, TAPS)
            tap_ok = tap < taps
            e = tl.expand_dims(tl.load(share + first_share + tap, tap_ok, 0.0).to(ACC), 0)
            da = alpha * e
            if first_covariance >= 0:
                saved = tl.expand_dims(row * taps, 1) + tl.expand_dims(tap, 0)
                both = tl.expand_dims(exists, 1) & tl.expand_dims(tap_ok, 0)
                da += 2.0 * beta * tl.load(tap_spread + saved, both, 0.0)
            da = tl.expand_dims(da, CHANNELS)
            dq = tl.expand_dims(beta * e, CHANNELS)
            inside = known & there & tap_axis(tap_ok, INNER)
            at = start + offsets(channel, tap, channel_stride, tap_stride, INNER, STRIDED)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            g = tl.load(grad_folded + at, inside, 0.0).to(ACC)
            grad = g * k + da * m + 2.0 * dq * v * w
            tl.store(grad_weight + at, grad.to(grad_weight.dtype.element_ty), inside)
            of_mean += tl.sum(da * w, TAP_AXIS)
            of_var += tl.sum(dq * w * w, TAP_AXIS)
        if CROSS:
            line = (group * partials + member) * channels
            place = tl.expand_dims(line, 1) + tl.expand_dims(channel, 0)
            kept = tl.expand_dims(exists, 1) & tl.expand_dims(channel_ok, 0)
            tl.store(partial_mean + place, of_mean, kept)
            tl.store(partial_var + place, of_var, kept)
        else:
            line = (group * partials + (first - group * per_group) // R) * channels
            tl.store(partial_mean + line + channel, tl.sum(of_mean, 0), channel_ok)
            tl.store(partial_var + line + channel, tl.sum(of_var, 0), channel_ok)


@triton.jit
def backward(
    blocks,
    sites,
    pointers,
    share,
    scale,
    mean,
    var,
    row_mean,
    row_var,
    tap_spread,
    grad_folded,
    grad_bias,
    grad_weight,
    grad_scale,
    partial_mean,
    partial_var,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    KIND: tl.constexpr,
    BODIES: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Gradients of one block's weights and scales, and its part of the gradients of what enters."""
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    body = tl.load(block + 3)
    buffers = (
        sites, pointers, share, scale, mean, var, row_mean, row_var, tap_spread, grad_folded, grad_bias, grad_weight,
        grad_scale, partial_mean, partial_var,
    )  # fmt: skip
    for n in tl.static_range(3):  # the first body reaches across groups
        if BODIES >> n & 1:
            if body == n:
                _unfold(block, buffers, WEIGHT, ACC, KIND, n == 0, SHAPES[2 * n], SHAPES[2 * n + 1])


@triton.jit
def _add_lines(partial_mean, partial_var, line, step, count, ok, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums over `count` lines, `step` apart, of which the first begins at `line`."""
    of_mean = tl.zeros([ROWS, COLUMNS], partial_mean.dtype.element_ty)
    of_var = tl.zeros([ROWS, COLUMNS], partial_mean.dtype.element_ty)
    for start in range(0, count, ROWS):
        n = start + tl.arange(0, ROWS)
        at = tl.expand_dims(line, 0) + tl.expand_dims(n * step, 1)
        inside = tl.expand_dims(ok, 0) & tl.expand_dims(n < count, 1)
        of_mean += tl.load(partial_mean + at, inside, 0.0)
        of_var += tl.load(partial_var + at, inside, 0.0)
    return tl.sum(of_mean, 0), tl.sum(of_var, 0)


@triton.jit
def add_partials(
    columns, sites, partial_mean, partial_var, grad_mean, grad_var, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Adds the partial sums of the blocks of one site for some of its entering channels."""
    here = columns + tl.program_id(0) * 3
    index = tl.load(here).to(tl.int64)
    first = tl.load(here + 1)
    end = tl.load(here + 2)
    site = sites + index * SITE_FIELDS
    channels = tl.load(site + 2).to(tl.int32)
    first_channel = tl.load(site + 8)
    partial_mean += tl.load(site + 13)
    partial_var += tl.load(site + 13)
    partials = tl.load(site + 14).to(tl.int32)
    places = tl.arange(0, COLUMNS)
    column = first + places
    ok = column < end
    group = first // channels
    if (tl.minimum(first + COLUMNS, end) - 1) // channels == group:  # then it shows that columns lie side by side
        line = group * (partials * channels) + first % channels + places
        of_mean, of_var = _add_lines(partial_mean, partial_var, line, channels, partials, ok, ROWS, COLUMNS)
    else:
        line = column // channels * (partials * channels) + column % channels
        of_mean, of_var = _add_lines(partial_mean, partial_var, line, channels, partials, ok, ROWS, COLUMNS)
    tl.store(grad_mean + first_channel + column, of_mean.to(tl.float32), ok)
    tl.store(grad_var + first_channel + column, of_var.to(tl.float32), ok)
