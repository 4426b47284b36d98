"""Rows that fit whole into a tile: which, in tiles of what shape, and how many tiles a block takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layout import Rows
from .blocks import FEW_ROWS, MOST_TAPS, Kind, blocks_of

LARGEST = 8192  # elements of a tile
TILE = 4096  # elements, where rows are shorter than that; larger ones are launched apart, with more threads
LEAST_CHANNELS = 16
SUMMED = 16  # weights whose sum leaves a block as one number, at least: it is written and read again
WARPS, WARPS_LARGE = 8, 16  # 16 elements for each thread: enough loads in flight, and room for several blocks
CROSS_CHANNELS = 32  # of groups of few rows: blocks reach across groups there, which these kernels do not


@dataclass(frozen=True)
class Tile:
    """Rows and channels of a tile, and how many of them a block takes one after the other in the backward."""

    rows: int
    channels: int
    rounds: int


@dataclass(frozen=True)
class WholeLaunch:
    """One launch for rows of one kind: per block its site, first and last row, and tile."""

    kind: Kind
    tiles: tuple[Tile, ...]
    blocks: Tensor
    warps: int


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def tile_of(rows: Rows) -> Tile | None:
    """The tile for the rows of a site; None where they do not fit, or are many tiny ones in many groups."""
    taps, channels = _power(rows.tap_count), max(LEAST_CHANNELS, _power(rows.channels))
    per_group = rows.outputs // rows.groups
    tiny = per_group <= FEW_ROWS and rows.groups > 1 and rows.channels <= CROSS_CHANNELS
    if not rows.weights or taps > MOST_TAPS or taps * channels > LARGEST or tiny:
        return None
    # between taps there are products of all with all, in a tile of their own
    count = max(1, min(TILE // (taps * channels), LARGEST // taps**2, _power(per_group)))
    return Tile(count, channels, -(-SUMMED // (count * rows.tap_count)))


def launches(layout: tuple[Rows, ...], kinds: list[Kind], tiles: dict[int, Tile], backward: bool) -> list[WholeLaunch]:
    """All blocks of the sites that have a tile, by kind, those of the longest rows first."""
    sites: dict[tuple[Kind, int], list[tuple[int, Tile]]] = defaultdict(list)
    for index, tile in tiles.items():
        kind = replace(kinds[index], taps=_power(layout[index].tap_count), many=False)
        sites[kind, warps_of(kind, tile)].append((index, tile))
    return [_launch(layout, *key, members, backward) for key, members in sites.items()]


def warps_of(kind: Kind, tile: Tile) -> int:
    """The warps of a block; where taps are the last axis, many warps leave too few registers."""
    return WARPS_LARGE if kind.inner and tile.rows * tile.channels * kind.taps > TILE else WARPS


def _launch(
    layout: tuple[Rows, ...], kind: Kind, warps: int, members: list[tuple[int, Tile]], backward: bool
) -> WholeLaunch:
    members = sorted(members, key=lambda member: -layout[member[0]].channels * layout[member[0]].tap_count)
    tiles = tuple(dict.fromkeys(tile for _, tile in members))
    blocks = [
        blocks_of(index, layout[index], tile.rows * (tile.rounds if backward else 1), tiles.index(tile), False)
        for index, tile in members
    ]
    return WholeLaunch(kind, tiles, torch.cat(blocks), warps)


def partials_of(rows: Rows, tile: Tile) -> int:
    """Blocks that leave sums, in every group."""
    return -(-(rows.outputs // rows.groups) // (tile.rows * tile.rounds))
