"""Which figures an experiment gets, in the grouping of the paper: one panel a start, methods as lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import varprop as vp

from ..protocol.experiments import PAPER_BATCH, PAPER_GRIDS, PAPER_LR_MAX
from ..protocol.records import (
    METHODS,
    STARTS,
    Outcome,
    exact,
    grouped,
    method_label,
    method_rank,
    start_label,
    start_rank,
)
from ..store.tables import Run
from .series import (
    CURVES,
    HIGH_LOSS,
    METHOD_COLOURS,
    CurveFigure,
    Figure,
    Panel,
    PlottedSeries,
    batch_size_panel,
    curve_panel,
    finite,
    search_panel,
)

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
