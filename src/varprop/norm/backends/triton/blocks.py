"""Which block folds which rows: all blocks of all sites in launches, and all that each of them reads."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from ...fold.layout import Rows
from .bodies import Body, WeightOrder, partials_of, registers_of, rows_of_block, warps_of

COLUMNS = 32  # channels whose partial sums a program adds
BODIES_OF_A_LAUNCH = 2  # at most: a kernel of nine takes three times as long to compile as nine kernels


@dataclass(frozen=True)
class Places:
    """Where what belongs to a site begins in the buffers of all sites: shares, covariances, sums of taps, partials."""

    share: int
    covariance: int  # -1 where the means of positions do not differ
    sums: int
    partials: int


@dataclass(frozen=True)
class Launch:
    """One launch: for every block a record of 16 numbers; the weight it belongs to and how far into that it begins."""

    dtype: torch.dtype
    warps: int
    registers: int | None  # of a thread, at most
    bodies: tuple[Body, ...]
    records: Tensor
    weights: Tensor
    starts: Tensor

    def at(self, addresses: Tensor, device: torch.device) -> Launch:
        """The launch for weights at these addresses."""
        records = self.records.cpu().clone()
        records[:, 0] = addresses[self.weights] + self.starts
        return replace(self, records=records.to(device))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """All numbers of all bodies, as a kernel reads them."""
        return tuple(tuple(int(number) for number in astuple(body)) for body in self.bodies)


def places_of(layout: tuple[Rows, ...], bodies: list[Body]) -> tuple[list[Places], int]:
    """The places of all sites with these bodies backward, and the number of all partial sums."""
    share = covariance = sums = partials = 0
    found = []
    for rows, body in zip(layout, bodies, strict=True):
        spreads = rows.taps.shape[1] > 1
        found.append(Places(share, covariance if spreads else -1, sums, partials))
        share += rows.tap_count
        covariance += rows.tap_count**2 if spreads else 0
        sums += rows.outputs * rows.tap_count if spreads else 0
        partials += rows.groups * partials_of(rows, body) * rows.channels
    return found, partials


def launches(
    layout: tuple[Rows, ...], orders: list[WeightOrder], places: list[Places], bodies: list[Body], backward: bool
) -> tuple[Launch, ...]:
    """All blocks by dtype, number of warps and body: pieces first, which take longest, then those with most to do."""
    members: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for index in sorted(range(len(layout)), key=lambda index: (bodies[index].whole, -_work(bodies[index]))):
        if layout[index].outputs:
            members[orders[index].dtype, warps_of(bodies[index])].append(index)
    made = []
    for (dtype, warps), chosen in members.items():
        every = list(dict.fromkeys(bodies[index] for index in chosen))
        for known in (tuple(every[n : n + BODIES_OF_A_LAUNCH]) for n in range(0, len(every), BODIES_OF_A_LAUNCH)):
            parts = [
                _records(index, layout[index], orders[index], places[index], bodies[index], known)
                for index in chosen
                if bodies[index] in known
            ]
            records, size = torch.cat(parts), torch.empty(0, dtype=dtype).element_size()
            registers = registers_of(dtype, warps, backward)
            made.append(Launch(dtype, warps, registers, known, records[:, 1:], records[:, 0], size * records[:, 1]))
    return tuple(made)


def _work(body: Body) -> int:
    return body.taps * body.rows * body.channels * body.rounds


def _records(
    index: int, rows: Rows, order: WeightOrder, places: Places, body: Body, bodies: tuple[Body, ...]
) -> Tensor:
    """For every block of a site: which that is, and the 16 numbers as `tiles.record_of` reads them.

    In the place of the address is the distance from the weight's beginning.
    """
    per_group, step = rows.outputs // rows.groups, rows_of_block(rows, body)
    first, end = _spans(rows, step, body.across)
    group, member = first // per_group, first % per_group
    start = group * order.group + member * order.row
    line = first if body.across else group * partials_of(rows, body) + member // step
    columns = (
        index,
        start,
        rows.first_weight + start,
        rows.first_row + first,
        end - first,
        rows.channels,
        order.row,
        order.channel,
        order.tap,
        rows.tap_count,
        rows.first_channel + group * rows.channels,
        places.share,
        places.covariance,
        places.sums + first * rows.tap_count,
        places.partials + line * rows.channels,
        per_group,
        bodies.index(body),
    )
    return torch.stack([torch.as_tensor(column).expand(len(first)) for column in columns], 1)


def _spans(rows: Rows, step: int, across: bool) -> tuple[Tensor, Tensor]:
    """First row and end of every block of a site, across its groups or not."""
    span = rows.outputs if across else rows.outputs // rows.groups
    groups, starts = torch.arange(0, rows.outputs, span)[:, None], torch.arange(0, span, step)
    return (groups + starts).reshape(-1), (groups + torch.clamp(starts + step, max=span)).reshape(-1)


def columns(layout: tuple[Rows, ...], places: list[Places], bodies: list[Body]) -> Tensor:
    """What every program that adds partial sums reads.

    First column and end of the columns, channels, partial sums of each, first entering channel, first partial sum.
    """
    found = [
        (start, rows.groups * rows.channels, rows.channels, partials_of(rows, body), rows.first_channel, place.partials)
        for rows, place, body in zip(layout, places, bodies, strict=True)
        for start in range(0, rows.groups * rows.channels, COLUMNS)
    ]
    return torch.tensor(found, dtype=torch.int64).reshape(-1, 6)
