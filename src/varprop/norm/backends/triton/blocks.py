"""Which program folds which rows: sites by class of weight, rows in blocks, and where everything lies."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...layout import Rows

CROSS, NARROW, WIDE = range(3)
WARPS = 8
WARPS_BACK = 4  # of backward tiles without taps: more of them fit on a multiprocessor
TILE = 2048  # elements, 8 for each of 256 threads; twice that where they are moved in 16-byte pieces
MOST_TAPS = 64  # of a tile; more are taken in pieces
FEW_ROWS = 16  # of a group: up to here blocks reach across groups
ALIGNED = 8  # elements: 16 bytes in bfloat16
COLUMNS = 32  # channels whose partial sums a program adds


@dataclass(frozen=True)
class Strides:
    """Address of W[group, row of the group, channel, tap] in elements."""

    group: int
    row: int
    channel: int
    tap: int


@dataclass(frozen=True)
class Shapes:
    """Rows and channels of the tiles of the three bodies."""

    cross: tuple[int, int]
    narrow: tuple[int, int]
    wide: tuple[int, int]

    def of(self, body: int) -> tuple[int, int]:
        """The tile of one body."""
        return (self.cross, self.narrow, self.wide)[body]


@dataclass(frozen=True)
class Kind:
    """What one launch has in common.

    Attributes:
        taps: Of a tile.
        inner: Whether the channels lie side by side.
        aligned: Whether they can also be moved in pieces of 16 bytes.
        many: Whether there are more taps than a tile has.
        strided: Whether neither channels nor taps lie side by side, as in a transposed convolution in channels_last.
        dtype: Of the weight.
    """

    taps: int
    inner: bool
    aligned: bool
    many: bool
    strided: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Launch:
    """One launch of a fold or unfold kernel: per block its site, first and last row, and body."""

    kind: Kind
    shapes: Shapes
    blocks: Tensor
    bodies: int
    warps: int = WARPS


@dataclass(frozen=True)
class Site:
    """One row of the site table, in its order."""

    first_row: int
    per_group: int
    channels: int
    taps: int
    group_stride: int
    row_stride: int
    channel_stride: int
    tap_stride: int
    first_channel: int
    first_weight: int
    first_share: int
    first_covariance: int
    first_sum: int
    first_partial: int = 0
    partials: int = 0


def strides_of(rows: Rows, weight: Tensor) -> Strides:
    """How a weight lies in memory.

    Raises:
        ValueError: If it is no dense block, or its taps do not lie at one distance from each other.
    """
    tap = _tap_stride(weight)
    per_group = rows.outputs // rows.groups
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
        return Strides(rows.channels * outer, inner, outer, tap)
    return Strides(per_group * outer, outer, inner, tap)


def _tap_stride(weight: Tensor) -> int | None:
    """The distance of neighbouring taps, if it is the same for all; 1 where there is one tap."""
    axes = [(size, stride) for size, stride in zip(weight.shape[2:], weight.stride()[2:], strict=True) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(axes):
        if outer != size * inner:
            return None
    return axes[-1][1] if axes else 1


def kind_of(rows: Rows, strides: Strides, weight: Tensor, backward: bool) -> Kind:
    """The launch a site belongs to."""
    inner = (strides.channel == 1 or rows.channels == 1) and (strides.tap != 1 or rows.tap_count == 1)
    # backward, where channels lie side by side, taps are taken one by one: no place of a tile is empty, and no sum
    # over taps crosses from thread to thread (forward that would mean one sum over channels for every tap)
    taps = 1 if inner and backward else min(MOST_TAPS, 1 << (rows.tap_count - 1).bit_length())
    steps = (rows.channels, strides.row, strides.group, rows.first_weight, strides.tap if rows.tap_count > 1 else 0)
    aligned = inner and all(step % ALIGNED == 0 for step in steps) and weight.data_ptr() % 16 == 0
    return Kind(taps, inner, aligned, rows.tap_count > taps, not inner and strides.tap != 1, weight.dtype)


def shapes_of(taps: int, backward: bool) -> Shapes:
    """Tiles for so many taps.

    Forward, a wide tile holds long rows whole; backward it has more rows, since every block leaves two numbers for each
    channel that are written and read again: 16 rows times taps make that a tenth of the traffic.
    """
    if taps == 1:
        return Shapes((64, 32), (32, 64), (16, 128) if backward else (4, 512))
    wide = min(128, TILE // (2 * taps))
    return Shapes((max(1, TILE // (4 * taps)), 4), (max(1, TILE // (16 * taps)), 16), (TILE // (wide * taps), wide))


def body_of(rows: Rows, shapes: Shapes) -> int:
    """The body that suits a site."""
    if rows.outputs // rows.groups <= FEW_ROWS and rows.groups > 1 and rows.channels <= shapes.cross[1]:
        return CROSS
    return NARROW if rows.channels <= shapes.narrow[1] else WIDE


def site_of(rows: Rows, strides: Strides, first_share: int, first_covariance: int, first_sum: int) -> Site:
    """The site's row of the table, still without partial sums."""
    return Site(
        rows.first_row,
        rows.outputs // rows.groups,
        rows.channels,
        rows.tap_count,
        strides.group,
        strides.row,
        strides.channel,
        strides.tap,
        rows.first_channel,
        rows.first_weight,
        first_share,
        first_covariance,
        first_sum,
    )


def launches(layout: tuple[Rows, ...], kinds: list[Kind], chosen: list[int], backward: bool) -> list[Launch]:
    """All blocks of the chosen sites by kind, those of the longest rows first."""
    sites: dict[Kind, list[int]] = defaultdict(list)
    for index in chosen:
        sites[kinds[index]].append(index)
    result = []
    for kind, members in sites.items():
        shapes = shapes_of(kind.taps, backward)
        members.sort(key=lambda index: -layout[index].channels * layout[index].tap_count)
        table = torch.cat([_blocks(index, layout[index], shapes) for index in members])
        bodies = sum(1 << body for body in set(table[:, 3].tolist()))
        if len(table):
            result.append(Launch(kind, shapes, table, bodies, WARPS_BACK if backward and kind.taps == 1 else WARPS))
    return result


def blocks_of(index: int, rows: Rows, step: int, body: int, across: bool) -> Tensor:
    """Site, first row, end of rows and body of every block of `step` rows of a site, across its groups or not."""
    span = rows.outputs if across else rows.outputs // rows.groups
    groups = torch.arange(0, rows.outputs, max(1, span))
    starts = torch.arange(0, span, step)
    first = (groups[:, None] + starts).reshape(-1)
    end = (groups[:, None] + torch.clamp(starts + step, max=span)).reshape(-1)
    return torch.stack([torch.full_like(first, index), first, end, torch.full_like(first, body)], 1)


def _blocks(index: int, rows: Rows, shapes: Shapes) -> Tensor:
    body = body_of(rows, shapes)
    return blocks_of(index, rows, shapes.of(body)[0], body, body == CROSS)


def partials_of(rows: Rows, kind: Kind) -> int:
    """Blocks that leave partial sums over rows, in every group; every row does where blocks reach across groups."""
    shapes = shapes_of(kind.taps, backward=True)
    body, per_group = body_of(rows, shapes), rows.outputs // rows.groups
    return per_group if body == CROSS else -(-per_group // shapes.of(body)[0])


def with_partials(sites: list[Site], layout: tuple[Rows, ...], counts: list[int]) -> tuple[list[Site], int]:
    """The site table with places for so many partial sums over rows in each group, and their total."""
    place, result = 0, []
    for site, rows, count in zip(sites, layout, counts, strict=True):
        result.append(replace(site, first_partial=place, partials=count))
        place += rows.groups * count * rows.channels
    return result, place


def columns(layout: tuple[Rows, ...]) -> Tensor:
    """Site, first column and end of the columns of every program that adds partial sums."""
    rows = [
        (index, start, site.groups * site.channels)
        for index, site in enumerate(layout)
        for start in range(0, site.groups * site.channels, COLUMNS)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
