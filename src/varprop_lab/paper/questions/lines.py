"""Lines of the figures: means over seeds with bands from the lowest seed to the highest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ...report.series import Figure, Panel, PlottedSeries, over_seeds
from ...report.style import DOUBLE_COLOUR, METHOD_COLOURS, OTHER_COLOUR
from .records import Records

_METHODS = ("standard", "batch", "weight", "analytic", "layer")
COLOURS = [light for light, _ in (*(METHOD_COLOURS[method] for method in _METHODS), OTHER_COLOUR, DOUBLE_COLOUR)]
MARKERS = ("s", "o", "^", "D", "P", "X", "v")
BANDS = "Lines are means over seeds, bands reach from the lowest to the highest."


def line(label: str, look: int, x: Sequence[float], runs: Sequence[Sequence[float | None]]) -> PlottedSeries:
    """Values of several runs at the same places; a diverged one is left out."""
    columns = [[v for v in column if v is not None and math.isfinite(v)] for column in zip(*runs, strict=True)]
    drawn = (COLOURS[look], COLOURS[look], "solid", MARKERS[look])
    return PlottedSeries(label, *drawn, tuple(x), **over_seeds(columns, statistics.fmean), rank=look)


def curve(records: Records, arm: str, name: str, label: str, look: int) -> PlottedSeries:
    """A curve over epochs, at the best rate."""
    runs = [run[name] for run in records.at(arm)]
    return line(label, look, range(1, len(runs[0]) + 1), runs)


def ratio_figure(name: str, records: Records, arms: Sequence[str]) -> Figure:
    """True over predicted standard deviations: a panel for every arm, a line for every layer."""
    panels = []
    for arm in arms:
        layers = zip(*(zip(*run["ratios"], strict=True) for run in records.at(arm)), strict=True)
        lines = [line(f"layer {k + 1}", k, range(len(runs[0])), runs) for k, runs in enumerate(layers)]
        panels.append(Panel(arm, tuple(lines)))
    caption = f"Standard deviation on training images over the predicted one. {BANDS}"
    title = "True over predicted standard deviation"
    return Figure(name, title, caption, tuple(panels), "epoch", "true / predicted std")
