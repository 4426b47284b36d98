"""The tables of the moment pass on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ....gaussian.normal import gauss_legendre
from ...fold.layout import Lanes
from .components import BLOCK, BLOCK_INTEGRATED, ComponentBlock, Template, integrated, programs, templates
from .opcodes import BENDS, OPERATIONS, PANELS

_FAR = 1e30  # beyond any window of the quadrature
# Entries that a program adds at a time, in all and of one lane at most; lanes at least.
_GATHERED, _MOST_ENTRIES, _LEAST_LANES = 512, 8, 128


@dataclass(frozen=True)
class LaneTables:
    """What the kernels `moments.forward` and `moments.backward` read; indices are int32.

    Attributes:
        programs: Per program begin and end of its operations, first component and end of its components, begin and
            end of its entries, begin and end of the lanes it owns, most entries of one of them.
        operations: Per operation its code and the place of its row in `first`, `second` and `output`.
        numbers: Per operation its eight numbers.
        first: Per operation and component the lane of the first argument; `second` and `output` likewise.
        entry: Places among the entering lanes, sorted by program and lane.
        entry_lane: The lane that enters there.
        owned: Lanes that receive a gradient, by program.
        owned_span: Begin and end of the entries of each.
        nodes: Nodes and weights of two halves of [-1, 1].
        knots: Per operation code the ends of its panels.
        constant_mean: Of the constants; `constant_var` likewise.
        codes: A bit for every operation code that occurs.
        block: Components of a program.
        gathered: How many lanes, and entries of each, a program adds the gradients of at a time.
        computed: Number of computed lanes.
    """

    programs: Tensor
    operations: Tensor
    numbers: Tensor
    first: Tensor
    second: Tensor
    output: Tensor
    entry: Tensor
    entry_lane: Tensor
    owned: Tensor
    owned_span: Tensor
    nodes: Tensor
    knots: Tensor
    constant_mean: Tensor
    constant_var: Tensor
    codes: int
    block: int
    gathered: tuple[int, int]
    computed: int


def build(lanes: Lanes, device: torch.device) -> LaneTables:
    """The tables of a moment pass."""
    block = BLOCK_INTEGRATED if integrated(lanes) else BLOCK
    parts = templates(lanes)
    blocks = programs(parts, block)
    tables, begins = _operation_tables(parts)
    rows, entry, entry_lane, owned, owned_span = _lane_tables(lanes, parts, blocks, begins)

    def index(values: Tensor | Sequence[object]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    operations, numbers, first, second, output = tables
    return LaneTables(
        programs=index(rows),
        operations=index(operations),
        numbers=numbers.to(device),
        first=index(first),
        second=index(second),
        output=index(output),
        entry=index(entry),
        entry_lane=index(entry_lane),
        owned=index(owned),
        owned_span=index(owned_span),
        nodes=_nodes().to(device),
        knots=_knots().to(device),
        constant_mean=lanes.constant_mean.to(device, torch.float64),
        constant_var=lanes.constant_var.to(device, torch.float64),
        codes=sum(1 << code for code in {x.code for part in parts for x in part.instructions}),
        block=block,
        gathered=_gathered(max((row[-1] for row in rows), default=1)),
        computed=sum(step.count for step in lanes.steps),
    )


def _gathered(most: int) -> tuple[int, int]:
    """Few entries a lane leave room for many lanes: every round of a program waits for memory three times."""
    entries = min(_MOST_ENTRIES, 1 << max(0, most - 1).bit_length())
    return max(_LEAST_LANES, _GATHERED // entries), entries


def _operation_tables(parts: list[Template]) -> tuple[list[Tensor], list[int]]:
    """Operations, numbers and the three tables of lanes, all templates together; and where each template begins."""
    operations: list[tuple[int, int]] = []
    numbers, begins, place = [], [], 0
    for part in parts:
        begins.append(len(operations))
        for instruction in part.instructions:
            operations.append((instruction.code, place))
            numbers.append(instruction.numbers)
            place += len(part.members)
    lanes = [torch.cat([getattr(p, name).reshape(-1) for p in parts]) for name in ("first", "second", "output")]
    return [
        torch.tensor(operations, dtype=torch.int64).reshape(-1, 2),
        torch.tensor(numbers, dtype=torch.float64).reshape(-1, 8),
        *lanes,
    ], begins


def _lane_tables(
    lanes: Lanes, parts: list[Template], blocks: list[ComponentBlock], begins: list[int]
) -> tuple[list[tuple[int, ...]], Tensor, Tensor, Tensor, Tensor]:
    """The program table, the entries in the order of programs and lanes, and the owned lanes with their entries."""
    order = torch.cat([block.lanes for block in blocks])  # every lane once
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    entering = lanes.entering.cpu()
    entry = torch.argsort(rank[entering], stable=True)
    ends = torch.bincount(rank[entering], minlength=len(order)).cumsum(0)
    constant = (order >= lanes.sources) & (order < lanes.sources + len(lanes.constant_mean))
    kept = ~constant
    begin_of = torch.cat([ends.new_zeros(1), ends])
    rows: list[tuple[int, ...]] = []
    slot, own = 0, 0
    for block in blocks:
        span = slice(slot, slot + len(block.lanes))
        mine = int(kept[span].sum())
        counts = (begin_of[1:] - begin_of[:-1])[span][kept[span]]
        begin, length = begins[block.template], len(parts[block.template].instructions)
        end = block.first_component + block.components
        entries = int(begin_of[span.start]), int(begin_of[span.stop])
        most = int(counts.max()) if mine else 0
        rows.append((begin, begin + length, block.first_component, end, *entries, own, own + mine, most))
        slot, own = span.stop, own + mine
    owned = order[kept]
    # Constants lie between the owned lanes of the programs without operations: a lane's entries need both bounds.
    return rows, entry, entering[entry], owned, torch.stack([begin_of[:-1][kept], begin_of[1:][kept]], 1)


def _nodes() -> Tensor:
    """Nodes and weights of the two halves of [-1, 1]."""
    x, w = (torch.tensor(values, dtype=torch.float64) for values in gauss_legendre(16))
    return torch.cat([0.5 * x - 0.5, 0.5 * x + 0.5, 0.5 * w, 0.5 * w])


def _knots() -> Tensor:
    table = torch.full((OPERATIONS, PANELS + 1), _FAR, dtype=torch.float64)
    table[:, 0] = -_FAR
    for code, knots in BENDS.items():
        table[code, 1 : len(knots) + 1] = torch.tensor(knots, dtype=torch.float64)
    return table
