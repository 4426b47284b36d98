# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""The fold of all rows of all sites, grouped into one launch per class of weights.

A program takes a block of rows of one site and walks over its channels and taps in tiles [rows, channels, taps]: once
for the sums of the row, once more (from the cache) to write. The pass is bound by memory, so a tile has some 4096
elements, 16 a thread: enough loads in flight, and still several programs on a multiprocessor. `Shapes` in `blocks`
gives three bodies that share the launch: `CROSS` for many tiny rows that belong to many groups (depthwise
convolutions), where every row reads its own channels; `NARROW` and `WIDE` for blocks inside one group, whose rows share
the means they meet, with few or many channels. Where channels lie next to each other in memory they are the tile's last
axis and, if aligned, move in 16-byte pieces; else the taps are, and nine of them fill nine of sixteen places.
Sums over rows leave each block as partial sums and are added by a second kernel in a fixed order: no atomics.

Rows that fit whole into the registers of a block, which is most of them, have kernels of their own that read nothing
twice (`fold_whole`, `unfold_whole`, shapes in `whole`). What bounds those is how many bytes are on their way at a time:
blocks are small, so that several on a multiprocessor wait in turns; all that a block has to know lies in one record, so
that its weights are asked for after one wait; and each tap has a tile of its own, so that no place of a tile is empty.
"""

import triton
import triton.language as tl

from .whole import TAPS_APART, TILE

BLOCK_FIELDS = tl.constexpr(4)
SITE_FIELDS = tl.constexpr(15)
RECORD_FIELDS = tl.constexpr(16)  # of a block of whole rows, as `record_of` reads them
SHAPE_FIELDS = tl.constexpr(8)  # of a tile of whole rows, see `whole.Body`
PLACES_OF_TAPS = tl.constexpr(TAPS_APART)  # where every tap has a tile of its own


@triton.jit
def inverse_std(var):
    """1 / sigma of rows: 0 for a row of zeros, and NaN where squares of its weights left the range of floats."""
    other = tl.where(var == 0.0, float("inf"), float("nan"))
    return 1.0 / tl.sqrt(tl.where((var > 1e-30) & (var < 1e36), var, other))


@triton.jit
def site(sites, index):
    """The row of the site table: places in the buffers of all sites as int64, everything inside a site as int32."""
    here = sites + index * SITE_FIELDS
    return (
        tl.load(here),
        tl.load(here + 1).to(tl.int32),
        tl.load(here + 2).to(tl.int32),
        tl.load(here + 3).to(tl.int32),
        tl.load(here + 4).to(tl.int32),
        tl.load(here + 5).to(tl.int32),
        tl.load(here + 6).to(tl.int32),
        tl.load(here + 7).to(tl.int32),
        tl.load(here + 8),
        tl.load(here + 9),
        tl.load(here + 10),
        tl.load(here + 11),
        tl.load(here + 12),
        tl.load(here + 13),
        tl.load(here + 14).to(tl.int32),
    )


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
    """All that a block of whole rows has to know, from one line of memory; a weight's address comes first."""
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
    )


@triton.jit
def _add_two(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


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
def across(x):
    """A vector as the only row of a tile."""
    return tl.expand_dims(x, 0)


@triton.jit
def down(x):
    """A vector as the only column of a tile."""
    return tl.expand_dims(x, 1)


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
def channel_axis(x, INNER: tl.constexpr):
    """A vector of channels as a tile."""
    return tl.expand_dims(tl.expand_dims(x, 0), 0) if INNER else tl.expand_dims(tl.expand_dims(x, 0), 2)


@triton.jit
def tap_axis(x, INNER: tl.constexpr):
    """A vector of taps as a tile."""
    return tl.expand_dims(tl.expand_dims(x, 0), 2) if INNER else tl.expand_dims(tl.expand_dims(x, 0), 0)


@triton.jit
def row_axis(x):
    """A vector of rows as a tile."""
    return tl.expand_dims(tl.expand_dims(x, 1), 1)


@triton.jit
def offsets(channel, tap, channel_stride, tap_stride, INNER: tl.constexpr, STRIDED: tl.constexpr):
    """Where weights lie relative to the start of their row; an inner stride known to be 1 lets loads be joined."""
    if INNER:
        return channel_axis(channel, INNER) + tap_axis(tap * tap_stride, INNER)
    elif STRIDED:
        return channel_axis(channel * channel_stride, INNER) + tap_axis(tap * tap_stride, INNER)
    else:
        return channel_axis(channel * channel_stride, INNER) + tap_axis(tap, INNER)


@triton.jit
def meet(values, base, channel, inside, INNER: tl.constexpr, CROSS: tl.constexpr):
    """Means or variances of channels as a tile: the same for all rows, or those of every row's own group."""
    if CROSS:
        return tl.load(values + row_axis(base) + channel_axis(channel, INNER), inside, 0.0)
    else:
        return tl.load(values + base + channel_axis(channel, INNER), inside, 0.0)


@triton.jit
def between_taps(sums, covariance, saved, row, exists, taps, TAPS: tl.constexpr, ACC: tl.constexpr):
    """What the common part of the taps adds to the variance of rows; the products are saved for the backward."""
    tap = tl.arange(0, TAPS)
    tap_ok = tap < taps
    both = tl.expand_dims(tap_ok, 1) & tl.expand_dims(tap_ok, 0)
    square = tl.expand_dims(tap * taps, 1) + tl.expand_dims(tap, 0)
    form = tl.load(covariance + square, both, 0.0)
    whole = sums.to(tl.float64)
    d = tl.sum(tl.expand_dims(whole, 2) * tl.expand_dims(form, 0), 1)
    place = tl.expand_dims(row * taps, 1) + tl.expand_dims(tap, 0)
    tl.store(saved + place, d.to(ACC), tl.expand_dims(exists, 1) & tl.expand_dims(tap_ok, 0))
    return tl.sum(whole * d, 1).to(ACC)


@triton.jit
def rows_of(
    first, end, per_group, group_stride, row_stride, R: tl.constexpr, CROSS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Rows of a block, which of them exist, their group and place in it, and where they start in memory."""
    row = first + tl.arange(0, R)
    exists = row < end
    group = row // per_group if CROSS else first // per_group
    member = row - group * per_group
    start = group * group_stride + member * row_stride
    if ALIGNED:
        start = of_eight(start)
    return row, exists, group, member, start
