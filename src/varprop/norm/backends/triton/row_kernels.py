# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The row pass: folded weights and biases of all rows, and its backward; see `rows` for its tables.

A block takes some rows of one layer. Rows that fit into its registers, which is most of them, are read once: each tap
has a tile [rows, channels] of its own, so that no element of a tile is empty. What bounds them is how many bytes are on
their way at a time: blocks are small, so that several on a multiprocessor wait in turns, and all that a block reads
besides weights is in one record, so that its weights are loaded after one wait. All other rows (very long ones, those
whose taps lie side by side or are many, tiny ones in many groups) are read in pieces [rows, channels, taps], once for
their sums and once more, from the cache, to write.

Centred rows have their mean subtracted. It is that of the distances from the row's first weight, as in
`reference.minus_row_mean`, and saved for the backward. Rows in registers take one more sum; those in pieces are read
once more. The derivative by a weight loses its mean over the row, which follows from sums that the backward can take
along with those it takes anyway: it reads nothing twice for them.

Sums over rows leave each block as partial sums and are added by a second kernel in a fixed order: no atomics.
"""

import triton
import triton.language as tl

TILE = 2048  # elements of a tile, 16 for each of 128 threads
TAPS_APART = 16  # taps that have a tile each, at most, since they are written out one by one; a power of two
RECORD_FIELDS = tl.constexpr(16)  # of a block, as `record_of` reads them
PLACES_OF_TAPS = tl.constexpr(TAPS_APART)  # of rows in registers, at most


@triton.jit
def inverse_std(var):
    """1 / sigma of rows: 0 for a row of zeros, and NaN where squares of its weights left the range of floats."""
    otherwise = tl.where(var == 0.0, float("inf"), float("nan"))
    return 1.0 / tl.sqrt(tl.where((var > 1e-30) & (var < 1e36), var, otherwise))


@triton.constexpr_function
def stages_of(taps, elements, rounds):
    """How many of the tiles that a block takes in turn are on their way or worked on at a time.

    Those on their way lie in shared memory, of which every GPU has enough for the shorter rows of one tap.
    """
    return 3 if taps == 1 and elements <= TILE and rounds > 1 else 1


@triton.jit
def of_eight(x):
    """A multiple of 8, written so that the compiler sees it: hints on loaded scalars do not reach the loads."""
    return x // 8 * 8


@triton.jit
def record_of(here, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr):
    """The record of a block, which is one line of memory; the address of its first weight comes first."""
    weight = tl.load(here).to(tl.pointer_type(WEIGHT))
    position = tl.load(here + 1)
    channels = tl.load(here + 4).to(tl.int32)
    row_stride = tl.load(here + 5).to(tl.int32)
    tap_stride = tl.load(here + 7).to(tl.int32)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        position = of_eight(position)
        channels = of_eight(channels)
        row_stride = of_eight(row_stride)
        tap_stride = of_eight(tap_stride)
    return (
        weight,
        position,
        tl.load(here + 2),  # first row
        tl.load(here + 3).to(tl.int32),  # rows
        channels,
        row_stride,
        tl.load(here + 6).to(tl.int32),  # channel stride
        tap_stride,
        tl.load(here + 8).to(tl.int32),  # taps
        tl.load(here + 9),  # first entering channel
        tl.load(here + 10),  # first share
        tl.load(here + 11),  # first number of the covariance, or -1
        tl.load(here + 12),  # first sum over channels
        tl.load(here + 13),  # first partial sum
        tl.load(here + 14).to(tl.int32),  # rows of a group
    )


@triton.jit
def across(x):
    """A vector as the only row of a tile."""
    return tl.expand_dims(x, 0)


@triton.jit
def down(x):
    """A vector as the only column of a tile."""
    return tl.expand_dims(x, 1)


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_three(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _add_ten(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9
):  # fmt: skip
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9,
    )  # fmt: skip


@triton.jit
def sums_of_two(first, second):
    """Sums along rows of two tiles, for which threads wait for each other once."""
    return tl.reduce((first, second), 1, _add_two)


@triton.jit
def sums_of_three(first, second, third):
    """Sums along rows of three tiles, for which threads wait for each other once."""
    return tl.reduce((first, second, third), 1, _add_three)


@triton.jit
def sums_of_taps(tiles, m, square, TAPS: tl.constexpr):
    """Sums along rows: of a square, and of the tile of every tap times m; together for nine taps, else one by one."""
    if TAPS == 9:
        spread, a0, a1, a2, a3, a4, a5, a6, a7, a8 = tl.reduce(
            (square, tiles[0] * m, tiles[1] * m, tiles[2] * m, tiles[3] * m, tiles[4] * m, tiles[5] * m, tiles[6] * m,
             tiles[7] * m, tiles[8] * m), 1, _add_ten,
        )  # fmt: skip
        return spread, (a0, a1, a2, a3, a4, a5, a6, a7, a8)
    else:
        sums = ()
        for t in tl.static_range(TAPS):
            sums = sums + (tl.sum(tiles[t] * m, 1),)  # noqa: RUF005 - what triton understands
        return tl.sum(square, 1), sums


@triton.jit
def shared_mean(sums, covariance, TAPS: tl.constexpr, ACC: tl.constexpr):
    """The share of means that differ by position in the variance of rows, and the covariance of taps times their sums.

    The products are a tile [rows, taps], which the threads share; as numbers of a row, every thread had all of them.
    """
    tap = tl.arange(0, PLACES_OF_TAPS)
    column = down(sums[0].to(tl.float64))
    joined = column * across((tap == 0).to(tl.float64))
    products = column * across(tl.load(covariance + tap, tap < TAPS, 0.0))
    for t in tl.static_range(1, TAPS):
        column = down(sums[t].to(tl.float64))
        joined = tl.where(across(tap == t), column, joined)
        products += column * across(tl.load(covariance + t * TAPS + tap, tap < TAPS, 0.0))
    return tl.sum(joined * products, 1).to(ACC), products.to(ACC), tap


@triton.jit
def shared_mean_in_memory(sums, spread, covariance, row, exists, taps, PLACES: tl.constexpr, ACC: tl.constexpr):
    """The share of `shared_mean` for any number of taps, whose sums the block has written; writes the products."""
    added = tl.zeros_like(row).to(ACC)
    for t in range(0, taps, PLACES):
        tap = t + tl.arange(0, PLACES)
        products = tl.zeros([row.shape[0], PLACES], tl.float64)
        for n in range(taps):
            column = tl.load(sums + row * taps + n, exists, 0.0).to(tl.float64)
            products += down(column) * across(tl.load(covariance + n * taps + tap, tap < taps, 0.0))
        at = down(row * taps) + across(tap)
        inside = down(exists) & across(tap < taps)
        added += tl.sum(tl.load(sums + at, inside, 0.0).to(tl.float64) * products, 1).to(ACC)
        tl.store(spread + at, products.to(ACC), inside)
    return added


@triton.jit
def row_axis(x):
    """A vector of rows as a piece."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1)


@triton.jit
def channel_axis(x):
    """A vector of channels as a piece."""
    return tl.expand_dims(tl.expand_dims(x, 0), 2)


@triton.jit
def tap_axis(x):
    """A vector of taps as a piece."""
    return tl.expand_dims(tl.expand_dims(x, 0), 0)


@triton.jit
def piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED: tl.constexpr):
    """Where the weights of a piece lie from the first of the block; channels that are aligned lie side by side."""
    within = channel_axis(channel if ALIGNED else channel * channel_stride) + tap_axis(tap * tap_stride)
    return row_axis(row * row_stride) + within


@triton.jit
def load_moments(mean, var, row, exists, channel, channels, per_group, ACROSS: tl.constexpr):
    """Means and variances of channels: the same for all rows, or those of the group of every row."""
    at = channel_axis(channel)
    valid = channel_axis(channel < channels)
    if ACROSS:
        at = at + row_axis(row // per_group * channels)
        valid = valid & row_axis(exists)
    return tl.load(mean + at, valid, 0.0), tl.load(var + at, valid, 0.0)


# --- forward ---


@triton.jit
def _rates(mu, spread, s, offset, bias, row_mean, row_var, row, exists):
    """The rate of each row, which multiplies its weights; writes its mean, variance and bias."""
    k = s * inverse_std(tl.where(exists, spread, 1.0))
    tl.store(row_mean + row, mu, exists)
    tl.store(row_var + row, spread, exists)
    tl.store(bias + row, (offset - mu * k).to(bias.dtype.element_ty), exists)
    return k


@triton.jit
def _centred_tiles(tiles, origin, inside, channels, row_centre, row, exists, TAPS: tl.constexpr):
    """The tiles of rows in registers minus the mean of each row, whose distance from the first weight is written.

    Elements outside of a row are not zero any more, but are multiplied by a mean and variance of zero.
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
def _forward_whole(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
    """Each weight is read once, and stays in a register until it is written."""
    TAPS: tl.constexpr = BODIES[N][1]
    ALIGNED: tl.constexpr = BODIES[N][2]
    SPREAD: tl.constexpr = BODIES[N][3]
    R: tl.constexpr = BODIES[N][5]
    C: tl.constexpr = BODIES[N][6]
    ROUNDS: tl.constexpr = BODIES[N][7]
    CENTRED: tl.constexpr = BODIES[N][8]
    share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, row_centre, _, tap_spread = buffers
    (weight, position, first, rows, channels, row_stride, _, tap_stride, _, entering, shares, cov_at, sums_at, _, _) = (
        record_of(record, WEIGHT, ALIGNED)
    )
    channel = tl.arange(0, C)
    valid = channel < channels
    m = across(tl.load(mean + entering + channel, valid, 0.0))
    v = across(tl.load(var + entering + channel, valid, 0.0))
    shared = ()
    for t in tl.static_range(TAPS):
        shared = shared + (tl.load(share + shares + t).to(ACC),)  # noqa: RUF005 - what triton understands
    for n in tl.range(0, ROUNDS, num_stages=stages_of(TAPS, R * C, ROUNDS)):
        row = n * R + tl.arange(0, R)
        exists = row < rows
        inside = down(exists) & across(valid)
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
            added, products, tap = shared_mean(sums, covariance + cov_at, TAPS, ACC)
            spread += added
            saved = tap_spread + sums_at + down(row * TAPS) + across(tap)
            tl.store(saved, products, down(exists) & across(tap < TAPS))
        else:
            mu, spread = sums_of_two(weighted * m, squares * v)
        k = _rates(mu, spread, s, offset, bias + first, row_mean + first, row_var + first, row, exists)
        for t in tl.static_range(TAPS):
            tl.store(folded + position + at + t * tap_stride, (tiles[t] * down(k)).to(folded.dtype.element_ty), inside)


@triton.jit
def _forward_pieces(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
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
        weight, position, first, rows, channels, row_stride, channel_stride, tap_stride, taps, entering, shares, cov_at,
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
        # Summed element by element, over the channels of a piece at the end: one exchange between threads, not many.
        first_sums = tl.zeros([R, C, TAPS], ACC)
        second_sums = tl.zeros([R, C, TAPS], ACC)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            m, v = load_moments(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            if CENTRED:
                w = tl.where(inside, w - origin, 0.0) - centre
            first_sums += w * m
            second_sums += w * w * v
        sums = tl.sum(first_sums, 1)
        e = across(tl.load(share + shares + tap, tap < taps, 0.0).to(ACC))
        mu += tl.sum(sums * e, 1)
        spread += tl.sum(tl.sum(second_sums, 1) * e, 1)
        if cov_at >= 0:
            saved = tap_sums + sums_at + down(row * taps) + across(tap)
            tl.store(saved, sums, down(exists) & across(tap < taps))
    if cov_at >= 0:
        tl.debug_barrier()
        spread += shared_mean_in_memory(
            tap_sums + sums_at, tap_spread + sums_at, covariance + cov_at, row, exists, taps, PLACES, ACC
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
            tl.store(folded + position + at, (w * k).to(folded.dtype.element_ty), inside)


@triton.jit
def forward(
    records, share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, row_centre, tap_sums,
    tap_spread, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr,
):  # fmt: skip
    """Folds the rows of one block; BODIES are those of `rows.Body`, as tuples."""
    record = records + tl.program_id(0) * RECORD_FIELDS
    body = tl.load(record + RECORD_FIELDS - 1)
    buffers = (
        share, covariance, scale, shift, mean, var, folded, bias, row_mean, row_var, row_centre, tap_sums, tap_spread,
    )  # fmt: skip
    for n in tl.static_range(len(BODIES)):
        if body == n:
            if BODIES[n][0]:
                _forward_whole(record, buffers, WEIGHT, ACC, BODIES, n)
            else:
                _forward_pieces(record, buffers, WEIGHT, ACC, BODIES, n)


# --- backward ---

COLUMN_FIELDS = tl.constexpr(6)


@triton.jit
def _load_rows(scale, row_mean, row_var, grad_bias, row, exists, ACC: tl.constexpr):
    """Mean, variance, scale and the gradient by the bias of some rows."""
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
def _backward_whole(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
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
    weight, position, first, rows, channels, row_stride, _, tap_stride, _, entering, shares, _, sums_at, line, _ = (
        record_of(record, WEIGHT, ALIGNED)
    )
    channel = tl.arange(0, C)
    valid = channel < channels
    m = across(tl.load(mean + entering + channel, valid, 0.0))
    v = across(tl.load(var + entering + channel, valid, 0.0))
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
        inside = down(exists) & across(valid)
        at = down(row * row_stride) + across(channel)
        mu, spread, s, db = _load_rows(scale, row_mean, row_var, grad_bias, first + row, exists, ACC)
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
            g = tl.load(grad_folded + position + at + t * tap_stride, inside, 0.0)
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
            tl.store(grad_weight + position + at + t * tap_stride, grad.to(grad_weight.dtype.element_ty), inside)
            by_mean += down(da) * w
            by_var += of_square * w
    tl.store(partial_mean + line + channel, tl.sum(by_mean, 0), valid)
    tl.store(partial_var + line + channel, tl.sum(by_var, 0), valid)


@triton.jit
def _backward_pieces(record, buffers, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr, N: tl.constexpr):
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
        weight, position, first, rows, channels, row_stride, channel_stride, tap_stride, taps, entering, shares, cov_at,
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
            m, _ = load_moments(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
            means += m
    for t in range(0, taps, TAPS):
        tap = t + tl.arange(0, TAPS)
        if CENTRED:
            e = tl.load(share + shares + tap, tap < taps, 0.0).to(ACC)
            shared += tl.sum(e, 0)
            if cov_at >= 0:
                saved = tap_spread + sums_at + down(row * taps) + across(tap)
                spreads += tl.sum(tl.load(saved, down(exists) & across(tap < taps), 0.0), 1)
        for c in range(0, channels, C):
            channel = c + tl.arange(0, C)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            g = tl.load(grad_folded + position + at, inside, 0.0).to(ACC)
            if CENTRED:
                _, v = load_moments(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
                w = (w - origin) - centre
                grads += g
                weighted += w * v * tap_axis(e)
            products += w * g
    mu, spread, s, db = _load_rows(scale, row_mean, row_var, grad_bias, first + row, exists, ACC)
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
        m, v = load_moments(mean + entering, var + entering, row, exists, channel, channels, per_group, ACROSS)
        by_mean = tl.zeros([R, C], ACC)
        by_var = tl.zeros([R, C], ACC)
        for t in range(0, taps, TAPS):
            tap = t + tl.arange(0, TAPS)
            inside = row_axis(exists) & channel_axis(channel < channels) & tap_axis(tap < taps)
            at = piece_at(row, channel, tap, row_stride, channel_stride, tap_stride, ALIGNED)
            e = across(tl.load(share + shares + tap, tap < taps, 0.0).to(ACC))
            da = down(alpha) * e
            if cov_at >= 0:
                saved = tap_spread + sums_at + down(row * taps) + across(tap)
                da += 2.0 * down(beta) * tl.load(saved, down(exists) & across(tap < taps), 0.0)
            da = tl.expand_dims(da, 1)
            w = tl.load(weight + at, inside, 0.0).to(ACC)
            g = tl.load(grad_folded + position + at, inside, 0.0).to(ACC)
            if CENTRED:
                w = (w - origin) - centre
            of_square = tl.expand_dims(down(beta) * e, 1) * w
            grad = g * row_axis(k) + da * m + 2.0 * of_square * v
            if CENTRED:
                grad -= mean_of_row
            tl.store(grad_weight + position + at, grad.to(grad_weight.dtype.element_ty), inside)
            by_mean += tl.sum(da * w, 2)
            by_var += tl.sum(of_square * w, 2)
        if ACROSS:
            partial_at = line + down(row * channels) + across(channel)
            inside = down(exists) & across(channel < channels)
            tl.store(partial_mean + partial_at, by_mean, inside)
            tl.store(partial_var + partial_at, by_var, inside)
        else:
            tl.store(partial_mean + line + channel, tl.sum(by_mean, 0), channel < channels)
            tl.store(partial_var + line + channel, tl.sum(by_var, 0), channel < channels)


@triton.jit
def backward(
    records, share, scale, mean, var, row_mean, row_var, row_centre, tap_spread, grad_folded, grad_bias, grad_weight,
    grad_scale, partial_mean, partial_var, WEIGHT: tl.constexpr, ACC: tl.constexpr, BODIES: tl.constexpr,
):  # fmt: skip
    """Gradients by the weights and scales of one block, and its share of those by the entering channels."""
    record = records + tl.program_id(0) * RECORD_FIELDS
    body = tl.load(record + RECORD_FIELDS - 1)
    buffers = (
        share, scale, mean, var, row_mean, row_var, row_centre, tap_spread, grad_folded, grad_bias, grad_weight,
        grad_scale, partial_mean, partial_var,
    )  # fmt: skip
    for n in tl.static_range(len(BODIES)):
        if body == n:
            if BODIES[n][0]:
                _backward_whole(record, buffers, WEIGHT, ACC, BODIES, n)
            else:
                _backward_pieces(record, buffers, WEIGHT, ACC, BODIES, n)


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
    """Adds the partial sums of the blocks of one layer for some of its entering channels."""
    here = columns + tl.program_id(0) * COLUMN_FIELDS
    first = tl.load(here).to(tl.int32)
    end = tl.load(here + 1).to(tl.int32)
    channels = tl.load(here + 2).to(tl.int32)
    partials = tl.load(here + 3).to(tl.int32)
    first_channel = tl.load(here + 4)
    partial_mean += tl.load(here + 5)
    partial_var += tl.load(here + 5)
    offset = tl.arange(0, COLUMNS)
    column = first + offset
    ok = column < end
    group = first // channels
    if (tl.minimum(first + COLUMNS, end) - 1) // channels == group:  # then it shows that columns lie side by side
        line = group * (partials * channels) + first % channels + offset
        of_mean, of_var = _add_lines(partial_mean, partial_var, line, channels, partials, ok, ROWS, COLUMNS)
    else:
        line = column // channels * (partials * channels) + column % channels
        of_mean, of_var = _add_lines(partial_mean, partial_var, line, channels, partials, ok, ROWS, COLUMNS)
    tl.store(grad_mean + first_channel + column, of_mean.to(tl.float32), ok)
    tl.store(grad_var + first_channel + column, of_var.to(tl.float32), ok)
