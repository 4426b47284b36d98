"""A layout laid down for the C code: everything that stays the same from call to call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...gaussian.normal import gauss_legendre
from ..layout import Lanes, Layout, Rows, Step
from ..memory import memory_order
from ..slopes import CURVES, DOUBLE, SINGLE, grid
from .structures import CODES, GRIDS, KNOTS, GridTable, PlanTable, SiteTable, StepTable

# Equidistant nodes, and the lanes they serve, in units of a curve's narrow standard deviation (`slopes.CURVES`).
GRID_SIZES = {torch.float32: ((32, 0.5), (64, 1.0), (128, 2.0)), torch.float64: ((64, 0.5), (128, 1.0))}


@dataclass(frozen=True)
class Tables:
    """The plan for the C code, and what it points to."""

    plan: PlanTable
    kept_size: int  # numbers that the forward pass keeps
    owners: tuple[Any, ...]


def make_tables(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> Tables:
    """Lay a layout down for weights as they lie in memory; `supported` and `fits` must have said yes."""
    lanes, owners = layout.lanes, list[Any]()

    def own(tensor: Tensor, kind: torch.dtype = torch.float64) -> int:
        owners.append(tensor.to("cpu", kind).contiguous())
        return int(owners[-1].data_ptr())

    steps, slopes = _steps(lanes, own)
    sites = _sites(layout, weights, own)
    legendre = gauss_legendre(SINGLE if dtype == torch.float32 else DOUBLE)
    nodes, factors = (torch.tensor(part, dtype=torch.float64) for part in legendre)
    plan = PlanTable(
        *(lanes.sources, len(lanes.constant_mean), lanes.given, lanes.total, len(lanes.entering), layout.row_count),
        *(len(steps), len(sites), slopes, len(nodes), max(rows.tap_count for rows in layout.rows)),
        *(own(lanes.constant_mean), own(lanes.constant_var), own(nodes), own(factors)),
        *(own(lanes.entering, torch.int64), ctypes.addressof(steps), ctypes.addressof(sites)),
        (GridTable * GRIDS)(*(_grid(count, widest, own) for count, widest in GRID_SIZES[dtype])),
    )
    return Tables(plan, kept_size(layout), (steps, sites, *owners))


def kept_size(layout: Layout) -> int:
    """How many float64 numbers the forward pass keeps: what enters, derivatives, rows, and their spread."""
    slopes = sum(4 * step.count * step.function.arity for step in layout.lanes.steps)
    spread = sum(rows.outputs * (rows.taps.shape[1] - 1) for rows in layout.rows)
    return 2 * len(layout.lanes.entering) + slopes + 3 * layout.row_count + spread


def _grid(count: int, widest: float, own: Any) -> GridTable:
    nodes, weights = grid(count)
    return GridTable(count, widest, own(nodes[:, 0]), own(weights[0]))


def _steps(lanes: Lanes, own: Any) -> tuple[Any, int]:
    """The functions, and how many derivatives they leave."""
    made, slopes = [], 0
    for step in lanes.steps:
        code = encoded(step.function.kernel)
        assert code is not None
        inputs = [own(index, torch.int64) for index in step.inputs] + [None]
        head = (code.code, step.count, step.start, slopes, len(code.knots))
        padded = (*code.knots, *[0.0] * (KNOTS - len(code.knots)))
        knots = (ctypes.c_double * KNOTS)(*padded)
        made.append(StepTable(*head, *inputs[:2], code.lift, code.share, *code.numbers, code.narrow, knots))
        slopes += 4 * step.count * step.function.arity
    return (StepTable * len(made))(*made), slopes


@dataclass(frozen=True)
class Encoded:
    """A function as the C code knows it: behind the maximum of equal Gaussians (mean + lift std, share var)."""

    code: int
    numbers: tuple[float, float, float]
    lift: float = 0.0
    share: float = 1.0
    narrow: float = 0.0
    knots: tuple[float, ...] = ()


def encoded(kernel: Sequence[Any] | None) -> Encoded | None:
    """A `Function.kernel` as code and numbers; None if the C code does not know it."""
    if kernel is None:
        return None
    if kernel[0] == "maximum":
        return _plain("linear", (1.0, 1.0, 0.0), *kernel[1:])
    if kernel[0] == "compose":
        inner = kernel[4]
        return None if kernel[1] != "maximum" or inner in _OF_TWO else _of_name(inner, kernel[5:], *kernel[2:4])
    return _of_name(kernel[0], kernel[1:])


_OF_TWO = ("add", "mul", "skip")


def _of_name(name: str, numbers: Sequence[float], lift: float = 0.0, share: float = 1.0) -> Encoded | None:
    if name == "affine":
        slope, offset = numbers
        return _plain("linear", (slope, slope * slope, offset), lift, share)
    if name == "gain":
        return _plain("linear", numbers, lift, share)
    return _plain(name, numbers, lift, share) if name in CODES[1:] else None


def _plain(name: str, numbers: Sequence[float], lift: float = 0.0, share: float = 1.0) -> Encoded:
    a, b, c = (*numbers, *[0.0] * (3 - len(numbers)))
    if name not in CURVES:
        return Encoded(CODES.index(name), (a, b, c), lift, share)
    _, knots, narrow = CURVES[name]
    return Encoded(
        CODES.index(name), (a, b, c), lift, share, narrow / max([1.0, *numbers]), tuple(map(float, knots(*numbers)))
    )


def _sites(layout: Layout, weights: Sequence[Tensor], own: Any) -> Any:
    made, levers = [], 0
    for rows, weight in zip(layout.rows, weights, strict=True):
        strides = site_strides(rows, weight)
        assert strides is not None
        columns = rows.taps.shape[1]
        form = (rows.outputs, rows.groups, rows.channels, rows.tap_count, columns)
        places = (rows.first_row, rows.first_channel, levers)
        flags = (_row_is_one_piece(rows, strides), _reads_data(rows, layout.lanes))
        made.append(SiteTable(*form, *places, *flags, *strides, own(rows.taps)))
        levers += rows.outputs * (columns - 1)
    return (SiteTable * len(made))(*made)


def _reads_data(rows: Rows, lanes: Lanes) -> bool:
    """Whether all that enters a site is constant."""
    entering = lanes.entering[rows.first_channel : rows.first_channel + rows.groups * rows.channels]
    end = lanes.sources + len(lanes.constant_mean)
    return bool(((entering >= lanes.sources) & (entering < end)).all())


def _row_is_one_piece(rows: Rows, strides: tuple[int, ...]) -> bool:
    _, _, channel, tap = strides
    return (channel, tap) == (rows.tap_count, 1) or (channel, tap) == (1, rows.channels)


def site_strides(rows: Rows, weight: Tensor) -> tuple[int, int, int, int] | None:
    """Distances between groups, rows, channels and taps in memory; None if the weight has gaps or uneven taps."""
    if not weight.is_contiguous() and memory_order(weight) == list(range(weight.ndim)):
        return None
    first, second, *_ = weight.stride()
    tap = _tap_stride(weight)
    if tap is None:
        return None
    if rows.transposed:
        group, row, channel = rows.channels * first, second, first
    else:
        group, row, channel = rows.outputs // rows.groups * first, first, second
    channel, tap = (channel if rows.channels > 1 else 1), (tap if rows.tap_count > 1 else rows.channels)
    if rows.tap_count == 1 and channel != 1:
        tap = 1
    return group, row, channel, tap


def _tap_stride(weight: Tensor) -> int | None:
    """The one distance between taps that follow each other."""
    axes = [(size, stride) for size, stride in zip(weight.shape[2:], weight.stride()[2:], strict=True) if size > 1]
    if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(axes)):
        return None
    return axes[-1][1] if axes else 1


def known(step: Step) -> bool:
    """Whether the C code knows the function of a step."""
    return encoded(step.function.kernel) is not None
