# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The fold of rows that fit whole into a tile: each weight is read once and stays in registers until it is written."""

import triton
import triton.language as tl

from .tiles import BLOCK_FIELDS, between_taps, channel_axis, meet, of_eight, offsets, row_axis, rows_of, site, tap_axis


@triton.jit
def _fold(
    block,
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
    tap_spread,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    TAPS: tl.constexpr,
    INNER: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
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
    row, exists, group, _, start = rows_of(first, end, per_group, group_stride, row_stride, R, False, ALIGNED)
    channel = tl.arange(0, C)
    tap = tl.arange(0, TAPS)
    known = channel_axis(channel < channels, INNER)
    inside = known & row_axis(exists) & tap_axis(tap < taps, INNER)
    at = row_axis(start) + offsets(channel, tap, channel_stride, tap_stride, INNER, STRIDED)
    w = tl.load(weight + at, inside, 0.0).to(ACC)
    m = meet(mean + first_channel, group * channels, channel, known, INNER, False)
    v = meet(var + first_channel, group * channels, channel, known, INNER, False)
    e = tl.expand_dims(tl.load(share + first_share + tap, tap < taps, 0.0).to(ACC), 0)
    sums = tl.sum(w * m, CHANNELS)
    mu = tl.sum(sums * e, 1)
    spread = tl.sum(tl.sum(w * w * v, CHANNELS) * e, 1)
    if first_covariance >= 0:
        saved = tap_spread + first_sum
        spread += between_taps(sums, covariance + first_covariance, saved, row, exists, taps, TAPS, ACC)
    k = tl.load(scale + first_row + row, exists, 0.0).to(ACC) / tl.sqrt(tl.where(exists, spread, 1.0))
    offset = tl.load(shift + first_row + row, exists, 0.0).to(ACC)
    tl.store(row_mean + first_row + row, mu, exists)
    tl.store(row_var + first_row + row, spread, exists)
    tl.store(bias + first_row + row, (offset - mu * k).to(bias.dtype.element_ty), exists)
    tl.store(folded + first_weight + at, (w * row_axis(k)).to(folded.dtype.element_ty), inside)


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
    tap_spread,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    TAPS: tl.constexpr,
    INNER: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIDED: tl.constexpr,
    BODIES: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Folds the rows of one block; rows and channels of the tile of body n are entries 2n and 2n + 1 of SHAPES."""
    block = blocks + tl.program_id(0) * BLOCK_FIELDS
    body = tl.load(block + 3)
    for n in tl.static_range(BODIES):
        if body == n:
            _fold(
                block, sites, pointers, share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var,
                tap_spread, WEIGHT, ACC, TAPS, INNER, ALIGNED, STRIDED, SHAPES[2 * n], SHAPES[2 * n + 1],
            )  # fmt: skip
