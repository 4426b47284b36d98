"""Training losses of the ResNets over epochs: a panel for every network, a line for every method."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from ..report.plotting import draw
from ..report.series import Figure, Panel, PlottedSeries, line_style, over_seeds
from .runs import TEST, Study

CAPTION = "Mean loss of each epoch, in training mode; bands reach from the lowest to the highest seed."


def draw_losses(studies: Iterable[Study], stem: Path) -> bool:
    """The runs that the test data judged, to ``<stem>.png`` and ``<stem>.svg``; whether there are any."""
    panels = tuple(Panel(study.table, tuple(_lines(study))) for study in studies if study.has(TEST))
    if panels:
        draw(Figure("deep", "Training loss on CIFAR-10", CAPTION, panels, "epochs", "training loss"), stem)
    return bool(panels)


def _lines(study: Study) -> Iterable[PlottedSeries]:
    for row in study.best():
        runs = study.found(row, TEST)
        if runs:
            columns = list(zip(*([epoch["loss"] for epoch in run["history"]] for run in runs), strict=False))
            kind = row.options[row.options.index("--norm") + 1]
            dashed = "--clip" in row.options or "--form" in row.options
            yield PlottedSeries(
                row.name,
                **line_style(kind, evaluation=dashed),
                x=tuple(float(epoch) for epoch in range(1, len(columns) + 1)),
                **over_seeds(columns, statistics.mean),
                seeds=len(runs),
            )
