# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# ruff: noqa: SIM102 - the outer condition is decided when compiling, the inner one when running
"""The fold of one block of rows: sums of each row, then its weights times scale / std. Shapes: see `tiles`."""

import triton
import triton.language as tl

from .tiles import (
    BLOCK_FIELDS,
    between_taps,
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
def _fold(
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
        sites, pointers, share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, tap_sums,
        tap_spread,
    ) = buffers  # fmt: skip
    CHANNELS: tl.constexpr = 2 if INNER else 1
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
        _,
        _,
    ) = site(sites, index)
    weight = tl.load(pointers + index).to(tl.pointer_type(WEIGHT))
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        first_weight = of_eight(first_weight)
        channels = of_eight(channels)
        tap_stride = of_eight(tap_stride)
    first = tl.load(block + 1)
    end = tl.load(block + 2)
    row, exists, group, _, start = rows_of(first, end, per_group, group_stride, row_stride, R, CROSS, ALIGNED)
    start = row_axis(start)
    there = row_axis(exists)
    mean += first_channel
    var += first_channel
    tap_sums += first_sum
    tap_spread += first_sum
    folded += first_weight
    met = group * channels
    mu = tl.zeros([R], ACC)
    spread = tl.zeros([R], ACC)
    whole = tl.zeros([R, TAPS], ACC)  # the sums of all taps, where a tile holds them all
    for t in range(0, taps if MANY else TAPS, TAPS):
        tap = t + tl.arange(0, TAPS)
        tap_ok = tap < taps
        # Summed place by place and over the channels of a tile at the end: one exchange between threads, not many.
        first_sums = tl.zeros([R, TAPS, C] if INNER else [R, C, TAPS], ACC)
        second_sums = tl.zeros([R, TAPS, C] if INNER else [R, C, TAPS], ACC)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = channel_axis(channel < channels, INNER)
            if CROSS:
                inside = inside & there
            m = meet(mean, met, channel, inside, INNER, CROSS)
            v = meet(var, met, channel, inside, INNER, CROSS)
            at = start + offsets(channel, tap, channel_stride, tap_stride, INNER, STRIDED)
            w = tl.load(weight + at, inside & there & tap_axis(tap_ok, INNER), 0.0).to(ACC)
            first_sums += w * m
            second_sums += w * w * v
        a = tl.sum(first_sums, CHANNELS)
        b = tl.sum(second_sums, CHANNELS)
        e = tl.expand_dims(tl.load(share + first_share + tap, tap_ok, 0.0).to(ACC), 0)
        mu += tl.sum(a * e, 1)
        spread += tl.sum(b * e, 1)
        if MANY:
            if first_covariance >= 0:
                saved = tl.expand_dims(row * taps, 1) + tl.expand_dims(tap, 0)
                tl.store(tap_sums + saved, a, tl.expand_dims(exists, 1) & tl.expand_dims(tap_ok, 0))
        else:
            whole = a
    if not MANY:
        if first_covariance >= 0:
            spread += between_taps(whole, covariance + first_covariance, tap_spread, row, exists, taps, TAPS, ACC)
    elif first_covariance >= 0:
        tl.debug_barrier()
        for t in range(0, taps if MANY else TAPS, TAPS):
            tap = t + tl.arange(0, TAPS)
            tap_ok = tap < taps
            d = tl.zeros([R, TAPS], tl.float64)
            for n in range(taps):
                one = tl.load(tap_sums + row * taps + n, exists, 0.0).to(tl.float64)
                line = tl.load(covariance + first_covariance + n * taps + tap, tap_ok, 0.0)
                d += tl.expand_dims(one, 1) * tl.expand_dims(line, 0)
            saved = tl.expand_dims(row * taps, 1) + tl.expand_dims(tap, 0)
            both = tl.expand_dims(exists, 1) & tl.expand_dims(tap_ok, 0)
            a64 = tl.load(tap_sums + saved, both, 0.0).to(tl.float64)
            spread += tl.sum(a64 * d, 1).to(ACC)
            tl.store(tap_spread + saved, d.to(ACC), both)
    s = tl.load(scale + first_row + row, exists, 0.0).to(ACC)
    k = s * inverse_std(tl.where(exists, spread, 1.0))
    tl.store(row_mean + first_row + row, mu, exists)
    tl.store(row_var + first_row + row, spread, exists)
    offset = tl.load(shift + first_row + row, exists, 0.0).to(ACC)
    tl.store(bias + first_row + row, (offset - mu * k).to(bias.dtype.element_ty), exists)
    k = row_axis(k)
    for t in range(0, taps if MANY else TAPS, TAPS):
        tap = t + tl.arange(0, TAPS)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = channel_axis(channel < channels, INNER) & there & tap_axis(tap < taps, INNER)
            at = start + offsets(channel, tap, channel_stride, tap_stride, INNER, STRIDED)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            tl.store(folded + at, (w * k).to(folded.dtype.element_ty), inside)


@triton.jit
def forward(
    blocks,
    sites,
    pointers,
    share,
    covariance,
    scale,
    shift,
    mean,
    var,
    folded,
    bias,
    row_mean,
    row_var,
    tap_sums,
    tap_spread,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    KIND: tl.constexpr,
    BODIES: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Folds the rows of one block; KIND and SHAPES have the fields of `blocks.Kind` and `blocks.Shapes`."""
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    body = tl.load(block + 3)
    buffers = (
        sites, pointers, share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, tap_sums,
        tap_spread,
    )  # fmt: skip
    for n in tl.static_range(3):  # the first body reaches across groups
        if BODIES >> n & 1:
            if body == n:
                _fold(block, buffers, WEIGHT, ACC, KIND, n == 0, SHAPES[2 * n], SHAPES[2 * n + 1])
