# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The fold of rows that fit whole into registers: each weight is read once and stays there until it is written."""

import triton
import triton.language as tl

from .tiles import (
    RECORD_FIELDS,
    SHAPE_FIELDS,
    across,
    between_taps,
    channel_axis,
    common_part,
    down,
    inverse_std,
    offsets,
    record_of,
    row_axis,
    stages_of,
    sums_of_taps,
    sums_of_two,
    tap_axis,
)


@triton.jit
def _rates(mu, spread, s, offset, bias, row_mean, row_var, row, exists):
    """What the weights of each row are multiplied by; its mean, variance and bias are written."""
    k = s * inverse_std(tl.where(exists, spread, 1.0))
    tl.store(row_mean + row, mu, exists)
    tl.store(row_var + row, spread, exists)
    tl.store(bias + row, (offset - mu * k).to(bias.dtype.element_ty), exists)
    return k


@triton.jit
def _fold_by_taps(
    record,
    buffers,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    TAPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPREAD: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Channels lie side by side: a tile [rows, channels] for every tap."""
    share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, tap_spread = buffers
    weight, place, first, rows, channels, row_stride, _, tap_stride, _, entering, shares, form, sums_at, _ = record_of(
        record, WEIGHT, ALIGNED
    )
    channel = tl.arange(0, C)
    known = channel < channels
    m = across(tl.load(mean + entering + channel, known, 0.0))
    v = across(tl.load(var + entering + channel, known, 0.0))
    shared = ()
    for t in tl.static_range(TAPS):
        shared = shared + (tl.load(share + shares + t).to(ACC),)  # noqa: RUF005 - what triton understands
    for n in tl.range(0, ROUNDS, num_stages=stages_of(TAPS, R * C, ROUNDS)):
        row = n * R + tl.arange(0, R)
        exists = row < rows
        inside = down(exists) & across(known)
        at = down(row * row_stride) + across(channel)
        s = tl.load(scale + first + row, exists, 0.0).to(ACC)
        offset = tl.load(shift + first + row, exists, 0.0).to(ACC)
        tiles = ()
        for t in tl.static_range(TAPS):  # all of them before the first sum: no load passes the barrier of a sum
            tiles = tiles + (tl.load(weight + at + t * tap_stride, inside, 0.0).to(ACC),)  # noqa: RUF005
        weighted = tl.zeros([R, C], ACC)
        squares = tl.zeros([R, C], ACC)
        for t in tl.static_range(TAPS):
            squares += tiles[t] * tiles[t] * shared[t]
            weighted += tiles[t] * shared[t]
        if SPREAD:
            spread, sums = sums_of_taps(tiles, m, squares * v, TAPS)
            mu = tl.zeros([R], ACC)
            for t in tl.static_range(TAPS):
                mu += sums[t] * shared[t]
            added, products, tap = common_part(sums, covariance + form, TAPS, ACC)
            spread += added
            saved = tap_spread + sums_at + down(row * TAPS) + across(tap)
            tl.store(saved, products, down(exists) & across(tap < TAPS))
        else:
            mu, spread = sums_of_two(weighted * m, squares * v)
        k = _rates(mu, spread, s, offset, bias + first, row_mean + first, row_var + first, row, exists)
        for t in tl.static_range(TAPS):
            tl.store(folded + place + at + t * tap_stride, (tiles[t] * down(k)).to(folded.dtype.element_ty), inside)


@triton.jit
def _fold_across_taps(
    record,
    buffers,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    TAPS: tl.constexpr,
    STRIDED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Taps lie side by side: one tile [rows, channels, taps]."""
    share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, tap_spread = buffers
    (
        weight,
        place,
        first,
        rows,
        channels,
        row_stride,
        channel_stride,
        tap_stride,
        taps,
        entering,
        shares,
        form,
        sums_at,
        _,
    ) = record_of(record, WEIGHT, False)
    row = tl.arange(0, R)
    exists = row < rows
    channel = tl.arange(0, C)
    tap = tl.arange(0, TAPS)
    known = channel_axis(channel < channels, False)
    inside = known & row_axis(exists) & tap_axis(tap < taps, False)
    at = row_axis(row * row_stride) + offsets(channel, tap, channel_stride, tap_stride, False, STRIDED)
    s = tl.load(scale + first + row, exists, 0.0).to(ACC)
    offset = tl.load(shift + first + row, exists, 0.0).to(ACC)
    w = tl.load(weight + at, inside, 0.0).to(ACC)
    m = tl.load(mean + entering + channel_axis(channel, False), known, 0.0)
    v = tl.load(var + entering + channel_axis(channel, False), known, 0.0)
    e = across(tl.load(share + shares + tap, tap < taps, 0.0).to(ACC))
    sums = tl.sum(w * m, 1)
    mu = tl.sum(sums * e, 1)
    spread = tl.sum(tl.sum(w * w * v, 1) * e, 1)
    if form >= 0:
        spread += between_taps(sums, covariance + form, tap_spread + sums_at, row, exists, taps, TAPS, ACC)
    k = _rates(mu, spread, s, offset, bias + first, row_mean + first, row_var + first, row, exists)
    tl.store(folded + place + at, (w * row_axis(k)).to(folded.dtype.element_ty), inside)


@triton.jit
def forward(
    records,
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
    BODIES: tl.constexpr,
    SHAPES: tl.constexpr,
):
    """Folds the rows of one block; SHAPES has the fields of `whole.Body`, body after body."""
    record = records + tl.program_id(0) * RECORD_FIELDS
    body = tl.load(record + RECORD_FIELDS - 1)
    buffers = (share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, tap_spread)
    for n in tl.static_range(BODIES):
        if body == n:
            if SHAPES[SHAPE_FIELDS * n]:
                _fold_by_taps(
                    record,
                    buffers,
                    WEIGHT,
                    ACC,
                    SHAPES[SHAPE_FIELDS * n + 1],
                    SHAPES[SHAPE_FIELDS * n + 2],
                    SHAPES[SHAPE_FIELDS * n + 3],
                    SHAPES[SHAPE_FIELDS * n + 5],
                    SHAPES[SHAPE_FIELDS * n + 6],
                    SHAPES[SHAPE_FIELDS * n + 7],
                )
            else:
                _fold_across_taps(
                    record,
                    buffers,
                    WEIGHT,
                    ACC,
                    SHAPES[SHAPE_FIELDS * n + 1],
                    SHAPES[SHAPE_FIELDS * n + 4],
                    SHAPES[SHAPE_FIELDS * n + 5],
                    SHAPES[SHAPE_FIELDS * n + 6],
                )
