"""A comparison as one picture, drawn with matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import VarpropError
from .page_figures import Figure, Series, is_layer

if TYPE_CHECKING:
    from .compare import Comparison

COLOURS = {"before": "#7d858f", "after": "#0b62a8"}
SHOWN = ("std", "gradient")
SUFFIXES = (".png", ".svg", ".pdf")


def draw(comparison: Comparison, path: Path) -> Path:
    """Standard deviation and gradient by depth, both states in each panel.

    Raises:
        VarpropError: If matplotlib is not installed, or the file cannot be written or has another ending.
    """
    from .compare_page import figures

    if path.suffix.lower() not in SUFFIXES:
        raise VarpropError(f"{path} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.")
    sheet = _sheet()
    layers = [index for index, change in enumerate(comparison.changes) if is_layer(change.after)]
    for axes, figure in zip(sheet.subplots(1, 2), [f for f in figures(comparison) if f.id in SHOWN], strict=True):
        _panel(axes, figure, layers)
    sheet.suptitle(comparison.after.model)
    try:
        sheet.savefig(path, dpi=150)
    except OSError as error:
        raise VarpropError(f"{path} cannot be written: {error.strerror or error}.") from error
    return path


def _sheet() -> Any:
    """A figure of its own, apart from what a notebook or script has open."""
    try:
        from matplotlib.figure import Figure as Sheet
    except ImportError as error:
        raise VarpropError("The figure needs matplotlib: pip install 'varprop[report]'.") from error
    return Sheet(figsize=(10, 3.8), layout="constrained")


def _panel(axes: Any, figure: Figure, layers: list[int]) -> None:
    for series in figure.series:
        _series(axes, series, layers)
    axes.set_title(figure.title)
    axes.set_xlabel("layer, in order of execution")
    axes.set_ylabel(figure.label)
    _scale(axes, figure, layers)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _scale(axes: Any, figure: Figure, layers: list[int]) -> None:
    """The lines decide what is seen: bands may reach far beyond them."""
    values = [series.y[index] or 0.0 for series in figure.series for index in layers]
    seen = [value for value in values if 0 < value < math.inf]
    if figure.axis == "log" and seen:
        axes.set_yscale("log")
        axes.set_ylim(min(seen) / 3, max(seen) * 3)
    else:
        axes.set_ylim(bottom=0)


def _series(axes: Any, series: Series, layers: list[int]) -> None:
    known = [(place, index) for place, index in enumerate(layers) if series.y[index] is not None]
    places, colour = [place for place, _ in known], COLOURS[series.look]
    axes.plot(places, [series.y[index] for _, index in known], color=colour, label=series.name, linewidth=1.4)
    if series.low:
        low, high = ([values[index] for _, index in known] for values in (series.low, series.high))
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
