"""The row pass by kernels: how blocks take rows, their tables on the device, and the launches.

A block takes rows of one layer, whole in registers or in pieces, in tiles of a shape (`Body`). The blocks of all layers
are put together in few launches, and read what they need from one record each.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from ...fold.layout import Layout, Rows
from ..torch import SavedSizes
from . import row_kernels
from .device import allocated_to_stay, capturing, flat, on_device, refuse_capture
from .row_kernels import TAPS_APART, TILE

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
STATISTICS = 3  # numbers saved of every row: mean, variance, and the distance of its weights' mean from the first
PARTIALS = 64  # rows of partial sums added at a time
WARPS, WARPS_LONG = 4, 16  # of a block: several blocks on a multiprocessor wait for memory in turns
REGISTERS = 128  # of a thread forward, at most: four blocks of four warps then fit on a multiprocessor
ALIGNED = 8  # elements: 16 bytes in bfloat16
MOST_ROWS = 16  # of a whole tile with several taps, where every row keeps a number for each
OF_A_TAP = 512  # at least, where every tap has a tile of its own: 16 bytes for each thread
SHORT, LONGEST = 5120, 10240  # elements of a whole row: beyond the first it takes more warps, beyond the second pieces
WIDE = 2048  # channels: beyond, too few rows would share what is known of them
AT_ONCE = 1024  # tiles, about twice what a large GPU has at a time: fewer are taken by a block each
SUMMED = 32  # weights whose sum leaves a block as one number, at most: it is written and read again
ROUNDS = 8  # tiles of rows of one tap that a block folds in turn, at most, the next ones on their way
FEW_ROWS, FEW_CHANNELS = 16, 32  # of a group: up to here blocks reach across groups
PIECE = 1024  # elements of a piece: with more it would take more registers than whole rows in the same launch
TAPS_OF_PIECE = 64  # at most
CHANNELS_OF_PIECE = 512, 64  # at most, there and back, where every block leaves two numbers for each channel
LINE = 64  # channels side by side that make it worth while to take taps one by one
COLUMNS = 32  # channels whose partial sums a program adds
BODIES_OF_A_LAUNCH = 2  # at most: a kernel of nine takes three times as long to compile as nine kernels


class TritonRows:
    """The row pass for float32 statistics, of weights that are contiguous or channels_last.

    Tables are built for the memory layouts of the weights, again when one comes with another dtype, memory layout or
    alignment; addresses are copied when a weight has moved.
    """

    replayable = True

    def __init__(self, layout: Layout, device: torch.device) -> None:
        refuse_capture("built")
        self.layout, self.device = layout, device
        self.share, self.covariance = allocated_to_stay(device, lambda: _tap_tables(layout, device))
        self.sums = _sums_of_taps(layout)
        self._tables: dict[tuple[WeightOrder, ...], RowTables] = {}
        self._current: tuple[object, RowTables] | None = None  # addresses, dtypes and strides, and their tables
        self._captured: dict[object, RowTables] = {}

    def tables(self, weights: Sequence[Tensor]) -> RowTables:
        """The tables for these weights, with their present addresses."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        key = addresses, tuple((weight.dtype, weight.stride()) for weight in weights)
        if self._current is not None and self._current[0] == key:
            if capturing():  # the graph reads these addresses as long as it lives
                self._captured[key] = self._current[1]
            return self._current[1]
        refuse_capture("renewed (a weight has moved or changed its layout)")
        orders = tuple(order_in_memory(rows, weight) for rows, weight in zip(self.layout.rows, weights, strict=True))
        if orders not in self._tables:
            self._tables[orders] = allocated_to_stay(
                self.device, lambda: _build_tables(self.layout.rows, list(orders), self.device)
            )
        built, where = self._tables[orders], torch.tensor(addresses, dtype=torch.int64)
        tables = allocated_to_stay(self.device, lambda: built.at(where, self.device))
        self._current = key, tables
        return tables

    def forward(
        self, weights: Sequence[Tensor], shift_scale: Tensor, entering: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """See `RowPass`."""
        t, layout = self.tables(weights), self.layout
        folded = torch.empty(layout.weight_count, dtype=dtype, device=self.device)
        bias = torch.empty(layout.row_count, dtype=dtype, device=self.device)
        statistics = torch.empty(STATISTICS, layout.row_count, dtype=t.work, device=self.device)
        sums = torch.empty(self.sums, dtype=t.work, device=self.device)
        spread = torch.empty_like(sums)
        shift, scale = shift_scale.unbind(0)
        inputs = [flat(x) for x in (scale, shift, *entering.unbind(0))]
        with on_device(self.device):
            for launch in t.forward:
                row_kernels.forward[(len(launch.records),)](
                    launch.records, self.share, self.covariance, *inputs, folded, bias, *statistics, sums, spread,
                    **launch.constants,
                )  # fmt: skip
        return folded, bias, [statistics.view(-1), spread]

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        saved: Sequence[Tensor],
        entering: Tensor,
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowPass`."""
        t, layout = self.tables(weights), self.layout
        common = functools.reduce(torch.promote_types, (weight.dtype for weight in weights))
        by_weight = torch.empty(layout.weight_count, dtype=common, device=self.device)
        by_scale = torch.empty(layout.row_count, dtype=torch.float32, device=self.device)
        by_entering = torch.empty(2, len(layout.channels.entering), dtype=torch.float32, device=self.device)
        partial = torch.empty(2, t.partials, dtype=t.work, device=self.device)
        statistics, spread = saved
        arguments = (
            self.share, flat(shift_scale[1]), flat(entering[0]), flat(entering[1]), *statistics.view(STATISTICS, -1),
            spread, flat(grad_weight), flat(grad_bias), by_weight, by_scale, partial[0], partial[1],
        )  # fmt: skip
        with on_device(self.device):
            for launch in t.backward:
                row_kernels.backward[(len(launch.records),)](launch.records, *arguments, **launch.constants)
            if len(t.columns):
                row_kernels.add_partials[(len(t.columns),)](
                    t.columns, partial[0], partial[1], by_entering[0], by_entering[1],
                    ROWS=PARTIALS, COLUMNS=COLUMNS, num_warps=4,
                )  # fmt: skip
        return by_weight, by_scale, by_entering


def rows_saved(layout: Layout) -> SavedSizes:
    """Length and dtype of what `TritonRows.forward` saves, for weights of any dtype but float64."""
    return [(STATISTICS * layout.row_count, torch.float32), (_sums_of_taps(layout), torch.float32)]


def fits(layout: Layout, weights: Sequence[Tensor]) -> bool:
    """True if the kernels can fold all layers: called once, with dense weights whose taps are at equal distances."""
    if any(rows.calls > 1 for rows in layout.rows):
        return False
    try:
        for rows, weight in zip(layout.rows, weights, strict=True):
            order_of(rows, weight)
    except ValueError:
        return False
    return True


def _sums_of_taps(layout: Layout) -> int:
    """How many sums over channels are saved: one for every row and tap where means differ by position."""
    return sum(rows.outputs * rows.tap_count for rows in layout.rows if rows.taps.shape[1] > 1)


# --- how blocks take rows ---


@dataclass(frozen=True)
class WeightOrder:
    """The memory layout of a weight: strides of W[group, row of the group, channel, tap], in elements."""

    group: int
    row: int
    channel: int
    tap: int
    aligned: bool  # channels lie side by side and can be moved in pieces of 16 bytes
    dtype: torch.dtype


def order_of(rows: Rows, weight: Tensor) -> WeightOrder:
    """The memory layout of a weight, from its strides alone: it may be one without data.

    Raises a ValueError if it has gaps, or its taps are not at equal distances.
    """
    tap = _tap_stride(weight)
    outer, inner = weight.stride(0), weight.stride(1) if weight.dim() > 1 else 1
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    if weight.numel() >= 1 << 31:
        raise ValueError(f"A weight of {weight.numel()} elements is too large for the kernels, which count in 32 bits.")
    if tap is None or (weight.numel() and last + 1 != weight.numel()) or weight.numel() != rows.weights:
        raise ValueError(
            f"A weight of shape {tuple(weight.shape)} and strides {weight.stride()} is not laid out in one of the "
            "orders that the kernels read: call .contiguous() on it, or use torch.channels_last."
        )
    if rows.transposed:
        group, row, channel = rows.channels * outer, inner, outer
    else:
        group, row, channel = rows.outputs // rows.groups * outer, outer, inner
    result = WeightOrder(group, row, channel, tap, False, weight.dtype)
    steps = (rows.channels, row, group, rows.first_weight, tap if rows.tap_count > 1 else 0)
    return replace(result, aligned=_channels_inside(rows, result) and all(step % ALIGNED == 0 for step in steps))


def order_in_memory(rows: Rows, weight: Tensor) -> WeightOrder:
    """The memory layout of a weight that has an address: its first element may not be aligned."""
    result = order_of(rows, weight)
    return replace(result, aligned=result.aligned and weight.data_ptr() % 16 == 0)


def _tap_stride(weight: Tensor) -> int | None:
    """The distance of neighbouring taps, if it is the same for all; 1 where there is one tap."""
    axes = [(size, stride) for size, stride in zip(weight.shape[2:], weight.stride()[2:], strict=True) if size > 1]
    for (_, outer), (size, inner) in itertools.pairwise(axes):
        if outer != size * inner:
            return None
    return axes[-1][1] if axes else 1


def _channels_inside(rows: Rows, order: WeightOrder) -> bool:
    """True if channels lie side by side, and taps do not."""
    return (order.channel == 1 or rows.channels == 1) and (order.tap != 1 or rows.tap_count == 1)


@dataclass(frozen=True)
class Body:
    """The tile of some blocks, in the order in which kernels read it."""

    # whether rows stay in registers, with a tile [rows, channels] for each tap; else they are read in pieces
    # [rows, channels, taps]
    in_registers: bool
    taps: int  # of a whole row, or of a piece
    aligned: bool  # whether channels can be moved in pieces of 16 bytes
    spread: bool  # of whole rows, whether the means of positions differ
    across: bool  # of pieces, whether their rows belong to several groups
    rows: int  # of a tile
    channels: int  # of a tile
    rounds: int = 1  # tiles of whole rows that a block takes one after the other
    centred: bool = False  # whether the mean of every row is subtracted from it


def bodies_of(layout: tuple[Rows, ...], orders: list[WeightOrder], backward: bool) -> list[Body]:
    """The tiles of all layers; where there are many, blocks take several in turn."""
    bodies = [body_of(rows, order, backward) for rows, order in zip(layout, orders, strict=True)]
    tiles = sum(rows.outputs // body.rows for rows, body in zip(layout, bodies, strict=True) if body.in_registers)
    turns = max(1, tiles // AT_ONCE)
    return [replace(body, rounds=min(turns, most_rounds(body, backward))) for body in bodies]


def body_of(rows: Rows, order: WeightOrder, backward: bool) -> Body:
    """The tile for the rows of a layer, taken one by one."""
    body = _registers_body(rows, order)
    if body is None or _tiny(rows):
        pieces = _pieces(rows, order, backward)
        body = pieces if body is None or pieces.across else body
    return replace(body, centred=rows.centred)


def _tiny(rows: Rows) -> bool:
    """True if rows are few in each of many groups, and short."""
    return 0 < rows.outputs // rows.groups <= FEW_ROWS and rows.groups > 1 and rows.channels <= FEW_CHANNELS


def _registers_body(rows: Rows, order: WeightOrder) -> Body | None:
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
    if not body.in_registers:
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
    long = body.in_registers and (body.taps * body.channels > SHORT or body.channels > WIDE)
    return WARPS_LONG if long else WARPS


def registers_of(dtype: torch.dtype, warps: int, backward: bool) -> int | None:
    """The most that a thread may have; None for as many as it takes."""
    return None if backward or warps != WARPS or dtype == torch.float64 else REGISTERS


# --- tables ---


@dataclass(frozen=True)
class Offsets:
    """Where the numbers of a layer begin in the buffers of all layers: shares, covariances, sums of taps, partials."""

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

    @functools.cached_property
    def constants(self) -> dict[str, object]:
        """The constants that are compiled into the kernel."""
        work = tl.float64 if self.dtype == torch.float64 else tl.float32
        constants = {"WEIGHT": _TYPES[self.dtype], "ACC": work, "BODIES": self.shapes, "num_warps": self.warps}
        return constants if self.registers is None else {**constants, "maxnreg": self.registers}


def offsets_of(layout: tuple[Rows, ...], bodies: list[Body]) -> tuple[list[Offsets], int]:
    """The offsets of all layers with these bodies backward, and the number of all partial sums."""
    share = covariance = sums = partials = 0
    result = []
    for rows, body in zip(layout, bodies, strict=True):
        spreads = rows.taps.shape[1] > 1
        result.append(Offsets(share, covariance if spreads else -1, sums, partials))
        share += rows.tap_count
        covariance += rows.tap_count**2 if spreads else 0
        sums += rows.outputs * rows.tap_count if spreads else 0
        partials += rows.groups * partials_of(rows, body) * rows.channels
    return result, partials


def launches_of(
    layout: tuple[Rows, ...], orders: list[WeightOrder], offsets: list[Offsets], bodies: list[Body], backward: bool
) -> tuple[Launch, ...]:
    """All blocks by dtype, number of warps and body: pieces first, which take longest, then those with most to do."""
    members: dict[tuple[torch.dtype, int], list[int]] = defaultdict(list)
    for index in sorted(range(len(layout)), key=lambda index: (bodies[index].in_registers, -_work(bodies[index]))):
        if layout[index].outputs:
            members[orders[index].dtype, warps_of(bodies[index])].append(index)
    launches = []
    for (dtype, warps), chosen in members.items():
        distinct = list(dict.fromkeys(bodies[index] for index in chosen))
        for n in range(0, len(distinct), BODIES_OF_A_LAUNCH):
            bodies_of_launch = tuple(distinct[n : n + BODIES_OF_A_LAUNCH])
            records_of_layers = [
                _records(index, layout[index], orders[index], offsets[index], bodies[index], bodies_of_launch)
                for index in chosen
                if bodies[index] in bodies_of_launch
            ]
            records, size = torch.cat(records_of_layers), torch.empty(0, dtype=dtype).element_size()
            registers = registers_of(dtype, warps, backward)
            launches.append(
                Launch(dtype, warps, registers, bodies_of_launch, records[:, 1:], records[:, 0], size * records[:, 1])
            )
    return tuple(launches)


def _work(body: Body) -> int:
    return body.taps * body.rows * body.channels * body.rounds


def _records(
    index: int, rows: Rows, order: WeightOrder, offsets: Offsets, body: Body, bodies: tuple[Body, ...]
) -> Tensor:
    """For every block of a layer: which that is, and the 16 numbers as `row_kernels.record_of` reads them.

    In the offset of the address is the distance from the weight's beginning.
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
        offsets.share,
        offsets.covariance,
        offsets.sums + first * rows.tap_count,
        offsets.partials + line * rows.channels,
        per_group,
        bodies.index(body),
    )
    return torch.stack([torch.as_tensor(column).expand(len(first)) for column in columns], 1)


def _spans(rows: Rows, step: int, across: bool) -> tuple[Tensor, Tensor]:
    """First row and end of every block of a layer, across its groups or not."""
    span = rows.outputs if across else rows.outputs // rows.groups
    groups, starts = torch.arange(0, rows.outputs, span)[:, None], torch.arange(0, span, step)
    return (groups + starts).reshape(-1), (groups + torch.clamp(starts + step, max=span)).reshape(-1)


def columns_of(layout: tuple[Rows, ...], offsets: list[Offsets], bodies: list[Body]) -> Tensor:
    """The table of the programs that add partial sums.

    First column and end of the columns, channels, partial sums of each, first entering channel, first partial sum.
    """
    result = []
    for rows, offset, body in zip(layout, offsets, bodies, strict=True):
        columns = rows.groups * rows.channels
        of_layer = columns, rows.channels, partials_of(rows, body), rows.first_channel, offset.partials
        result += [(start, *of_layer) for start in range(0, columns, COLUMNS)]
    return torch.tensor(result, dtype=torch.int64).reshape(-1, 6)


@dataclass(frozen=True)
class RowTables:
    """The tables that the row kernels read, for weights of certain memory layouts."""

    forward: tuple[Launch, ...]  # the launches of the forward; `backward` likewise
    backward: tuple[Launch, ...]
    columns: Tensor  # what every program reads that adds partial sums
    partials: int  # the number of partial sums
    work: torch.dtype  # the dtype of all sums: float32, or float64 if a weight has it

    def at(self, addresses: Tensor, device: torch.device) -> RowTables:
        """Tables for weights at these addresses: new ones, since a captured graph goes on with those it has read."""
        forward, backward = (
            tuple(launch.at(addresses, device) for launch in launches) for launches in (self.forward, self.backward)
        )
        return replace(self, forward=forward, backward=backward)


def _build_tables(rows: tuple[Rows, ...], orders: list[WeightOrder], device: torch.device) -> RowTables:
    forward, backward = (bodies_of(rows, orders, direction) for direction in (False, True))
    offsets, partials = offsets_of(rows, backward)
    return RowTables(
        launches_of(rows, orders, offsets, forward, backward=False),
        launches_of(rows, orders, offsets, backward, backward=True),
        columns_of(rows, offsets, backward).to(device),
        partials,
        torch.float64 if any(order.dtype == torch.float64 for order in orders) else torch.float32,
    )


def _tap_tables(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """The shares of all taps, and the covariances between the taps of layers whose positions differ."""
    none = torch.empty(0, dtype=torch.float64)
    spread = [rows.taps[:, 1:].cpu().double() for rows in layout.rows]
    covariances = [(e @ e.t()).reshape(-1) for e in spread if e.shape[1]]
    share = torch.cat([none, *(rows.taps[:, 0].cpu().double() for rows in layout.rows)])
    return share.to(device), torch.cat([none, *covariances]).to(device)
