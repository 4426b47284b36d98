"""The tables of a layout on a device, built once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ...fold.layout import Layout, Rows
from . import lane_tables
from .blocks import Launch, columns, launches, places_of
from .bodies import WeightOrder, bodies_of, order_in_memory
from .lane_tables import LaneTables

T = TypeVar("T")
Key = tuple[WeightOrder, ...]  # of every weight


@dataclass(frozen=True)
class RowTables:
    """What the kernels of rows read, for weights that lie in memory in one certain way."""

    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
    columns: Tensor  # of partial sums
    partials: int
    work: torch.dtype  # of all sums: float32, or float64 if a weight is


class TritonTables:
    """The device-side tables of a layout.

    Those of the moment pass and of the taps are built at once; those of rows when the weights are first seen, again
    when one comes with another dtype, order in memory or alignment; their addresses are copied when one has moved.
    """

    def __init__(self, layout: Layout, device: torch.device | str) -> None:
        _refuse_capture("built")
        self.device = torch.device(device)
        self.layout = layout
        self.lanes: LaneTables = _to_stay(self.device, lambda: lane_tables.build(layout.lanes, self.device))
        self.share, self.covariance = _to_stay(self.device, lambda: _of_taps(layout, self.device))
        self.sums = sum(r.outputs * r.tap_count for r in layout.rows if r.taps.shape[1] > 1)
        self._rows: dict[Key, RowTables] = {}
        self._addresses: tuple[int, ...] = ()
        self._current: RowTables | None = None
        self._seen: tuple[object, ...] = ()
        self._captured: dict[tuple[int, ...], RowTables] = {}

    def rows(self, weights: list[Tensor]) -> RowTables:
        """The tables for these weights, with their present addresses."""
        addresses = tuple(weight.data_ptr() for weight in weights)
        seen = tuple((weight.dtype, weight.stride()) for weight in weights)
        if self._current is not None and addresses == self._addresses and seen == self._seen:
            if _capturing():  # the graph reads these addresses as long as it lives
                self._captured[addresses] = self._current
            return self._current
        _refuse_capture("renewed (a weight has moved or changed its layout)")
        orders = [order_in_memory(rows, weight) for rows, weight in zip(self.layout.rows, weights, strict=True)]
        self._current = _to_stay(self.device, functools.partial(self._rows_at, orders, addresses))
        self._addresses, self._seen = addresses, seen
        return self._current

    def _rows_at(self, orders: list[WeightOrder], addresses: tuple[int, ...]) -> RowTables:
        key = tuple(orders)
        if key not in self._rows:
            self._rows[key] = _build_rows(self.layout.rows, orders, self.device)
        return _at(self._rows[key], torch.tensor(addresses, dtype=torch.int64), self.device)


def _to_stay(device: torch.device, work: Callable[[], T]) -> T:
    """What the work allocates stays, so it is done in a thread of its own.

    While torch.compile makes CUDA graphs (its mode "reduce-overhead"), all that their thread allocates belongs to them.
    """
    if device.type != "cuda":
        return work()

    def finished() -> T:
        result = work()
        torch.cuda.current_stream(device).synchronize()  # the stream of that thread is another one
        return result

    with ThreadPoolExecutor(1) as other:
        return other.submit(finished).result()


def _of_taps(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor]:
    """The shares of all taps, and between the taps of sites whose positions differ the covariances."""
    none = torch.empty(0, dtype=torch.float64)
    spread = [rows.taps[:, 1:].cpu().double() for rows in layout.rows]
    covariances = [(e @ e.t()).reshape(-1) for e in spread if e.shape[1]]
    share = torch.cat([none, *(rows.taps[:, 0].cpu().double() for rows in layout.rows)])
    return share.to(device), torch.cat([none, *covariances]).to(device)


def _build_rows(rows: tuple[Rows, ...], orders: list[WeightOrder], device: torch.device) -> RowTables:
    there, back = (bodies_of(rows, orders, backward) for backward in (False, True))
    places, partials = places_of(rows, back)
    return RowTables(
        launches(rows, orders, places, there, backward=False),
        launches(rows, orders, places, back, backward=True),
        columns(rows, places, back).to(device),
        partials,
        torch.float64 if any(order.dtype == torch.float64 for order in orders) else torch.float32,
    )


def _at(tables: RowTables, addresses: Tensor, device: torch.device) -> RowTables:
    """The tables for weights at these addresses: new ones, since a captured graph goes on with those it has seen."""
    forward, backward = (
        tuple(launch.at(addresses, device) for launch in made) for made in (tables.forward, tables.backward)
    )
    return replace(tables, forward=forward, backward=backward)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refuse_capture(what: str) -> None:
    if _capturing():
        raise RuntimeError(
            f"The tables of the kernels would have to be {what} while a CUDA graph is captured, which cannot copy from "
            "the host: run one step before the capture."
        )
