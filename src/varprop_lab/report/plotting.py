"""Draws figures with matplotlib, as PNG and SVG, without a display and the same every time."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..environment import require, write_atomically
from .series import (
    ACCURACY_LABEL,
    LEGEND_MARKS,
    LINESTYLES,
    LOOK,
    MARKS,
    Figure,
    Mark,
    Panel,
    PlottedSeries,
    seed_counts,
)

Axis = Any  # matplotlib's Axes, which is imported only to draw
PANEL_WIDTH, PANEL_HEIGHT = 3.0, 2.5  # inches; three panels then read well over the width of a page
PERFECT = 100.5  # percent; a little more than is possible, so that 100 % has a place on the axis
ACCURACIES = (90, 50, 99, 70, 97, 80, 95, 98, 30, 60, 75, 96, 94, 92, 85, 40, 20, 10, 99.5, 100)  # the best first
LOG_STEPS = (  # up to which ratio of the axis' ends, and the ticks of a decade
    (3.0, (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)),
    (6.0, (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)),
    (20.0, (1.0, 2.0, 3.0, 5.0)),
    (300.0, (1.0, 2.0, 5.0)),
    (math.inf, (1.0,)),
)


def draw(figure: Figure, stem: Path, heading: str = "") -> None:
    """Draws one figure to ``<stem>.png`` and ``<stem>.svg``."""
    matplotlib = require("matplotlib", "A figure")
    with matplotlib.rc_context(LOOK):
        rows, columns = _grid(len(figure.panels))
        width = PANEL_WIDTH * columns + (2.2 if columns == 1 else 0.4)
        legend = legend_entries(figure)
        height = PANEL_HEIGHT * rows + 0.55 + 0.2 * _legend_shape([label for label, _ in legend], width)[0]
        canvas = require("matplotlib.figure", "A figure").Figure(figsize=(width, height), layout="constrained")
        axes = list(canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for panel, axis in zip(figure.panels, axes, strict=False):
            _draw_panel(panel, axis, figure)
        _label_axes(axes, figure, columns)
        _add_legend(canvas, legend, width)
        title = f"{heading}: {figure.title}" if heading else figure.title
        canvas.suptitle(textwrap.fill(title, int(14 * width)), fontsize=10.5)
        _save(canvas, stem)


def _save(canvas: Any, stem: Path) -> None:
    """Both formats; the layout is computed once."""
    for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        buffer = io.BytesIO()
        canvas.savefig(buffer, format=kind, metadata=metadata)
        write_atomically(stem.with_name(f"{stem.name}.{kind}"), buffer.getvalue())
        canvas.set_layout_engine("none")


def _grid(panels: int) -> tuple[int, int]:
    """Rows and columns: up to three panels in a row, four as two by two."""
    columns = 2 if panels == 4 else max(1, min(panels, 3))
    return max(1, math.ceil(panels / columns)), columns


def _draw_panel(panel: Panel, axis: Axis, figure: Figure) -> None:
    """Bands, lines, then marks, so that nothing hides what matters more."""
    missing = f"  (no data: {', '.join(panel.missing)})" if panel.series and panel.missing else ""
    axis.set_title(panel.title + missing, fontsize=8.5 if missing else None)
    if figure.x_log:
        axis.set_xscale("log")
    if figure.y_log and any(value is not None and value > 0 for series in panel.series for value in series.y):
        axis.set_yscale("log")
    if is_accuracy(figure):
        stretch_accuracies(axis)
    for index, series in enumerate(panel.series):
        _draw_series(series, axis, index)
    for bound in panel.bounds:
        axis.axvline(bound, color="#80868b", linewidth=1.0, linestyle=LINESTYLES["dotted"], zorder=1)
    for series in panel.series:
        for mark in series.marks:
            _draw_mark(mark, series, axis)
    if not panel.series:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color="#80868b")


def _draw_series(series: PlottedSeries, axis: Axis, index: int) -> None:
    """A line and its band, or points joined by a thin line; the index keeps the markers of two lines apart."""
    y = _numbers(series.y)
    if series.points:
        axis.plot(series.x, y, color=series.colour, linewidth=0.8, alpha=0.55)
        axis.plot(series.x, y, series.marker, color=series.colour, markersize=3.6, alpha=0.85)
        return
    if series.low:
        axis.fill_between(series.x, _numbers(series.low), _numbers(series.high), color=series.colour, alpha=0.16, lw=0)
    every = max(1, len(series.x) // 5)
    marked = (2 * index * every // 9 % every, every)
    axis.plot(series.x, y, **_line_look(series), markevery=marked, markersize=4, zorder=3)


def _numbers(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _draw_mark(mark: Mark, series: PlottedSeries, axis: Axis) -> None:
    """A mark at its place; at the upper edge where its value is infinite."""
    colours = {
        "diverged": {"color": series.colour},
        "chosen": {"facecolors": "none", "edgecolors": series.colour},
        "at bound": {"facecolors": series.colour, "edgecolors": "#202124"},
    }
    transform = {"transform": axis.get_xaxis_transform()} if mark.y is None else {}
    height = 0.97 if mark.y is None else mark.y
    axis.scatter([mark.x], [height], zorder=5, clip_on=False, **MARKS[mark.kind], **colours[mark.kind], **transform)


def _label_axes(axes: list[Axis], figure: Figure, columns: int) -> None:
    """Labels at the left and below; axes without a panel are taken away."""
    for index, axis in enumerate(axes):
        if index >= len(figure.panels):
            axis.set_visible(False)
        if index % columns == 0:
            axis.set_ylabel(figure.y_label + "\n(stretched: log of the error)" * is_accuracy(figure))
        if index + columns >= len(figure.panels):
            axis.set_xlabel(figure.x_label)
            axis.tick_params(labelbottom=True)
    set_ticks(axes[0], figure)


def is_accuracy(figure: Figure) -> bool:
    """True if the vertical axis is an accuracy in percent."""
    return figure.y_label == ACCURACY_LABEL


def stretch_accuracies(axis: Axis) -> None:
    """Scales an axis by the logarithm of the error: 96 and 97 % are about as far apart as 60 and 70 %."""
    numpy = require("numpy", "A figure")

    def forward(accuracy: Any) -> Any:
        return -numpy.log10(numpy.maximum(PERFECT - accuracy, 1e-3))

    axis.set_yscale("function", functions=(forward, lambda stretched: PERFECT - 10.0**-stretched))


def set_ticks(axis: Axis, figure: Figure) -> None:
    """Whole epochs, the batch sizes run, and plain numbers on a stretched axis; shared by all panels."""
    if figure.x_label == "epoch":
        axis.xaxis.set_major_locator(require("matplotlib.ticker", "A figure").MaxNLocator(nbins=6, integer=True))
    if figure.x_label == "batch size":
        sizes = sorted({x for panel in figure.panels for series in panel.series for x in series.x})
        axis.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axis.set_xticks([], minor=True)
    if axis.get_yscale() == "log":
        _plain_log_ticks(axis)
    if is_accuracy(figure):
        low, high = axis.get_ylim()
        axis.set_yticks(_accuracy_ticks(low, min(high, 100.0)))
        axis.set_ylim(low, high)


def _plain_log_ticks(axis: Axis) -> None:
    """0.1, 0.2, 0.5 rather than powers, and the steps between decades only where there are few decades."""
    ticker = require("matplotlib.ticker", "A figure")
    low, high = axis.get_ylim()
    steps = next(steps for ratio, steps in LOG_STEPS if high / low < ratio)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=steps, numticks=12))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def _accuracy_ticks(low: float, high: float) -> list[float]:
    """Round accuracies between two, none nearer to another than a ninth of the stretched axis."""
    apart = math.log(max(PERFECT - low, 1e-3) / max(PERFECT - high, 1e-3)) / 9
    chosen: list[float] = []
    for value in ACCURACIES:
        gaps = [abs(math.log((PERFECT - value) / (PERFECT - tick))) for tick in chosen]
        if low <= value <= high and min(gaps, default=math.inf) >= apart:
            chosen.append(float(value))
    return sorted(chosen)


def legend_entries(figure: Figure) -> list[tuple[str, dict[str, Any]]]:
    """Labels and looks: the lines in their order, then the marks that occur."""
    every = sorted((s for panel in figure.panels for s in panel.series), key=lambda s: s.rank)
    kinds = {mark.kind for s in every for mark in s.marks}
    seeds = seed_counts(every)
    lines = {s.label + seeds.get(s.label, ""): _line_look(s) for s in every}
    marks = {kind: {"color": "#3c4043", "ls": "", **look} for kind, look in LEGEND_MARKS.items() if kind in kinds}
    return [*lines.items(), *marks.items()]


def _line_look(series: PlottedSeries) -> dict[str, Any]:
    marker = (series.marker or None) if series.dash != "dashed" or series.open_marker else None  # two dashed lines
    face = "white" if series.open_marker else None
    return {"color": series.colour, "ls": LINESTYLES[series.dash], "marker": marker, "mfc": face}


def _legend_shape(labels: Sequence[str], width: float) -> tuple[int, int]:
    """Rows and columns of a legend so wide, the entries spread evenly."""
    per_row = max(1, int((width - 0.3) / (0.62 + 0.072 * max(map(len, labels), default=1))))
    rows = math.ceil(len(labels) / per_row)
    return rows, math.ceil(len(labels) / max(rows, 1))


def _add_legend(canvas: Any, entries: list[tuple[str, dict[str, Any]]], width: float) -> None:
    if entries:
        labels = [label for label, _ in entries]
        handles = [require("matplotlib.lines", "A figure").Line2D([], [], **look) for _, look in entries]
        columns = _legend_shape(labels, width)[1]
        canvas.legend(handles, labels, loc="outside lower center", ncols=columns, markerscale=0.8, columnspacing=1.4)
