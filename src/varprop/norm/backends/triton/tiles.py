# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Device functions that the fold of rows and its backward share.

A block takes some rows of one site. Rows that fit into its registers, which is most of them, are read once: each tap
has a tile [rows, channels] of its own, so that no place of a tile is empty. What bounds them is how many bytes are on
their way at a time: blocks are small, so that several on a multiprocessor wait in turns, and all that a block has to
know lies in one record, so that its weights are asked for after one wait. All other rows (very long ones, those whose
taps lie side by side or are many, tiny ones in many groups) are walked over in pieces [rows, channels, taps], once for
their sums and once more, from the cache, to write.

Centred rows have their mean subtracted. It is that of the distances from the row's first weight, as in
`centring.minus_row_mean`, and kept for the backward. Whole rows take one more sum of what lies in registers; those in
pieces are walked over once more. The derivative by a weight loses its mean over the row, which follows from sums that
the backward can take along with those it takes anyway: no walk is added there.

Sums over rows leave each block as partial sums and are added by a second kernel in a fixed order: no atomics.
"""

import triton
import triton.language as tl

from .bodies import TAPS_APART, TILE

RECORD_FIELDS = tl.constexpr(16)  # of a block, as `record_of` reads them
PLACES_OF_TAPS = tl.constexpr(TAPS_APART)  # where every tap has a tile of its own


@triton.jit
def inverse_std(var):
    """1 / sigma of rows: 0 for a row of zeros, and NaN where squares of its weights left the range of floats."""
    other = tl.where(var == 0.0, float("inf"), float("nan"))
    return 1.0 / tl.sqrt(tl.where((var > 1e-30) & (var < 1e36), var, other))


@triton.constexpr_function
def stages_of(taps, elements, rounds):
    """How many of the tiles that a block takes in turn are on their way or worked on at a time.

    Those on their way lie in shared memory, of which every GPU has enough for the shorter rows of one tap.
    """
    return 3 if taps == 1 and elements <= TILE and rounds > 1 else 1


@triton.jit
def of_eight(x):
    """A number known to be a multiple of 8, in a form that shows it: hints on loaded scalars do not reach the loads."""
    return x // 8 * 8


@triton.jit
def record_of(here, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr):
    """All that a block has to know, from one line of memory; the address of its first weight comes first."""
    weight = tl.load(here).to(tl.pointer_type(WEIGHT))
    place = tl.load(here + 1)
    channels = tl.load(here + 4).to(tl.int32)
    row_stride = tl.load(here + 5).to(tl.int32)
    tap_stride = tl.load(here + 7).to(tl.int32)
    if ALIGNED:
        weight = tl.multiple_of(weight, 16)
        place = of_eight(place)
        channels = of_eight(channels)
        row_stride = of_eight(row_stride)
        tap_stride = of_eight(tap_stride)
    return (
        weight,
        place,
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
    """The same of three tiles."""
    return tl.reduce((first, second, third), 1, _add_three)


@triton.jit
def sums_of_taps(tiles, m, square, TAPS: tl.constexpr):
    """Sums along rows: of a square, and of the tile of every tap times m; together for nine taps, one by one else."""
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
def common_part(sums, covariance, TAPS: tl.constexpr, ACC: tl.constexpr):
    """What the common part of the taps adds to the variance of rows, and its matrix times the sums of the taps.

    The products are a tile [rows, taps], which the threads share; as numbers of a row, every thread had all of them.
    """
    tap = tl.arange(0, PLACES_OF_TAPS)
    one = down(sums[0].to(tl.float64))
    whole = one * across((tap == 0).to(tl.float64))
    products = one * across(tl.load(covariance + tap, tap < TAPS, 0.0))
    for t in tl.static_range(1, TAPS):
        one = down(sums[t].to(tl.float64))
        whole = tl.where(across(tap == t), one, whole)
        products += one * across(tl.load(covariance + t * TAPS + tap, tap < TAPS, 0.0))
    return tl.sum(whole * products, 1).to(ACC), products.to(ACC), tap


@triton.jit
def common_part_in_memory(sums, spread, covariance, row, exists, taps, PLACES: tl.constexpr, ACC: tl.constexpr):
    """The same for any number of taps, whose sums the block has written; the products are written too."""
    added = tl.zeros_like(row).to(ACC)
    for t in range(0, taps, PLACES):
        tap = t + tl.arange(0, PLACES)
        products = tl.zeros([row.shape[0], PLACES], tl.float64)
        for n in range(taps):
            one = tl.load(sums + row * taps + n, exists, 0.0).to(tl.float64)
            products += down(one) * across(tl.load(covariance + n * taps + tap, tap < taps, 0.0))
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
def met_by_piece(mean, var, row, exists, channel, channels, per_group, ACROSS: tl.constexpr):
    """Means and variances of channels: the same for all rows, or those of every row's own group."""
    at = channel_axis(channel)
    known = channel_axis(channel < channels)
    if ACROSS:
        at = at + row_axis(row // per_group * channels)
        known = known & row_axis(exists)
    return tl.load(mean + at, known, 0.0), tl.load(var + at, known, 0.0)
