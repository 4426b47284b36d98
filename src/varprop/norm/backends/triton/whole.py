"""Rows that fit whole into the registers of a block: which, in tiles of what shape, and all that their blocks read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from ...layout import Rows
from .blocks import FEW_ROWS, Kind, Site, blocks_of

WARPS, WARPS_LONG = 4, 16  # of a block: several blocks on a multiprocessor wait for memory in turns
REGISTERS = 128  # of a thread forward, at most: four blocks of four warps then fit on a multiprocessor
TILE = 2048  # elements of a tile, 16 for each of 128 threads
MOST_ROWS = 16  # of a tile with several taps, where every row keeps a number for each
OF_A_TAP = 512  # at least, where every tap has a tile of its own: 16 bytes for each thread
# Elements of a row: beyond the first it takes more warps, beyond the second it does not fit.
BY_TAPS = 5120, 10240
ACROSS_TAPS = 1024, 4096  # where taps lie side by side every element needs an address of its own
WIDE = 2048  # channels: beyond, too few rows would share what is known of them
TAPS_APART = 16  # at most, since they are written out one by one; a power of two
TAPS_TOGETHER = 16, 64  # of a tile: beyond the first it takes more warps forward, beyond the second it does not fit
LEAST_CHANNELS = 16  # of a tile that has its taps side by side
AT_ONCE = 1024  # tiles, about twice what a large GPU has at a time: fewer are taken by a block each
SUMMED = 32  # weights whose sum leaves a block as one number, at most: it is written and read again
ROUNDS = 8  # tiles of rows of one tap that a block folds in turn, at most, the next ones on their way
CROSS_CHANNELS = 32  # of groups of few rows: blocks reach across groups there, which these kernels do not


@dataclass(frozen=True)
class Body:
    """The tile of some blocks, in the order in which kernels read it.

    Attributes:
        inner: Whether there is a tile for each tap, where channels lie side by side; else one for all.
        taps: Of a row; where taps lie side by side, the next power of two.
        aligned: Whether channels can be moved in pieces of 16 bytes.
        spread: With a tile for each tap, whether the means of positions differ.
        strided: With one tile for all taps, whether these lie apart.
        rows: Of a tile.
        channels: Of a tile.
        rounds: Tiles that a block takes one after the other.
    """

    inner: bool
    taps: int
    aligned: bool
    spread: bool
    strided: bool
    rows: int
    channels: int
    rounds: int


@dataclass(frozen=True)
class WholeLaunch:
    """One launch: for every block a record of 16 numbers; the weight it belongs to and how far into that it begins."""

    dtype: torch.dtype
    warps: int
    registers: int | None  # of a thread, at most
    bodies: tuple[Body, ...]
    records: Tensor
    weights: Tensor
    starts: Tensor

    def at(self, addresses: Tensor, device: torch.device) -> WholeLaunch:
        """The launch for weights at these addresses."""
        records = self.records.cpu().clone()
        records[:, 0] = addresses[self.weights] + self.starts
        return replace(self, records=records.to(device))


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def body_of(rows: Rows, kind: Kind) -> Body | None:
    """The tile for the rows of a site; None where they do not fit, or are many tiny ones in many groups."""
    per_group = rows.outputs // rows.groups
    tiny = per_group <= FEW_ROWS and rows.groups > 1 and rows.channels <= CROSS_CHANNELS
    if not rows.weights or tiny:
        return None
    by_taps = kind.inner and rows.tap_count <= TAPS_APART
    body = _by_taps(rows, kind) if by_taps else _across_taps(rows, kind)
    fits = body.taps <= TAPS_TOGETHER[1] and body.taps * body.channels <= _limits(body)[1]
    return body if fits else None


def bodies_of(layout: tuple[Rows, ...], kinds: list[Kind], backward: bool) -> dict[int, Body]:
    """The tiles of all sites that have one; where there are many, blocks take several in turn."""
    found = {index: body_of(rows, kinds[index]) for index, rows in enumerate(layout)}
    bodies = {index: body for index, body in found.items() if body is not None}
    turns = max(1, sum(layout[index].outputs // body.rows for index, body in bodies.items()) // AT_ONCE)
    most = {index: most_rounds(body, layout[index], backward) for index, body in bodies.items()}
    return {index: replace(body, rounds=min(turns, most[index])) for index, body in bodies.items()}


def most_rounds(body: Body, rows: Rows, backward: bool) -> int:
    """Tiles that it makes sense to take in turn."""
    if backward:
        return max(1, SUMMED // (body.rows * rows.tap_count))
    return ROUNDS if body.inner and body.taps == 1 else 1


def _by_taps(rows: Rows, kind: Kind) -> Body:
    taps, channels = rows.tap_count, _power(rows.channels)
    count = max(OF_A_TAP, TILE * (1 if channels <= WIDE else 4) // _power(taps)) // channels
    count = _at_most(count if taps == 1 else min(count, MOST_ROWS), rows)
    return Body(True, taps, kind.aligned, rows.taps.shape[1] > 1, False, count, channels, 1)


def _across_taps(rows: Rows, kind: Kind) -> Body:
    taps, channels = _power(rows.tap_count), max(LEAST_CHANNELS, _power(rows.channels))
    # between taps there are products of all with all, in a tile of their own
    count = _at_most(min(TILE // (taps * channels), TILE // taps**2) // 4, rows)
    return Body(False, taps, False, False, kind.strided or kind.inner, count, channels, 1)


def _at_most(count: int, rows: Rows) -> int:
    return max(1, min(count, _power(rows.outputs // rows.groups)))


def warps_of(body: Body, backward: bool) -> int:
    """The warps of a block."""
    short = body.taps * body.channels <= _limits(body)[0] and body.channels <= WIDE
    few_taps = backward or body.taps <= TAPS_TOGETHER[0]  # forward every tap meets every other
    return WARPS if short and few_taps else WARPS_LONG


def _limits(body: Body) -> tuple[int, int]:
    return BY_TAPS if body.inner else ACROSS_TAPS


def launches(
    layout: tuple[Rows, ...], kinds: list[Kind], sites: list[Site], bodies: dict[int, Body], backward: bool
) -> list[WholeLaunch]:
    """All blocks of the sites that have a body, by dtype and number of warps, those with most to do first."""
    members: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for index in sorted(bodies, key=lambda index: -_work(bodies[index])):
        members[kinds[index].dtype, warps_of(bodies[index], backward)].append(index)
    made = []
    for (dtype, warps), chosen in members.items():
        known = tuple(dict.fromkeys(bodies[index] for index in chosen))
        parts = [_records(index, layout[index], sites[index], bodies[index], known) for index in chosen]
        records, size = torch.cat(parts), torch.empty(0, dtype=dtype).element_size()
        registers = registers_of(dtype, warps, backward)
        made.append(WholeLaunch(dtype, warps, registers, known, records[:, 1:], records[:, 0], size * records[:, 1]))
    return made


def registers_of(dtype: torch.dtype, warps: int, backward: bool) -> int | None:
    """The most that a thread may have; None for as many as it takes."""
    return None if backward or warps != WARPS or dtype == torch.float64 else REGISTERS


def _work(body: Body) -> int:
    return body.taps * body.rows * body.channels * body.rounds


def _records(index: int, rows: Rows, site: Site, body: Body, bodies: tuple[Body, ...]) -> Tensor:
    """For every block of a site: which that is, and the 16 numbers as `tiles.record_of` reads them.

    In the place of the address is the distance from the weight's beginning.
    """
    span = body.rows * body.rounds
    blocks = blocks_of(index, rows, span, 0, False)
    first, end = blocks[:, 1], blocks[:, 2]
    group = first // site.per_group
    start = group * site.group_stride + (first - group * site.per_group) * site.row_stride
    line = group * site.partials + (first - group * site.per_group) // span
    columns = (
        blocks[:, 0],
        start,
        site.first_weight + start,
        site.first_row + first,
        end - first,
        site.channels,
        site.row_stride,
        site.channel_stride,
        site.tap_stride,
        site.taps,
        site.first_channel + group * site.channels,
        site.first_share,
        site.first_covariance,
        site.first_sum + first * site.taps,
        site.first_partial + line * site.channels,
        0,
        bodies.index(body),
    )
    return torch.stack([torch.as_tensor(column).expand(len(blocks)) for column in columns], 1)


def shapes(bodies: tuple[Body, ...]) -> tuple[int, ...]:
    """All numbers of all bodies, as a kernel reads them."""
    return tuple(int(number) for body in bodies for number in astuple(body))


def partials_of(rows: Rows, body: Body) -> int:
    """Blocks that leave sums, in every group."""
    return -(-(rows.outputs // rows.groups) // (body.rows * body.rounds))
