"""Lines of the figures: means over seeds with bands from the lowest seed to the highest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..report.series import Figure, Panel, PlottedSeries
from .arms import Run
from .records import Records

COLOURS = ("#4a4d50", "#0064a8", "#009e73", "#d55e00", "#9c00fc", "#8a7a00", "#d16aa8")
MARKERS = ("s", "o", "^", "D", "P", "X", "v")
BANDS = " Lines are means, bands reach from the lowest of three seeds to the highest."


def line(
    label: str, look: int, x: Sequence[float], runs: Sequence[Sequence[float | None]], dashed: bool = False
) -> PlottedSeries:
    """Values of several runs at the same places."""
    columns = [[v for v in column if v is not None] for column in zip(*runs, strict=True)]
    means = [statistics.fmean(column) if column else math.nan for column in columns]
    return PlottedSeries(
        label=label,
        colour=COLOURS[look],
        dark_colour=COLOURS[look],
        dash="dashed" if dashed else "solid",
        marker=MARKERS[look],
        x=tuple(x),
        y=tuple(means),
        low=tuple(min(column, default=math.nan) for column in columns),
        high=tuple(max(column, default=math.nan) for column in columns),
        rank=look,
    )


def curve(records: Records, arm: str, name: str, label: str, look: int, dashed: bool = False) -> PlottedSeries:
    """A curve over epochs, at the best rate."""
    runs = [run[name] for run in records.at(arm)]
    return line(label, look, range(1, len(runs[0]) + 1), runs, dashed)


def ratio_panels(records: Records, arms: Sequence[str]) -> tuple[Panel, ...]:
    """True over predicted standard deviations: a panel for every arm, a line for every layer."""
    return tuple(Panel(arm, tuple(_layer_lines(records.at(arm)))) for arm in arms)


def _layer_lines(runs: Sequence[Run]) -> list[PlottedSeries]:
    depth, epochs = len(runs[0]["ratios"][0]), range(len(runs[0]["ratios"]))
    return [
        line(f"layer {k + 1}", k, epochs, [[epoch[k] for epoch in run["ratios"]] for run in runs]) for k in range(depth)
    ]


def ratio_figure(name: str, title: str, records: Records, arms: Sequence[str]) -> Figure:
    """The panels of standard deviations as a figure."""
    caption = f"Standard deviation on training images over the predicted one.{BANDS}"
    return Figure(name, title, caption, ratio_panels(records, arms), "epoch", "true / predicted std")
