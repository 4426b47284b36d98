"""The tables of a layout on a device, built once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ...layout import Layout, Rows
from . import lane_tables, whole
from .blocks import Kind, Launch, Strides, columns, kind_of, launches, partials_of, site_of, strides_of, with_partials
from .lane_tables import LaneTables
from .whole import WholeLaunch

T = TypeVar("T")
Key = tuple[tuple[Strides, Kind], ...]  # of every weight, how it lies in memory


@dataclass(frozen=True)
class RowTables:
    """What the kernels of rows read, for weights that lie in memory in one certain way."""

    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
    whole_forward: tuple[WholeLaunch, ...]
    whole_backward: tuple[WholeLaunch, ...]
    sites: Tensor  # int64, a row of `blocks.Site` each
    columns: Tensor
    pointers: Tensor  # int64, of the weights
    partials: int
    work: torch.dtype  # of all sums: float32, or float64 if a weight is


class Tables:
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
        ways = [strides_of(rows, weight) for rows, weight in zip(self.layout.rows, weights, strict=True)]
        sites = list(zip(self.layout.rows, ways, weights, strict=True))
        there, back = ([kind_of(*site, backward=backward) for site in sites] for backward in (False, True))
        key = tuple(zip(ways, there, strict=True))
        renewed = functools.partial(self._rows_at, key, addresses, ways, there, back)
        self._current = self._rows[key] = _to_stay(self.device, renewed)
        self._addresses, self._seen = addresses, seen
        return self._current

    def _rows_at(
        self, key: Key, addresses: tuple[int, ...], ways: list[Strides], there: list[Kind], back: list[Kind]
    ) -> RowTables:
        found = self._rows.get(key) or _build_rows(self.layout.rows, ways, there, back, self.device)
        return _at(found, torch.tensor(addresses, dtype=torch.int64), self.device)


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


def _build_rows(
    rows: tuple[Rows, ...], ways: list[Strides], there: list[Kind], back: list[Kind], device: torch.device
) -> RowTables:
    share = covariance = sums = 0
    sites = []
    for site, way in zip(rows, ways, strict=True):
        spreads = site.taps.shape[1] > 1
        sites.append(site_of(site, way, share, covariance if spreads else -1, sums))
        share += site.tap_count
        covariance += site.tap_count**2 if spreads else 0
        sums += site.outputs * site.tap_count if spreads else 0
    bodies, bodies_back = (whole.bodies_of(rows, there, backward) for backward in (False, True))
    others, others_back = ([i for i in range(len(rows)) if i not in known] for known in (bodies, bodies_back))
    counts = [
        whole.partials_of(site, bodies_back[index]) if index in bodies_back else partials_of(site, back[index])
        for index, site in enumerate(rows)
    ]
    sites, partials = with_partials(sites, rows, counts)
    return RowTables(
        _placed(launches(rows, there, others, backward=False), device),
        _placed(launches(rows, back, others_back, backward=True), device),
        tuple(whole.launches(rows, there, sites, bodies, backward=False)),
        tuple(whole.launches(rows, there, sites, bodies_back, backward=True)),
        torch.tensor([astuple(site) for site in sites], dtype=torch.int64).to(device),
        columns(rows).to(torch.int32).to(device),
        torch.empty(0, dtype=torch.int64),
        partials,
        torch.float64 if any(kind.dtype == torch.float64 for kind in there) else torch.float32,
    )


def _at(tables: RowTables, addresses: Tensor, device: torch.device) -> RowTables:
    """The tables for weights at these addresses: new ones, since a captured graph goes on with those it has seen."""
    return replace(
        tables,
        whole_forward=tuple(launch.at(addresses, device) for launch in tables.whole_forward),
        whole_backward=tuple(launch.at(addresses, device) for launch in tables.whole_backward),
        pointers=addresses.to(device),
    )


def _placed(found: list[Launch], device: torch.device) -> tuple[Launch, ...]:
    return tuple(replace(launch, blocks=launch.blocks.to(torch.int32).to(device)) for launch in found)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _refuse_capture(what: str) -> None:
    if _capturing():
        raise RuntimeError(
            f"The tables of the kernels would have to be {what} while a CUDA graph is captured, which cannot copy from "
            "the host: run one step before the capture."
        )
