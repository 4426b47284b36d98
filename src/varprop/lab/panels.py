"""What a figure shows, before anything is drawn: PNG, SVG and the interactive page all draw these same values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Outcome
from .style import method_label, method_rank, series_rank, style

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Mark:
    """A single point that means something; `y` is None where the value is infinite, drawn at the upper edge."""

    x: float
    y: float | None
    kind: Literal["diverged", "chosen", "at bound"]


@dataclass(frozen=True)
class Series:
    """One line with its band, or a set of points; None interrupts it.

    Attributes:
        label: In the legend.
        colour: On white.
        dark_colour: On a dark page.
        dash: ``solid``, ``dashed``, ``dashdot`` or ``dotted``.
        marker: As matplotlib names it.
        x: Positions.
        y: Values there.
        low: Lower edge of the band; empty for no band.
        high: Upper edge.
        points: Whether every value is one evaluation, drawn as a marker.
        seeds: How many runs are in it; 0 where that means nothing.
        marks: Points to be seen.
        rank: Its place in the legend.
        open_marker: Whether its markers are hollow, which tells a variant from the plain method.
    """

    label: str
    colour: str
    dark_colour: str
    dash: str
    marker: str
    x: tuple[float, ...]
    y: Values
    low: Values = ()
    high: Values = ()
    points: bool = False
    seeds: int = 0
    marks: tuple[Mark, ...] = ()
    rank: int = 0
    open_marker: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `bounds` are vertical lines, `missing` the labels that have no data here."""

    title: str
    series: tuple[Series, ...]
    bounds: tuple[float, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A row of panels with common axes.

    Attributes:
        name: Of its files, and of its place in the report.
        title: In a heading.
        caption: What is seen, and how it was computed.
        panels: From left to right.
        x_label: Below every panel.
        y_label: Left of the first.
        x_log: Whether the horizontal axis is logarithmic.
        y_log: Whether the vertical one is.
        headline: Whether it belongs into the documentation.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = True
    headline: bool = False


@dataclass(frozen=True)
class Curve:
    """Which values a figure of curves shows; a `headline` goes into the documentation for every bound of the search."""

    name: str
    title: str
    y_label: str
    curves: tuple[str, ...]
    y_log: bool = True
    factor: float = 1.0
    headline: bool = True
    note: str = ""


ACCURACY_LABEL = "validation accuracy, %"
BN_NOTE = " Dashed: the loss of BN on the training set in evaluation mode."
CURVES = (
    Curve("training", "Training loss", "running training loss", (TRAIN_LOSS, TRAIN_EVAL_LOSS), note=BN_NOTE),
    Curve("validation-loss", "Validation loss", "validation loss", (VALID_LOSS,), headline=False),
    Curve("validation-accuracy", "Validation accuracy", ACCURACY_LABEL, (VALID_ACCURACY,), False, 100.0),
)


def finite(value: float) -> float | None:
    """The value, or None where it is infinite or NaN."""
    return value if math.isfinite(value) else None


def by_method(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    """Seeds of one method and variant together, in the order of the paper."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.cell.method, outcome.cell.variant), []).append(outcome)
    return {key: groups[key] for key in sorted(groups, key=lambda key: method_rank(*key))}


def curve_panel(title: str, outcomes: Sequence[Outcome], curve: Curve) -> Panel:
    """Every method's curves over epochs; of variants only the first, to keep the panel readable."""
    lines = [
        median_line(runs, name, curve.factor)
        for (_, variant), runs in by_method(outcomes).items()
        for name in (curve.curves[:1] if variant else curve.curves)
        if any(run.curves.get(name) for run in runs)
    ]
    return Panel(title, tuple(lines))


def median_line(runs: Sequence[Outcome], name: str, factor: float = 1.0) -> Series:
    """Median, smallest and largest over the seeds still training, epoch by epoch; crosses where one diverged."""
    curves = [[factor * value for value in run.curves.get(name, [])] for run in runs]
    columns = [column(curves, epoch) for epoch in range(max(map(len, curves)))]
    cell = runs[0].cell
    return replace(
        blank(cell.method, cell.variant, name == TRAIN_EVAL_LOSS),
        x=tuple(range(1, len(columns) + 1)),
        y=tuple(statistics.median(values) if values else None for values in columns),
        low=tuple(min(values, default=None) for values in columns),
        high=tuple(max(values, default=None) for values in columns),
        seeds=len(runs),
        marks=tuple(end_mark(curve) for run, curve in zip(runs, curves, strict=True) if run.diverged),
    )


def column(curves: Sequence[Sequence[float]], epoch: int) -> list[float]:
    """The finite values of one epoch."""
    return [curve[epoch] for curve in curves if epoch < len(curve) and math.isfinite(curve[epoch])]


def end_mark(curve: Sequence[float]) -> Mark:
    """Where a diverged run had its last finite value."""
    last = max((epoch for epoch, value in enumerate(curve, 1) if math.isfinite(value)), default=0)
    return Mark(float(max(last, 1)), curve[last - 1] if last else None, "diverged")


def blank(method: str, variant: str = "", evaluation: bool = False) -> Series:
    """A series with the look of its method and nothing in it."""
    look = style(method, variant, evaluation)
    label = method_label(method, variant, evaluation)
    rank = series_rank(method, variant, evaluation)
    empty = Series(label, look.colour, look.dark_colour, look.dash, look.marker, (), ())
    return replace(empty, rank=rank, open_marker=bool(variant))


def search_panel(title: str, outcomes: Sequence[Outcome]) -> Panel:
    """Every evaluation of the search for the learning rate."""
    searched = [outcome for outcome in outcomes if outcome.search.trace]
    series = tuple(search_points(runs) for runs in by_method(searched).values())
    return Panel(title, series, bounds=tuple(sorted({outcome.cell.lr_max for outcome in searched})))


def search_points(runs: Sequence[Outcome]) -> Series:
    """The evaluations of all seeds, one line a seed; crosses where training diverged, a ring at the rate chosen."""
    points: list[tuple[float, float | None]] = []
    for run in runs:
        trace = sorted(run.search.trace)
        points += [*((rate, finite(loss)) for rate, loss in trace), (trace[-1][0], None)]
    crosses = [Mark(rate, None, "diverged") for run in runs for rate, loss in run.search.trace if finite(loss) is None]
    chosen = [Mark(run.search.lr, finite(run.search.loss), chosen_kind(run)) for run in runs]
    x, y = zip(*points, strict=True)
    cell = runs[0].cell
    filled = replace(blank(cell.method, cell.variant), x=x, y=y, points=True, seeds=len(runs))
    return replace(filled, marks=(*crosses, *chosen))


def chosen_kind(run: Outcome) -> Literal["chosen", "at bound"]:
    """Whether the rate chosen sits at the bound of the search."""
    return "at bound" if run.search.at_bound else "chosen"


def batch_panel(title: str, outcomes: Sequence[Outcome], curve: Curve) -> Panel:
    """The last value of every method over the batch size."""
    groups = by_method(outcomes)
    return Panel(title, tuple(batch_line(runs, curve) for runs in groups.values()))


def batch_line(runs: Sequence[Outcome], curve: Curve) -> Series:
    """Median, smallest and largest last value over seeds, at each batch size."""
    sizes = sorted({run.cell.batch_size for run in runs})
    columns = [last_values([r for r in runs if r.cell.batch_size == size], curve) for size in sizes]
    cell = runs[0].cell
    return replace(
        blank(cell.method, cell.variant),
        x=tuple(map(float, sizes)),
        y=tuple(statistics.median(values) if values else None for values in columns),
        low=tuple(min(values, default=None) for values in columns),
        high=tuple(max(values, default=None) for values in columns),
        seeds=max(sum(run.cell.batch_size == size for run in runs) for size in sizes),
        marks=tuple(Mark(float(r.cell.batch_size), None, "diverged") for r in runs if r.diverged),
    )


def last_values(runs: Sequence[Outcome], curve: Curve) -> list[float]:
    """The last value of each run that came to its end."""
    ends = [run.curves.get(curve.curves[0], []) for run in runs if not run.diverged]
    return [curve.factor * end[-1] for end in ends if end and math.isfinite(end[-1])]


def seed_counts(every: Sequence[Series]) -> dict[str, str]:
    """How many seeds each line has, as text after its label; nothing where all have the same."""
    counts: dict[str, set[int]] = {}
    for series in every:
        counts.setdefault(series.label, set()).add(series.seeds)
    if len(set().union(*counts.values())) < 2:
        return {}
    return {label: f" ({seeds_of_line(min(found), max(found))})" for label, found in counts.items()}


def seeds_of_line(fewest: int, most: int) -> str:
    """``1 seed``, ``3 seeds``, or ``2 to 3 seeds`` where panels differ."""
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"{number} seed{'s' * (most != 1)}"
