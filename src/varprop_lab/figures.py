"""Figures of results: series, panels and looks as plain values, and how matplotlib draws them."""

from __future__ import annotations

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import varprop as vp

from .environment import require, write_atomically
from .protocol import (
    METHODS,
    MOMENTUM,
    PAPER_BATCH,
    PAPER_GRIDS,
    PAPER_LR_MAX,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    TRAIN_STILL_LOSS,
    VALID_ACCURACY,
    VALID_LOSS,
    Method,
    Outcome,
    exact,
    grouped,
    method_label,
    method_rank,
    series_rank,
    start_label,
    start_rank,
)
from .store import Run

# Close to Okabe and Ito's palette, and apart under every kind of colour blindness; the second is for dark pages.
METHOD_COLOURS = {
    "standard": ("#4a4d50", "#e0e3e6"),
    "weight": ("#009e73", "#2bd4a4"),
    "batch": ("#0064a8", "#4aa3ff"),
    "analytic": ("#d55e00", "#ff8c42"),
    "layer": ("#9c00fc", "#783cfc"),
    "group": ("#603000", "#cc183c"),
}
DOUBLE_COLOUR = ("#d16aa8", "#cc66aa")
OTHER_COLOUR = ("#8a7a00", "#e6d44a")

METHOD_MARKERS = {"standard": "s", "weight": "^", "batch": "o", "analytic": "D", "layer": "P", "group": "X"}
DASHES = {"": "solid", "decay": "dashdot", "unit-norm": "dotted"}

# Settings of matplotlib.
LOOK = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#80868b",
    "xtick.color": "#3c4043",
    "ytick.color": "#3c4043",
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "figure.dpi": 100,
    "savefig.dpi": 150,
    "svg.hashsalt": "varprop",  # the same figure gives the same bytes
    "svg.fonttype": "path",
}
LINESTYLES: dict[str, Any] = {
    "solid": "-",
    "dashed": (0, (4, 2)),
    "dashdot": (0, (6, 2, 1.5, 2)),
    "dotted": (0, (1.2, 1.6)),
}
MARKS: dict[str, dict[str, Any]] = {
    "diverged": {"marker": "x", "s": 34, "linewidths": 1.6},
    "chosen": {"marker": "o", "s": 60, "linewidths": 1.5},
    "at bound": {"marker": "*", "s": 110, "linewidths": 0.7},
}
LEGEND_MARKS: dict[str, dict[str, Any]] = {
    "chosen": {"marker": "o", "mfc": "none", "ms": 9},
    "at bound": {"marker": "*", "ms": 11},
    "diverged": {"marker": "x", "ms": 7, "mew": 1.6},
}


def line_style(method: str, variant: str = "", evaluation: bool = False) -> dict[str, Any]:
    """Colours, dash and marker of a method in every figure, as fields of `PlottedSeries`; evaluation is dashed."""
    light, dark = DOUBLE_COLOUR if variant == "double" else METHOD_COLOURS.get(method, OTHER_COLOUR)
    dash = "dashed" if evaluation else DASHES.get(variant, "solid" if variant == "double" else "dashdot")
    marker = "v" if variant == "double" else METHOD_MARKERS.get(method, "P")
    return {"colour": light, "dark_colour": dark, "dash": dash, "marker": marker}


Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Mark:
    """A single point that means something; `y` is None where the value is infinite, drawn at the upper edge."""

    x: float
    y: float | None
    kind: Literal["diverged", "chosen", "at bound"]


@dataclass(frozen=True)
class PlottedSeries:
    """One line with its band, or a set of points; None interrupts it."""

    label: str  # in the legend
    colour: str  # on white
    dark_colour: str  # on a dark page
    dash: str  # ``solid``, ``dashed``, ``dashdot`` or ``dotted``
    marker: str  # as matplotlib names it
    x: tuple[float, ...]
    y: Values
    low: Values = ()  # lower edge of the band; empty for no band
    high: Values = ()
    points: bool = False  # whether every value is one evaluation, drawn as a marker
    seeds: int = 0  # how many runs are in it; 0 where that means nothing
    marks: tuple[Mark, ...] = ()
    rank: int = 0  # its place in the legend
    open_marker: bool = False  # hollow: a variant, not the plain method


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `bounds` are vertical lines, `missing` the labels that have no data here."""

    title: str
    series: tuple[PlottedSeries, ...]
    bounds: tuple[float, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A row of panels with common axes."""

    name: str  # of its files, and of its place in the report
    title: str
    caption: str  # what is seen, and how it was computed
    panels: tuple[Panel, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = True
    headline: bool = False  # whether it belongs into the documentation


@dataclass(frozen=True)
class CurveFigure:
    """Which values a figure of curves shows; a `headline` goes into the documentation for every bound of the search."""

    name: str
    title: str
    y_label: str
    curves: tuple[str, ...]
    y_log: bool = True
    factor: float = 1.0
    headline: bool = True
    note: str = ""


HIGH_LOSS = 2  # times that at the lowest rate of a search: a figure shows no more
ACCURACY_LABEL = "validation accuracy, %"
BN_NOTE = " Dashed: the loss of BN on the training set in evaluation mode."
CURVES = (
    CurveFigure("training", "Training loss", "running training loss", (TRAIN_LOSS, TRAIN_EVAL_LOSS), note=BN_NOTE),
    CurveFigure(
        "training-still", "Training loss without offsets", "training loss without offsets", (TRAIN_STILL_LOSS,)
    ),
    CurveFigure("validation-loss", "Validation loss", "validation loss", (VALID_LOSS,), headline=False),
    CurveFigure("validation-accuracy", "Validation accuracy", ACCURACY_LABEL, (VALID_ACCURACY,), False, 100.0),
)


def finite(value: float) -> float | None:
    """The value, or None where it is infinite or NaN."""
    return value if math.isfinite(value) else None


def rounded(value: Any) -> Any:
    """A value with five significant digits in every number, and None for what JSON cannot say."""
    if isinstance(value, float):
        return finite(float(f"{value:.5g}"))
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def curve_panel(title: str, outcomes: Sequence[Outcome], curve: CurveFigure) -> Panel:
    """Every method's curves over epochs; the second of them only of batch norm, where it is another thing."""
    lines = [
        _curve_line(runs, name, curve.factor)
        for (method, variant), runs in _by_method(outcomes).items()
        for name in (curve.curves if method == "batch" and variant in ("", MOMENTUM) else curve.curves[:1])
        if any(run.curves.get(name) for run in runs)
    ]
    return Panel(title, tuple(lines))


def search_panel(title: str, outcomes: Sequence[Outcome]) -> Panel:
    """Every evaluation of the search for the learning rate."""
    searched = [outcome for outcome in outcomes if outcome.search.trace]
    series = tuple(_search_points(runs) for runs in _by_method(searched).values())
    return Panel(title, series, bounds=tuple(sorted({outcome.bound for outcome in searched})))


def batch_size_panel(title: str, outcomes: Sequence[Outcome], curve: CurveFigure) -> Panel:
    """The last value of every method over the batch size."""
    return Panel(title, tuple(_batch_size_line(runs, curve) for runs in _by_method(outcomes).values()))


def _by_method(outcomes: Iterable[Outcome]) -> dict[tuple[Method, str], list[Outcome]]:
    """Seeds of one method and variant together, in the order of the paper."""
    groups = grouped(outcomes, lambda cell: (cell.method, cell.variant))
    return {key: groups[key] for key in sorted(groups, key=lambda key: method_rank(*key))}


def _styled(runs: Sequence[Outcome], *, evaluation: bool = False, **values: Any) -> PlottedSeries:
    method, variant = runs[0].cell.method, runs[0].cell.variant
    return PlottedSeries(
        method_label(method, variant, evaluation),
        **line_style(method, variant, evaluation),
        rank=series_rank(method, variant, evaluation),
        open_marker=bool(variant),
        **values,
    )


def over_seeds(
    columns: Sequence[Sequence[float]], centre: Callable[[Sequence[float]], float] = statistics.median
) -> dict[str, Any]:
    """Median (or another centre), smallest and largest at each position."""
    return {
        "y": tuple(centre(values) if values else None for values in columns),
        "low": tuple(min(values, default=None) for values in columns),
        "high": tuple(max(values, default=None) for values in columns),
    }


def _curve_line(runs: Sequence[Outcome], name: str, factor: float) -> PlottedSeries:
    """Over the seeds still training, epoch by epoch; crosses where one diverged."""
    curves = [[factor * value for value in run.curves.get(name, [])] for run in runs]
    epochs = range(max(map(len, curves)))
    columns = [[c[epoch] for c in curves if epoch < len(c) and math.isfinite(c[epoch])] for epoch in epochs]
    marks = tuple(_end_mark(curve) for run, curve in zip(runs, curves, strict=True) if run.diverged)
    x = tuple(epoch + 1 for epoch in epochs)
    return _styled(runs, evaluation=name == TRAIN_EVAL_LOSS, x=x, **over_seeds(columns), seeds=len(runs), marks=marks)


def _end_mark(curve: Sequence[float]) -> Mark:
    """Where a diverged run had its last finite value."""
    last = max((epoch for epoch, value in enumerate(curve, 1) if math.isfinite(value)), default=0)
    return Mark(float(max(last, 1)), curve[last - 1] if last else None, "diverged")


def _search_points(runs: Sequence[Outcome]) -> PlottedSeries:
    """The evaluations of all seeds, one line a seed; a ring at the rate chosen.

    Where training diverged is a cross, and where the loss is so high that the others would lie on one line.
    """
    points: list[tuple[float, float | None]] = []
    marks = []
    limit = HIGH_LOSS * max(min(run.search.trace)[1] for run in runs)
    for search in (run.search for run in runs):
        trace = [(rate, finite(loss) if loss <= limit else None) for rate, loss in sorted(search.trace)]
        points += [*trace, (trace[-1][0], None)]
        marks += [Mark(rate, None, "diverged") for rate, loss in trace if loss is None]
    for search in (run.search for run in runs):
        marks.append(Mark(search.lr, finite(search.loss), "at bound" if search.at_bound else "chosen"))
    x, y = zip(*points, strict=True)
    return _styled(runs, x=x, y=y, points=True, seeds=len(runs), marks=tuple(marks))


def _batch_size_line(runs: Sequence[Outcome], curve: CurveFigure) -> PlottedSeries:
    """The last values of the runs that came to their end, at each batch size."""
    by_size = grouped(sorted(runs, key=lambda run: run.cell.batch_size), lambda cell: cell.batch_size)
    ends = [[r.curves.get(curve.curves[0], []) for r in group if not r.diverged] for group in by_size.values()]
    columns = [[curve.factor * end[-1] for end in group if end and math.isfinite(end[-1])] for group in ends]
    marks = tuple(Mark(float(r.cell.batch_size), None, "diverged") for r in runs if r.diverged)
    seeds = max(map(len, by_size.values()))
    return _styled(runs, x=tuple(map(float, by_size)), **over_seeds(columns), seeds=seeds, marks=marks)


def seed_counts(every: Sequence[PlottedSeries]) -> dict[str, str]:
    """How many seeds each line has, as text after its label; nothing where all have the same."""
    counts: dict[str, set[int]] = {}
    for series in every:
        counts.setdefault(series.label, set()).add(series.seeds)
    if len(set().union(*counts.values())) < 2:
        return {}
    spans = {label: (min(seeds), max(seeds)) for label, seeds in counts.items()}
    return {
        label: f" ({most if fewest == most else f'{fewest} to {most}'} seed{'s' * (most != 1)})"
        for label, (fewest, most) in spans.items()
    }


# --- which figures an experiment gets ---

Setting = tuple[float, int]  # upper bound of the search, batch size
MakePanel = Callable[[str, Sequence[Outcome]], Panel]


def figures_of(run: Run) -> list[Figure]:
    """Every figure of an experiment, the most important first; none where nothing was trained."""
    if run.experiment == "relu":
        return [relu_figure()]
    if not run.outcomes:
        return []
    if run.experiment == "naive":
        return [_naive_figure(run, curve) for curve in _measured(run)]
    settings = sorted({setting_of(o) for o in run.outcomes}, key=lambda s: (s != _main_setting(run), s))
    curves = [_curve_figure(run, curve, setting) for curve in _measured(run) for setting in settings]
    searched = {setting_of(outcome) for outcome in run.outcomes if outcome.search.trace}
    searches = [_search_figure(run, setting) for setting in settings if setting in searched]
    return [*_batch_figures(run), *curves, *searches]


def _measured(run: Run) -> list[CurveFigure]:
    """The curves there are: targets that are no classes have no accuracy."""
    names = {name for outcome in run.outcomes for name in outcome.curves}
    return [curve for curve in CURVES if curve.name == "training" or curve.curves[0] in names]


def setting_of(outcome: Outcome) -> Setting:
    """The bound and the batch size, which are equal throughout one figure."""
    return outcome.cell.lr_max, outcome.cell.batch_size


def _main_setting(run: Run) -> Setting:
    """The paper's bound and batch size where they were run, else the nearest to them."""
    settings = {setting_of(outcome) for outcome in run.outcomes}
    return min(settings, key=lambda s: (abs(math.log(s[0] / PAPER_LR_MAX)), abs(s[1] - PAPER_BATCH)))


def _figure_name(run: Run, stem: str, setting: Setting) -> str:
    """The stem for the main setting; what differs from it is added for the others."""
    (bound, batch), (main_bound, main_batch) = setting, _main_setting(run)
    suffixes = [f"lr{exact(bound)}"] * (bound != main_bound) + [f"b{batch}"] * (batch != main_batch)
    return "-".join([stem, *suffixes])


def setting_text(setting: Setting, outcomes: Sequence[Outcome]) -> str:
    """A setting of these outcomes in a title."""
    return f"{_rate_text(setting[0], outcomes)}, batch\u00a0{setting[1]}"


def _rate_text(bound: float, outcomes: Sequence[Outcome]) -> str:
    """The bound of the search, or the rate itself where there was no search."""
    searched = any(outcome.search.trace for outcome in outcomes)
    return f"lr\u00a0{'≤' if searched else '='}\u00a0{bound:g}"


def _panels_by_start(run: Run, outcomes: Sequence[Outcome], make: MakePanel) -> tuple[Panel, ...]:
    """One panel for each start of the experiment, with the names of the methods that are missing in it."""
    paper = run.experiment in PAPER_GRIDS
    starts = {o.cell.start for o in run.outcomes} | set(STARTS if paper else ())
    labels = {method_label(o.cell.method, o.cell.variant): method_rank(o.cell.method, o.cell.variant) for o in outcomes}
    labels |= {method_label(method): method_rank(method) for method in METHODS if paper}
    panels = []
    for start in sorted(starts, key=start_rank):
        panel = make(start_label(start), [o for o in outcomes if o.cell.start == start])
        there = {series.label for series in panel.series}
        missing = tuple(label for label in sorted(labels, key=lambda name: labels[name]) if label not in there)
        panels.append(replace(panel, missing=missing))
    return tuple(panels)


def _caption(outcomes: Sequence[Outcome], curve: CurveFigure) -> str:
    """The meaning of dashes, lines, bands and crosses, as far as they occur."""
    note = curve.note if any(o.cell.method == "batch" for o in outcomes) else ""
    crosses = " A cross marks where a run diverged." if any(o.diverged for o in outcomes) else ""
    return f"{note} {_seeds_text(outcomes)}{crosses}"


def _seeds_text(outcomes: Sequence[Outcome]) -> str:
    """How many seeds there are, and what the line and the band mean."""
    counts = sorted({len(runs) for runs in grouped(outcomes, lambda cell: replace(cell, seed=0)).values()})
    if counts == [1]:
        return "One seed."
    seeds = f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    return f"{seeds}: the line is their median, the band reaches from the smallest to the largest."


def _curve_figure(run: Run, curve: CurveFigure, setting: Setting) -> Figure:
    outcomes = [o for o in run.outcomes if setting_of(o) == setting]
    return Figure(
        _figure_name(run, curve.name, setting),
        f"{curve.title} ({setting_text(setting, outcomes)})",
        f"{curve.title} over epochs.{_caption(outcomes, curve)}",
        _panels_by_start(run, outcomes, lambda title, chosen: curve_panel(title, chosen, curve)),
        "epoch",
        curve.y_label,
        y_log=curve.y_log,
        headline=setting == _main_setting(run) or (curve.headline and setting[1] == _main_setting(run)[1]),
    )


def _naive_figure(run: Run, curve: CurveFigure) -> Figure:
    """All methods at one learning rate, each from its own start: one panel a rate."""
    rates = sorted({o.cell.lr_max for o in run.outcomes})
    panels = [curve_panel(f"lr = {value:g}", run.select(lr_max=value), curve) for value in rates]
    return Figure(
        f"naive-{curve.name}",
        f"{curve.title}, each method from its own start",
        f"The comparison not to make: w = 2w' is the standard network with the weights of every linear layer written "
        f"as twice a parameter, a change of units alone.{_caption(run.outcomes, curve)}",
        tuple(panels),
        "epoch",
        curve.y_label,
        y_log=curve.y_log,
        headline=curve.name == "training",
    )


def _search_figure(run: Run, setting: Setting) -> Figure:
    outcomes = [o for o in run.outcomes if setting_of(o) == setting]
    return Figure(
        _figure_name(run, "learning-rate", setting),
        f"Search for the learning rate ({setting_text(setting, outcomes)})",
        "Running training loss after a few epochs at each rate that the search tried; the lines join one seed's "
        "evaluations. Ring: the rate chosen; star: chosen, and at the bound of the search (dotted line); cross at the "
        f"upper edge: diverged, or above {HIGH_LOSS} times the loss at the lowest rate tried.",
        _panels_by_start(run, outcomes, search_panel),
        "learning rate",
        "running training loss",
        x_log=True,
        headline=setting == _main_setting(run),
    )


def _batch_figures(run: Run) -> list[Figure]:
    """Last values over the batch size, where more than one was run at a bound."""
    by_bound = grouped(run.outcomes, lambda cell: cell.lr_max)
    several = {bound: group for bound, group in by_bound.items() if len({o.cell.batch_size for o in group}) > 1}
    return [_batch_figure(run, curve, bound, group) for bound, group in several.items() for curve in _measured(run)]


def _batch_figure(run: Run, curve: CurveFigure, bound: float, outcomes: Sequence[Outcome]) -> Figure:
    return Figure(
        _figure_name(run, f"batch-size-{curve.name}", (bound, _main_setting(run)[1])),
        f"{curve.title} at the end, over batch size ({_rate_text(bound, outcomes)})",
        f"{_seeds_text(outcomes)} A cross at the upper edge stands for a run that diverged.",
        _panels_by_start(run, outcomes, lambda title, chosen: batch_size_panel(title, chosen, curve)),
        "batch size",
        curve.y_label,
        x_log=True,
        y_log=curve.y_log,
        headline=curve.headline,
    )


def relu_figure() -> Figure:
    """ReLU of a Gaussian with standard deviation 1 over its mean, beside the linearisation at the mean."""
    mean = torch.linspace(-4.0, 6.0, 201, dtype=torch.float64)[None]
    x = tuple(mean[0].tolist())
    exact = vp.propagate(torch.nn.ReLU(), vp.Moments(mean, torch.ones_like(mean)), mean).output
    centre, spread = exact.mean[0], exact.var[0].sqrt()
    kinked, slope = mean[0].relu(), torch.where(mean[0].abs() < 1e-9, math.nan, (mean[0] > 0).double())
    density = 2 * torch.exp(-(mean[0] - 3).square() / 2) / math.sqrt(2 * math.pi)

    def line(label: str, method: str, dash: str, y: torch.Tensor, by: torch.Tensor | None = None) -> PlottedSeries:
        low, high = ((), ()) if by is None else (tuple((y - by).tolist()), tuple((y + by).tolist()))
        values = tuple(map(finite, y.tolist()))
        return PlottedSeries(label, *METHOD_COLOURS[method], dash, "", x, values, low, high)

    edges = (kinked, kinked - 3 * slope, kinked + 3 * slope)
    series = (
        line("propagated: mean ± 3 std", "batch", "solid", centre, 3 * spread),
        *(line("linearised at the mean", "analytic", "dashed", edge) for edge in edges),
        line("ReLU", "standard", "dotted", kinked),
        line("density of N(3, 1), × 2", "weight", "dashdot", density),
    )
    caption = (
        "Mean of max(0, X) for X ~ N(μ, 1) over μ, with the band of three standard deviations, as vp.propagate gives "
        "it, beside what linearising at μ gives (dashed: mean and mean ± 3 std): no spread at all left of 0. For "
        "another σ both axes scale with σ."
    )
    panels = (Panel("X ~ N(μ, 1)", series),)
    title = "mean and spread over the input mean"
    return Figure("relu", title, caption, panels, "mean of the input", "output", y_log=False, headline=True)


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
        labels = [label for label, _ in legend]
        lines, per_line = _legend_shape(labels, width)
        height = PANEL_HEIGHT * rows + 0.55 + 0.2 * lines
        canvas = require("matplotlib.figure", "A figure").Figure(figsize=(width, height), layout="constrained")
        axes = list(canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for panel, axis in zip(figure.panels, axes, strict=False):
            _draw_panel(panel, axis, figure)
        _label_axes(axes, figure, columns)
        if legend:
            handles = [require("matplotlib.lines", "A figure").Line2D([], [], **look) for _, look in legend]
            place = {"loc": "outside lower center", "ncols": per_line}
            canvas.legend(handles, labels, **place, markerscale=0.8, columnspacing=1.4)
        title = f"{heading}: {figure.title}" if heading else figure.title
        canvas.suptitle(textwrap.fill(title, int(14 * width)), fontsize=10.5)
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=kind, metadata=metadata)
            write_atomically(stem.with_name(f"{stem.name}.{kind}"), buffer.getvalue())
            canvas.set_layout_engine("none")  # the layout is computed once


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
