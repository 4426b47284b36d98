# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The fold of one block of rows: sums of each row, then its weights times scale / std. See `tiles`."""

import triton
import triton.language as tl

from .tiles import (
    PLACES_OF_TAPS,
    RECORD_FIELDS,
    across,
    channel_axis,
    common_part,
    common_part_in_memory,
    down,
    inverse_std,
    met_by_piece,
    piece_at,
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
def _centred_tiles(tiles, origin, inside, channels, row_centre, row, exists, TAPS: tl.constexpr):
    """The tiles of whole rows minus the mean of each row, which is written as its distance from the first weight.

    What lies outside of a row is not zero any more, but meets a mean and variance of zero.
    """
    total = tl.zeros_like(tiles[0])
    apart = ()
    for t in tl.static_range(TAPS):
        apart = apart + (tl.where(inside, tiles[t] - down(origin), 0.0),)  # noqa: RUF005 - what triton understands
        total += apart[t]
    centre = tl.sum(total, 1) / (channels * TAPS)
    tl.store(row_centre + row, centre, exists)
    centred = ()
    for t in tl.static_range(TAPS):
        centred = centred + (apart[t] - down(centre),)  # noqa: RUF005
    return centred


@triton.jit
def _fold_whole(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
    """Each weight is read once, and stays in a register until it is written."""
    TAPS: tl.constexpr = BODIES[N][1]
    ALIGNED: tl.constexpr = BODIES[N][2]
    SPREAD: tl.constexpr = BODIES[N][3]
    R: tl.constexpr = BODIES[N][5]
    C: tl.constexpr = BODIES[N][6]
    ROUNDS: tl.constexpr = BODIES[N][7]
    CENTRED: tl.constexpr = BODIES[N][8]
    share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, row_centre, _, tap_spread = buffers
    weight, place, first, rows, channels, row_stride, _, tap_stride, _, entering, shares, form, sums_at, _, _ = (
        record_of(record, WEIGHT, ALIGNED)
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
        if CENTRED:
            origin = tl.load(weight + row * row_stride, exists, 0.0).to(ACC)
            tiles = _centred_tiles(tiles, origin, inside, channels, row_centre + first, row, exists, TAPS)
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
def _fold_in_pieces(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
    """Rows of any length, taps in any number and order, groups of any size."""
    TAPS: tl.constexpr = BODIES[N][1]
    ALIGNED: tl.constexpr = BODIES[N][2]
    ACROSS: tl.constexpr = BODIES[N][4]
    R: tl.constexpr = BODIES[N][5]
    C: tl.constexpr = BODIES[N][6]
    CENTRED: tl.constexpr = BODIES[N][8]
    (
        share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, row_centre, tap_sums, tap_spread,
    ) = buffers  # fmt: skip
    (
        weight, place, first, rows, channels, row_stride, channel_stride, tap_stride, taps, entering, shares, form,
        sums_at, _, per_group,
    ) = record_of(record, WEIGHT, ALIGNED)  # fmt: skip
    PLACES: tl.constexpr = TAPS if TAPS > PLACES_OF_TAPS else PLACES_OF_TAPS
    row = tl.arange(0, R)
    exists = row < rows
    if CENTRED:
        origin = row_axis(tl.load(weight + row * row_stride, exists, 0.0).to(ACC))
        apart = tl.zeros([R, C, TAPS], ACC)
        for t in range(0, taps, TAPS):
            tap = t + tl.arange(0, TAPS)
            for c in range(0, channels, C):
                channel = c + tl.arange(0, C)
                inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
                at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
                apart += tl.where(inside, tl.load(weight + at, inside, 0.0).to(ACC) - origin, 0.0)
        centre = tl.sum(tl.sum(apart, 2), 1) / (channels * taps)
        tl.store(row_centre + first + row, centre, exists)
        centre = row_axis(centre)
    mu = tl.zeros([R], ACC)
    spread = tl.zeros([R], ACC)
    for t in range(0, taps, TAPS):
        tap = t + tl.arange(0, TAPS)
        # Summed place by place and over the channels of a piece at the end: one exchange between threads, not many.
        first_sums = tl.zeros([R, C, TAPS], ACC)
        second_sums = tl.zeros([R, C, TAPS], ACC)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            m, v = met_by_piece(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            if CENTRED:
                w = tl.where(inside, w - origin, 0.0) - centre
            first_sums += w * m
            second_sums += w * w * v
        sums = tl.sum(first_sums, 1)
        e = across(tl.load(share + shares + tap, tap < taps, 0.0).to(ACC))
        mu += tl.sum(sums * e, 1)
        spread += tl.sum(tl.sum(second_sums, 1) * e, 1)
        if form >= 0:
            kept = tap_sums + sums_at + down(row * taps) + across(tap)
            tl.store(kept, sums, down(exists) & across(tap < taps))
    if form >= 0:
        tl.debug_barrier()
        spread += common_part_in_memory(
            tap_sums + sums_at, tap_spread + sums_at, covariance + form, row, exists, taps, PLACES, ACC
        )
    s = tl.load(scale + first + row, exists, 0.0).to(ACC)
    offset = tl.load(shift + first + row, exists, 0.0).to(ACC)
    k = row_axis(_rates(mu, spread, s, offset, bias + first, row_mean + first, row_var + first, row, exists))
    for t in range(0, taps, TAPS):
        tap = t + tl.arange(0, TAPS)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            if CENTRED:
                w = (w - origin) - centre
            tl.store(folded + place + at, (w * k).to(folded.dtype.element_ty), inside)


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
    row_centre,
    tap_sums,
    tap_spread,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BODIES: tl.constexpr,
):
    """Folds the rows of one block; BODIES are those of `bodies.Body`, as tuples."""
    record = records + tl.program_id(0) * RECORD_FIELDS
    body = tl.load(record + RECORD_FIELDS - 1)
    buffers = (
        share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, row_centre, tap_sums, tap_spread,
    )  # fmt: skip
    for n in tl.static_range(len(BODIES)):
        if body == n:
            if BODIES[n][0]:
                _fold_whole(record, buffers, WEIGHT, ACC, BODIES, n)
            else:
                _fold_in_pieces(record, buffers, WEIGHT, ACC, BODIES, n)
