"""How blocks take the rows of a site: whole, in registers, or in pieces; and in tiles of what shape."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...fold.layout import Rows

WARPS, WARPS_LONG = 4, 16  # of a block: several blocks on a multiprocessor wait for memory in turns
REGISTERS = 128  # of a thread forward, at most: four blocks of four warps then fit on a multiprocessor
ALIGNED = 8  # elements: 16 bytes in bfloat16
TILE = 2048  # elements of a tile, 16 for each of 128 threads
MOST_ROWS = 16  # of a whole tile with several taps, where every row keeps a number for each
OF_A_TAP = 512  # at least, where every tap has a tile of its own: 16 bytes for each thread
SHORT, LONGEST = 5120, 10240  # elements of a whole row: beyond the first it takes more warps, beyond the second pieces
WIDE = 2048  # channels: beyond, too few rows would share what is known of them
TAPS_APART = 16  # at most, since they are written out one by one; a power of two
AT_ONCE = 1024  # tiles, about twice what a large GPU has at a time: fewer are taken by a block each
SUMMED = 32  # weights whose sum leaves a block as one number, at most: it is written and read again
ROUNDS = 8  # tiles of rows of one tap that a block folds in turn, at most, the next ones on their way
FEW_ROWS, FEW_CHANNELS = 16, 32  # of a group: up to here blocks reach across groups
PIECE = 1024  # elements of a piece: with more it would take more registers than whole rows in the same launch
TAPS_OF_PIECE = 64  # at most
CHANNELS_OF_PIECE = 512, 64  # at most, there and back, where every block leaves two numbers for each channel
LINE = 64  # channels side by side that make it worth while to take taps one by one


@dataclass(frozen=True)
class WeightOrder:
    """How a weight lies in memory: W[group, row of the group, channel, tap] at these distances, in elements."""

    group: int
    row: int
    channel: int
    tap: int
    aligned: bool  # channels lie side by side and can be moved in pieces of 16 bytes
    dtype: torch.dtype


def order_of(rows: Rows, weight: Tensor) -> WeightOrder:
    """How a weight lies in memory, from its strides alone: it may be one without data.

    Raises:
        ValueError: If it is no dense block, or its taps do not lie at one distance from each other.
    """
    tap = _tap_stride(weight)
    outer, inner = weight.stride(0), weight.stride(1) if weight.dim() > 1 else 1
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    if weight.numel() >= 1 << 31:
        raise ValueError(f"A weight of {weight.numel()} elements is too large for the kernels, which count in 32 bits.")
    if tap is None or (weight.numel() and last + 1 != weight.numel()) or weight.numel() != rows.weights:
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} and strides {weight.stride()} is not laid out in one of the "
            "orders the kernels know: call .contiguous() on it, or use torch.channels_last."
        )
    if rows.transposed:
        group, row, channel = rows.channels * outer, inner, outer
    else:
        group, row, channel = rows.outputs // rows.groups * outer, outer, inner
    found = WeightOrder(group, row, channel, tap, False, weight.dtype)
    steps = (rows.channels, row, group, rows.first_weight, tap if rows.tap_count > 1 else 0)
    return replace(found, aligned=_channels_inside(rows, found) and all(step % ALIGNED == 0 for step in steps))


def order_in_memory(rows: Rows, weight: Tensor) -> WeightOrder:
    """The same for a weight that has an address, where the first element may be out of line."""
    found = order_of(rows, weight)
    return replace(found, aligned=found.aligned and weight.data_ptr() % 16 == 0)


def _tap_stride(weight: Tensor) -> int | None:
    """The distance of neighbouring taps, if it is the same for all; 1 where there is one tap."""
    axes = [(size, stride) for size, stride in zip(weight.shape[2:], weight.stride()[2:], strict=True) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(axes):
        if outer != size * inner:
            return None
    return axes[-1][1] if axes else 1


def _channels_inside(rows: Rows, order: WeightOrder) -> bool:
    """Whether channels lie side by side, and taps do not."""
    return (order.channel == 1 or rows.channels == 1) and (order.tap != 1 or rows.tap_count == 1)


@dataclass(frozen=True)
class Body:
    """The tile of some blocks, in the order in which kernels read it.

    Attributes:
        whole: Whether rows stay in registers, with a tile [rows, channels] for each tap; else they are walked over in
            pieces [rows, channels, taps].
        taps: Of a whole row, or of a piece.
        aligned: Whether channels can be moved in pieces of 16 bytes.
        spread: Of whole rows, whether the means of positions differ.
        across: Of pieces, whether their rows belong to several groups.
        rows: Of a tile.
        channels: Of a tile.
        rounds: Tiles of whole rows that a block takes one after the other.
        centred: Whether the mean of every row is subtracted from it.
    """

    whole: bool
    taps: int
    aligned: bool
    spread: bool
    across: bool
    rows: int
    channels: int
    rounds: int = 1
    centred: bool = False


def bodies_of(layout: tuple[Rows, ...], orders: list[WeightOrder], backward: bool) -> list[Body]:
    """The tiles of all sites; where there are many, blocks take several in turn."""
    bodies = [body_of(rows, order, backward) for rows, order in zip(layout, orders, strict=True)]
    tiles = sum(rows.outputs // body.rows for rows, body in zip(layout, bodies, strict=True) if body.whole)
    turns = max(1, tiles // AT_ONCE)
    return [replace(body, rounds=min(turns, most_rounds(body, backward))) for body in bodies]


def body_of(rows: Rows, order: WeightOrder, backward: bool) -> Body:
    """The tile for the rows of a site, taken one by one."""
    return replace(_tile_of(rows, order, backward), centred=rows.centred)


def _tile_of(rows: Rows, order: WeightOrder, backward: bool) -> Body:
    whole = _whole(rows, order)
    if whole is not None and not _tiny(rows):
        return whole
    pieces = _pieces(rows, order, backward)
    return pieces if whole is None or pieces.across else whole


def _tiny(rows: Rows) -> bool:
    """Whether rows are few in each of many groups, and short."""
    return 0 < rows.outputs // rows.groups <= FEW_ROWS and rows.groups > 1 and rows.channels <= FEW_CHANNELS


def _whole(rows: Rows, order: WeightOrder) -> Body | None:
    taps, channels = rows.tap_count, _power(rows.channels)
    if not _channels_inside(rows, order) or taps > TAPS_APART or taps * channels > LONGEST or not rows.weights:
        return None
    count = max(OF_A_TAP, TILE * (1 if channels <= WIDE else 4) // _power(taps)) // channels
    count = max(1, min(count if taps == 1 else min(count, MOST_ROWS), _power(rows.outputs // rows.groups)))
    return Body(True, taps, order.aligned, rows.taps.shape[1] > 1, False, count, channels)


def _pieces(rows: Rows, order: WeightOrder, backward: bool) -> Body:
    one_by_one = _channels_inside(rows, order) and rows.channels >= LINE
    taps = 1 if one_by_one else min(TAPS_OF_PIECE, _power(rows.tap_count))
    most = CHANNELS_OF_PIECE[backward] if taps == 1 else PIECE // (2 * taps)
    channels = min(most, _power(rows.channels))
    size = PIECE if taps <= TAPS_APART else PIECE // 2  # sums over many taps take registers of their own
    count, per_group = size // (channels * taps), rows.outputs // rows.groups
    across = _tiny(rows) and not rows.transposed and count >= 2 * per_group
    count = max(1, min(count, _power(rows.outputs if across else per_group)))
    return Body(False, taps, order.aligned, False, across, count, channels)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def most_rounds(body: Body, backward: bool) -> int:
    """Tiles that it makes sense to take in turn."""
    if not body.whole:
        return 1
    if backward:
        return max(1, SUMMED // (body.rows * body.taps))
    return ROUNDS if body.taps == 1 else 1


def rows_of_block(rows: Rows, body: Body) -> int:
    """Rows that a block takes; whole groups of them where it reaches across groups."""
    per_group = rows.outputs // rows.groups
    return body.rows // per_group * per_group if body.across else body.rows * body.rounds


def partials_of(rows: Rows, body: Body) -> int:
    """Partial sums over rows that every channel of a group gets: one from each block, or from each row of a group."""
    per_group = rows.outputs // rows.groups
    return per_group if body.across else -(-per_group // rows_of_block(rows, body))


def warps_of(body: Body) -> int:
    """The warps of a block."""
    long = body.whole and (body.taps * body.channels > SHORT or body.channels > WIDE)
    return WARPS_LONG if long else WARPS


def registers_of(dtype: torch.dtype, warps: int, backward: bool) -> int | None:
    """The most that a thread may have; None for as many as it takes."""
    return None if backward or warps != WARPS or dtype == torch.float64 else REGISTERS
