"""Parts of a network that are folded one by one, each with the layout of its own layers.

The statistics of a layer depend on its own weight and on the shifts and scales of the layers it reads from, and on no
other weight. So a part needs of the other parts no more than a few vectors, as means and variances of what enters it:
the gradients of its weights are ready as soon as those of its own folded weights are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .fold.layout import Layout, Rows, Step, consecutive, restricted

LIMIT = 25 * 2**20  # bytes of weights in a part: as many as DistributedDataParallel puts in a bucket


def by_bytes(sizes: Iterable[tuple[int, int]], limit: int | None = None) -> list[list[int]]:
    """Places of layers in the order of their calls, cut so that a part has about `limit` bytes.

    It is cut from the end, for there the backward pass begins.

    Args:
        sizes: Place and bytes of every layer, in the order of their calls.
        limit: `LIMIT` by default.
    """
    parts: list[list[int]] = []
    room = 0
    for place, size in reversed(list(sizes)):
        if not parts or size > room:
            parts.append([])
            room = LIMIT if limit is None else limit
        parts[-1].append(place)
        room -= size
    return [sorted(part) for part in reversed(parts)]


class Part(NamedTuple):
    """The layout of some of the sites by themselves, and what of the rest they read.

    Attributes:
        layout: In which the outputs of other sites are no sources but given lanes, before those given already.
        others: Those other sites.
        fixed: Which of the values between layers that are not random are read, by their numbers.
    """

    layout: Layout
    others: list[int]
    fixed: list[int]


def layout_of_part(layout: Layout, places: Sequence[int], fixed: Sequence[int]) -> Part:
    """What some of the sites have to know.

    Args:
        layout: Of all sites.
        places: The sites.
        fixed: How many lanes each value between layers has that is not random; they are the last of the given ones.
    """
    found = restricted(layout, places)
    read = _lanes_read(found)
    others = [n for n, rows in enumerate(layout.rows) if n not in set(places) and bool(read[_outputs(rows)].any())]
    own, outside = (_joined([_outputs(layout.rows[n]) for n in numbers]) for numbers in (places, others))
    lanes = found.channels
    constants, given, computed = torch.arange(lanes.sources, lanes.total).split(
        [len(lanes.constant_mean), lanes.external, sum(step.count for step in lanes.steps)]
    )
    walked, *parameters = given.split([len(given) - sum(fixed), *fixed])
    used = {n: own for n, own in enumerate(parameters) if bool(read[own].any())}
    given = _joined([outside, walked[read[walked]], *used.values()])
    number = _numbers(_joined([own, constants, given, computed]), lanes.total)
    steps = tuple(_renumbered(step, number) for step in lanes.steps)
    kept = replace(lanes, sources=len(own), external=len(given), steps=steps, entering=number[lanes.entering])
    return Part(Layout(kept, consecutive(found.rows)), others, list(used))


def _lanes_read(layout: Layout) -> Tensor:
    read = torch.zeros(layout.channels.total, dtype=torch.bool)
    read[layout.channels.entering] = True
    for step in layout.channels.steps:
        for lanes in step.inputs:
            read[lanes] = True
    return read


def _outputs(rows: Rows) -> Tensor:
    """The lanes of a site's outputs, which are sources."""
    return torch.arange(rows.first_row, rows.first_row + rows.outputs)


def _joined(lanes: list[Tensor]) -> Tensor:
    return torch.cat(lanes) if lanes else torch.arange(0)


def _numbers(order: Tensor, total: int) -> Tensor:
    """For every lane its place in an order that leaves some of them out."""
    number = torch.full((total,), -1)
    number[order] = torch.arange(len(order))
    return number


def _renumbered(step: Step, number: Tensor) -> Step:
    return replace(step, inputs=tuple(number[lanes] for lanes in step.inputs), start=int(number[step.start]))
