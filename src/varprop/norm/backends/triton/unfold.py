# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The gradients of one block of rows, and the sums over all blocks of a site. See `tiles`."""

import triton
import triton.language as tl

from .tiles import (
    RECORD_FIELDS,
    across,
    channel_axis,
    down,
    inverse_std,
    met_by_piece,
    piece_at,
    record_of,
    row_axis,
    stages_of,
    sums_of_three,
    tap_axis,
)

COLUMN_FIELDS = tl.constexpr(6)


@triton.jit
def _known_of_rows(scale, row_mean, row_var, grad_bias, row, exists, ACC: tl.constexpr):
    """Of some rows: mean, variance, scale and the gradient of the bias."""
    mu = tl.load(row_mean + row, exists, 0.0)
    spread = tl.load(row_var + row, exists, 1.0)
    s = tl.load(scale + row, exists, 0.0).to(ACC)
    db = tl.load(grad_bias + row, exists, 0.0).to(ACC)
    return mu, spread, s, db


@triton.jit
def _by_sums(dot, mu, spread, s, db, grad_scale, row, exists):
    """The rate of each row, and its gradients by mean and by variance; that by scale is written."""
    inverse = inverse_std(spread)
    k = s * inverse
    dk = dot - db * mu
    tl.store(grad_scale + row, (dk * inverse).to(tl.float32), exists)
    return k, -db * k, -0.5 * dk * k * (inverse * inverse)


@triton.jit
def _total(numbers, TAPS: tl.constexpr):
    total = numbers[0]
    for t in tl.static_range(1, TAPS):
        total += numbers[t]
    return total


@triton.jit
def _row_mean_of_gradient(k, alpha, beta, grads, shares, spreads, means, noises, count):
    """The mean over each row of G k + da m + 2 beta e w v, from the sums over it of G, e, the spread, m and e w v."""
    return (k * grads + (alpha * shares + 2.0 * beta * spreads) * means + 2.0 * beta * noises) / count


@triton.jit
def _unfold_whole(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
    """Weights and gradients are read once and stay in registers.

    A block takes some tiles of rows one after the other and keeps the sums over rows until its end, so that little of
    them has to be written and read again.
    """
    TAPS: tl.constexpr = BODIES[N][1]
    ALIGNED: tl.constexpr = BODIES[N][2]
    SPREAD: tl.constexpr = BODIES[N][3]
    R: tl.constexpr = BODIES[N][5]
    C: tl.constexpr = BODIES[N][6]
    ROUNDS: tl.constexpr = BODIES[N][7]
    CENTRED: tl.constexpr = BODIES[N][8]
    (
        share, scale, mean, var, row_mean, row_var, row_centre, tap_spread, grad_folded, grad_bias, grad_weight,
        grad_scale, partial_mean, partial_var,
    ) = buffers  # fmt: skip
    weight, place, first, rows, channels, row_stride, _, tap_stride, _, entering, shares, _, sums_at, line, _ = (
        record_of(record, WEIGHT, ALIGNED)
    )
    channel = tl.arange(0, C)
    known = channel < channels
    m = across(tl.load(mean + entering + channel, known, 0.0))
    v = across(tl.load(var + entering + channel, known, 0.0))
    shared = ()
    for t in tl.static_range(TAPS):
        shared = shared + (tl.load(share + shares + t).to(ACC),)  # noqa: RUF005 - what triton understands
    if CENTRED:
        means = tl.sum(m, 1)
        all_shares = _total(shared, TAPS)
    by_mean = tl.zeros([R, C], ACC)  # added up over rows at the end only: a sum across warps is a barrier
    by_var = tl.zeros([R, C], ACC)
    for n in tl.range(0, ROUNDS, num_stages=stages_of(TAPS, R * C, ROUNDS)):
        row = n * R + tl.arange(0, R)
        exists = row < rows
        inside = down(exists) & across(known)
        at = down(row * row_stride) + across(channel)
        mu, spread, s, db = _known_of_rows(scale, row_mean, row_var, grad_bias, first + row, exists, ACC)
        weights = ()
        grads = ()
        spreads = ()
        products = tl.zeros([R, C], ACC)
        if CENTRED:
            origin = down(tl.load(weight + row * row_stride, exists, 0.0).to(ACC))
            centre = down(tl.load(row_centre + first + row, exists, 0.0))
            all_grads = tl.zeros([R, C], ACC)
            weighted = tl.zeros([R, C], ACC)
            all_spreads = tl.zeros([R], ACC)
        for t in tl.static_range(TAPS):
            w = tl.load(weight + at + t * tap_stride, inside, 0.0)
            g = tl.load(grad_folded + place + at + t * tap_stride, inside, 0.0)
            weights = weights + (w,)  # noqa: RUF005
            grads = grads + (g,)  # noqa: RUF005
            if SPREAD:
                d = tl.load(tap_spread + sums_at + row * TAPS + t, exists, 0.0)
                spreads = spreads + (d,)  # noqa: RUF005
            if CENTRED:
                moved = (w.to(ACC) - origin) - centre
                products += moved * g.to(ACC)
                all_grads += g.to(ACC)
                weighted += moved * shared[t]
                if SPREAD:
                    all_spreads += d
            else:
                products += w.to(ACC) * g.to(ACC)
        if CENTRED:
            dot, grad_sums, noises = sums_of_three(products, all_grads, weighted * v)
        else:
            dot = tl.sum(products, 1)
        k, alpha, beta = _by_sums(dot, mu, spread, s, db, grad_scale, first + row, exists)
        if CENTRED:
            mean_of_row = _row_mean_of_gradient(
                k, alpha, beta, grad_sums, all_shares, all_spreads, means, noises, channels * TAPS
            )
        for t in tl.static_range(TAPS):
            da = alpha * shared[t]
            if SPREAD:
                da += 2.0 * beta * spreads[t]
            w = weights[t].to(ACC)
            if CENTRED:
                w = (w - origin) - centre
            of_square = down(beta * shared[t]) * w
            grad = grads[t].to(ACC) * down(k) + down(da) * m + 2.0 * of_square * v
            if CENTRED:
                grad -= down(mean_of_row)
            tl.store(grad_weight + place + at + t * tap_stride, grad.to(grad_weight.dtype.element_ty), inside)
            by_mean += down(da) * w
            by_var += of_square * w
    tl.store(partial_mean + line + channel, tl.sum(by_mean, 0), known)
    tl.store(partial_var + line + channel, tl.sum(by_var, 0), known)


@triton.jit
def _unfold_in_pieces(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
    """Rows of any length, taps in any number and order, groups of any size."""
    TAPS: tl.constexpr = BODIES[N][1]
    ALIGNED: tl.constexpr = BODIES[N][2]
    ACROSS: tl.constexpr = BODIES[N][4]
    R: tl.constexpr = BODIES[N][5]
    C: tl.constexpr = BODIES[N][6]
    CENTRED: tl.constexpr = BODIES[N][8]
    (
        share, scale, mean, var, row_mean, row_var, row_centre, tap_spread, grad_folded, grad_bias, grad_weight,
        grad_scale, partial_mean, partial_var,
    ) = buffers  # fmt: skip
    (
        weight, place, first, rows, channels, row_stride, channel_stride, tap_stride, taps, entering, shares, form,
        sums_at, line, per_group,
    ) = record_of(record, WEIGHT, ALIGNED)  # fmt: skip
    row = tl.arange(0, R)
    exists = row < rows
    products = tl.zeros([R, C, TAPS], ACC)
    if CENTRED:
        origin = row_axis(tl.load(weight + row * row_stride, exists, 0.0).to(ACC))
        centre = row_axis(tl.load(row_centre + first + row, exists, 0.0))
        grads = tl.zeros([R, C, TAPS], ACC)
        weighted = tl.zeros([R, C, TAPS], ACC)
        means = tl.zeros([R, C, 1], ACC)
        shared = tl.zeros([R], ACC)
        spreads = tl.zeros([R], ACC)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            m, _ = met_by_piece(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
            means += m
    for t in range(0, taps, TAPS):
        tap = t + tl.arange(0, TAPS)
        if CENTRED:
            e = tl.load(share + shares + tap, tap < taps, 0.0).to(ACC)
            shared += tl.sum(e, 0)
            if form >= 0:
                kept = tap_spread + sums_at + down(row * taps) + across(tap)
                spreads += tl.sum(tl.load(kept, down(exists) & across(tap < taps), 0.0), 1)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            g = tl.load(grad_folded + place + at, inside, 0.0).to(ACC)
            if CENTRED:
                _, v = met_by_piece(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
                w = (w - origin) - centre
                grads += g
                weighted += w * v * tap_axis(e)
            products += w * g
    mu, spread, s, db = _known_of_rows(scale, row_mean, row_var, grad_bias, first + row, exists, ACC)
    k, alpha, beta = _by_sums(tl.sum(tl.sum(products, 2), 1), mu, spread, s, db, grad_scale, first + row, exists)
    if CENTRED:
        grad_sums = tl.sum(tl.sum(grads, 2), 1)
        noises = tl.sum(tl.sum(weighted, 2), 1)
        mean_sums = tl.sum(tl.sum(means, 2), 1)
        mean_of_row = row_axis(
            _row_mean_of_gradient(k, alpha, beta, grad_sums, shared, spreads, mean_sums, noises, channels * taps)
        )
    for c in range(0, channels, C):
        channel = c + tl.arange(0, C)
        m, v = met_by_piece(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
        by_mean = tl.zeros([R, C], ACC)
        by_var = tl.zeros([R, C], ACC)
        for t in range(0, taps, TAPS):
            tap = t + tl.arange(0, TAPS)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            e = across(tl.load(share + shares + tap, tap < taps, 0.0).to(ACC))
            da = down(alpha) * e
            if form >= 0:
                kept = tap_spread + sums_at + down(row * taps) + across(tap)
                da += 2.0 * down(beta) * tl.load(kept, down(exists) & across(tap < taps), 0.0)
            da = tl.expand_dims(da, 1)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            g = tl.load(grad_folded + place + at, inside, 0.0).to(ACC)
            if CENTRED:
                w = (w - origin) - centre
            of_square = tl.expand_dims(down(beta) * e, 1) * w
            grad = g * row_axis(k) + da * m + 2.0 * of_square * v
            if CENTRED:
                grad -= mean_of_row
            tl.store(grad_weight + place + at, grad.to(grad_weight.dtype.element_ty), inside)
            by_mean += tl.sum(da * w, 2)
            by_var += tl.sum(of_square * w, 2)
        if ACROSS:
            own = line + down(row * channels) + across(channel)
            inside = down(exists) & across(channel < channels)
            tl.store(partial_mean + own, by_mean, inside)
            tl.store(partial_var + own, by_var, inside)
        else:
            tl.store(partial_mean + line + channel, tl.sum(by_mean, 0), channel < channels)
            tl.store(partial_var + line + channel, tl.sum(by_var, 0), channel < channels)


@triton.jit
def backward(
    records,
    share,
    scale,
    mean,
    var,
    row_mean,
    row_var,
    row_centre,
    tap_spread,
    grad_folded,
    grad_bias,
    grad_weight,
    grad_scale,
    partial_mean,
    partial_var,
    WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BODIES: tl.constexpr,
):
    """Gradients of one block's weights and scales, and its part of the gradients of what enters; BODIES as forward."""
    record = records + tl.program_id(0) * RECORD_FIELDS
    body = tl.load(record + RECORD_FIELDS - 1)
    buffers = (
        share, scale, mean, var, row_mean, row_var, row_centre, tap_spread, grad_folded, grad_bias, grad_weight,
        grad_scale, partial_mean, partial_var,
    )  # fmt: skip
    for n in tl.static_range(len(BODIES)):
        if body == n:
            if BODIES[n][0]:
                _unfold_whole(record, buffers, WEIGHT, ACC, BODIES, n)
            else:
                _unfold_in_pieces(record, buffers, WEIGHT, ACC, BODIES, n)


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
def add_partials(columns, partial_mean, partial_var, grad_mean, grad_var, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the partial sums of the blocks of one site for some of its entering channels."""
    here = columns + tl.program_id(0) * COLUMN_FIELDS
    first = tl.load(here).to(tl.int32)
    end = tl.load(here + 1).to(tl.int32)
    channels = tl.load(here + 2).to(tl.int32)
    partials = tl.load(here + 3).to(tl.int32)
    first_channel = tl.load(here + 4)
    partial_mean += tl.load(here + 5)
    partial_var += tl.load(here + 5)
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
