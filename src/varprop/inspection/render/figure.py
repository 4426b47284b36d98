"""A comparison as one picture, drawn with matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...errors import VarpropError
from ..data import ComparisonData
from .comparison_page import comparison_plots
from .plots import Plot, PlotSeries

COLOURS = {"before": "#7d858f", "after": "#0b62a8"}
SHOWN = ("std", "gradient")
SUFFIXES = (".png", ".svg", ".pdf")


def draw(comparison: ComparisonData, path: Path) -> Path:
    """Standard deviation and gradient by depth, both states in each panel."""
    if path.suffix.lower() not in SUFFIXES:
        raise VarpropError(f"{path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.")
    sheet = _sheet()
    shown = [plot for plot in comparison_plots(comparison) if plot.id in SHOWN]
    layers = [index for index, change in enumerate(comparison.changes) if change.after.is_layer]
    for axes, plot in zip(sheet.subplots(1, 2), shown, strict=True):
        _panel(axes, plot, layers)
    sheet.suptitle(comparison.after.model)
    try:
        sheet.savefig(path, dpi=150)
    except OSError as error:
        raise VarpropError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def _sheet() -> Any:
    """A figure of its own, apart from what a notebook or script has open."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise VarpropError("The figure needs matplotlib: pip install 'varprop[report]'.") from error
    return Figure(figsize=(10, 3.8), layout="constrained")


def _panel(axes: Any, plot: Plot, layers: list[int]) -> None:
    for series in plot.series:
        _series(axes, series, layers)
    axes.set_title(plot.title)
    axes.set_xlabel("layer, in order of execution")
    axes.set_ylabel(plot.label)
    _scale(axes, plot, layers)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _scale(axes: Any, plot: Plot, layers: list[int]) -> None:
    """The lines decide what is seen: bands may reach far beyond them."""
    values = [series.y[index] or 0.0 for series in plot.series for index in layers]
    seen = [value for value in values if 0 < value < math.inf]
    if plot.axis == "log" and seen:
        axes.set_yscale("log")
        axes.set_ylim(min(seen) / 3, max(seen) * 3)
    else:
        axes.set_ylim(bottom=0)


def _series(axes: Any, series: PlotSeries, layers: list[int]) -> None:
    known = [(place, index) for place, index in enumerate(layers) if series.y[index] is not None]
    places, colour = [place for place, _ in known], COLOURS[series.look]
    axes.plot(places, [series.y[index] for _, index in known], color=colour, label=series.name, linewidth=1.4)
    if series.low:
        low, high = ([values[index] for _, index in known] for values in (series.low, series.high))
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
