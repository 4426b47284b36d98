"""The plots of a page, as data that its script draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..numbers.row import ReportRow

Axis = Literal["linear", "log", "both"]  # both: logarithmic to either side of zero
Numbers = tuple[float | None, ...]
DECADES = 20.0  # values further apart than this factor get a logarithmic axis


@dataclass(frozen=True)
class PlotSeries:
    """A quantity of every row."""

    name: str  # for the legend
    look: str  # its colour, a class of the style sheet
    y: Numbers  # A value for every row, None where there is none
    low: Numbers = ()  # lower quartile over units, if known
    high: Numbers = ()  # upper quartile
    least: Numbers = ()  # the smallest unit
    most: Numbers = ()  # the largest
    error: Numbers = ()  # standard errors of measured values
    x: Numbers = ()  # for a scatter plot, the other coordinate
    marker: str = ""  # as matplotlib calls it; a line without markers if empty
    dashed: bool = False  # whether the line is


@dataclass(frozen=True)
class Plot:
    """One plot: what it is called, what its axes are, and what is in it."""

    id: str
    title: str
    caption: str
    label: str
    axis: Axis
    series: tuple[PlotSeries, ...]
    kind: Literal["depth", "scatter"] = "depth"
    percent: bool = False


def of(rows: Iterable[ReportRow], value: Callable[[ReportRow], float | None]) -> Numbers:
    """A value of every row."""
    return tuple(value(row) for row in rows)


def number_of(name: str, factor: float = 1.0) -> Callable[[ReportRow], float | None]:
    """The reader of one of a row's numbers."""

    def read(row: ReportRow) -> float | None:
        return row.numbers[name] * factor if name in row.numbers else None

    return read


def spread_series(what: Literal["mean", "std"], rows: Sequence[ReportRow], name: str, look: str) -> PlotSeries:
    """The mean or the standard deviation of the layer, with quartiles and extremes over its units."""
    spreads = [row.mean if what == "mean" else row.std for row in rows]
    edges = (("low", "lower"), ("high", "upper"), ("least", "least"), ("most", "most"))
    bands: dict[str, Any] = {band: tuple(getattr(spread, edge) for spread in spreads) for band, edge in edges}
    return PlotSeries(name, look, of(rows, number_of(what)), **bands)


def total_series(rows: Sequence[ReportRow], name: str, look: str) -> PlotSeries:
    """The gradient summed over positions."""
    return PlotSeries(name, look, of(rows, lambda row: row.gradient_total))


def measured_series(rows: Sequence[ReportRow], what: str, name: str) -> PlotSeries:
    """One of the numbers as measured, with standard errors."""
    return PlotSeries(
        name,
        "measured",
        of(rows, lambda row: row.measured[what]["value"] if what in row.measured else None),
        error=of(rows, lambda row: row.measured[what]["error"] if what in row.measured else None),
        marker="o",
    )


def axis_of(values: Iterable[float | None]) -> Axis:
    """Logarithmic where values span decades."""
    known = sorted(abs(value) for value in values if value)
    return "log" if known and known[-1] > DECADES * known[0] else "linear"


def signed_axis(values: Iterable[float | None]) -> Axis:
    """For values around zero: logarithmic on both sides where the largest dwarf the usual ones."""
    known = sorted(abs(value) for value in values if value)
    return "both" if known and known[-1] > 5 * DECADES * known[len(known) // 2] else "linear"


def plotted(rows: Sequence[ReportRow], values: Numbers) -> list[float | None]:
    """The values of the rows that plots show, those with nothing inside them that do not only move elements."""
    return [value for row, value in zip(rows, values, strict=True) if row.is_layer]
