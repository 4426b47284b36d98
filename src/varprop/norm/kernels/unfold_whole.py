# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The gradients of rows that fit whole into a tile: weights and gradients are read once and stay in registers.

A block takes some tiles of rows one after the other and keeps the sums over rows until its end, so that little of them
has to be written and read again.
"""

import triton
import triton.language as tl

from .tiles import BLOCK_FIELDS, channel_axis, meet, of_eight, offsets, row_axis, rows_of, site, tap_axis


@triton.jit
def _unfold(
    block,
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
    TAPS: tl.constexpr,
    INNER: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROUNDS: tl.constexpr,
):
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
    group = first // per_group
    channel = tl.arange(0, C)
    tap = tl.arange(0, TAPS)
    tap_ok = tap < taps
    known = channel_axis(channel < channels, INNER)
    shift_of = offsets(channel, tap, channel_stride, tap_stride, INNER, STRIDED)
    m = meet(mean + first_channel, group * channels, channel, known, INNER, False)
    v = meet(var + first_channel, group * channels, channel, known, INNER, False)
    e = tl.expand_dims(tl.load(share + first_share + tap, tap_ok, 0.0).to(ACC), 0)
    of_mean = tl.zeros([C], ACC)
    of_var = tl.zeros([C], ACC)
    for n in range(ROUNDS):
        row, exists, _, _, start = rows_of(first + n * R, end, per_group, group_stride, row_stride, R, False, ALIGNED)
        inside = known & row_axis(exists) & tap_axis(tap_ok, INNER)
        at = row_axis(start) + shift_of
        w = tl.load(weight + at, inside, 0.0).to(ACC)
        g = tl.load(grad_folded + first_weight + at, inside, 0.0).to(ACC)
        dot = tl.sum(tl.sum(w * g, 2), 1)
        mu = tl.load(row_mean + first_row + row, exists, 0.0)
        spread = tl.load(row_var + first_row + row, exists, 1.0)
        root = tl.sqrt(spread)
        k = tl.load(scale + first_row + row, exists, 0.0).to(ACC) / root
        db = tl.load(grad_bias + first_row + row, exists, 0.0).to(ACC)
        dk = dot - db * mu
        tl.store(grad_scale + first_row + row, (dk / root).to(tl.float32), exists)
        da = tl.expand_dims(-db * k, 1) * e
        beta = tl.expand_dims(-0.5 * dk * k / spread, 1)
        if first_covariance >= 0:
            saved = first_sum + tl.expand_dims(row * taps, 1) + tl.expand_dims(tap, 0)
            both = tl.expand_dims(exists, 1) & tl.expand_dims(tap_ok, 0)
            da += 2.0 * beta * tl.load(tap_spread + saved, both, 0.0)
        da = tl.expand_dims(da, CHANNELS)
        dq = tl.expand_dims(beta * e, CHANNELS)
        grad = g * row_axis(k) + da * m + 2.0 * dq * v * w
        tl.store(grad_weight + first_weight + at, grad.to(grad_weight.dtype.element_ty), inside)
        of_mean += tl.sum(tl.sum(da * w, TAP_AXIS), 0)
        of_var += tl.sum(tl.sum(dq * w * w, TAP_AXIS), 0)
    line = first_partial + (group * partials + (first - group * per_group) // (R * ROUNDS)) * channels
    tl.store(partial_mean + line + channel, of_mean, channel < channels)
    tl.store(partial_var + line + channel, of_var, channel < channels)


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
    TAPS: tl.constexpr,
    INNER: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    BODIES: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Gradients of one block; rows, channels and rounds of body n are entries 3n, 3n + 1 and 3n + 2 of SHAPES."""
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    body = tl.load(block + 3)
    for n in tl.static_range(BODIES):
        if body == n:
            _unfold(
                block, sites, pointers, share, scale, mean, var, row_mean, row_var, tap_spread, grad_folded, grad_bias,
                grad_weight, grad_scale, partial_mean, partial_var, WEIGHT, ACC, TAPS, INNER, ALIGNED, STRIDED,
                SHAPES[3 * n], SHAPES[3 * n + 1], SHAPES[3 * n + 2],
            )  # fmt: skip
