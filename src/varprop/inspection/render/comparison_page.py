"""The page of a comparison, both states in every plot, and its short form for a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..data import Change, ComparisonData
from ..findings.differences import NEITHER_FOUND
from ..numbers.row import SHARES, ReportRow
from .findings import comparison_groups, comparison_items
from .format import count, number
from .page import Page, render_summary
from .plots import Axis, Plot, PlotSeries, axis_of, number_of, of, plotted, signed_axis, spread_series, total_series
from .report_page import MEANINGS
from .table import Column, Reader, number_column, share_column, text_column

SeriesMaker = Callable[[Sequence[ReportRow], str, str], PlotSeries]
CHANGES = 20  # that a notebook shows
CAPTIONS = {
    "std": "Root mean square over the units of each layer; bands show how units differ.",
    "gradient": "Expected scale of the gradient summed over positions, for a gradient of variance 1 at the output.",
    "mean": "Average over the units of each layer.",
    "units": "Share of the units of each activation that are saturated, dead or always on.",
}


def comparison_page(comparison: ComparisonData) -> Page:
    """Both states in one picture, with what is new and what is gone."""
    rows, (first, second) = [change.after for change in comparison.changes], comparison.names
    return Page(
        title=f"{comparison.after.model}: {first} and {second}",
        heading=f"{comparison.after.model}: {first} → {second}",
        lead="Expected statistics of every layer in two states of one model, computed from the weights.",
        facts=_facts(comparison),
        findings_heading="Findings: what changed",
        findings=comparison_groups(comparison.findings),
        no_findings=NEITHER_FOUND,
        plots=comparison_plots(comparison),
        rows=rows,
        columns=_columns(first, second),
        subjects=comparison.changes,
        judged=comparison.after.findings,
        table_note=_missing(comparison),
    )


def comparison_summary(comparison: ComparisonData) -> str:
    """Findings new, gone and stayed, and the largest changes."""
    first, second = comparison.names
    columns = [column for column in _columns(first, second) if column.name.startswith(("std", "gradient"))]
    names = (
        text_column("layer", lambda change: change.label),
        text_column("class", lambda change: change.after.class_name),
    )
    findings = comparison_items(comparison.findings)
    about = {"title": comparison.after.model, "remark": f"{first} → {second}", "no_findings": NEITHER_FOUND}
    return render_summary((*names, *columns), comparison.largest(CHANGES), findings=findings, **about)


def _facts(comparison: ComparisonData) -> list[tuple[str, str]]:
    before, after = comparison.before, comparison.after
    layers = [change for change in comparison.changes if change.after.is_layer]
    known = [("parameters", count(after.parameters)), ("layers in both", str(len(layers)))]
    if before.gradient_ratio is not None and after.gradient_ratio is not None:
        ratios = f"{number(before.gradient_ratio)} → {number(after.gradient_ratio)} times"
        known.append(("gradient, first to last layer", ratios))
    if largest := comparison.largest(1):
        known.append(("largest change", largest[0].label))
    return known


def comparison_plots(comparison: ComparisonData) -> list[Plot]:
    """Forward, backward, and units, both states in each."""
    std, mean = (partial(spread_series, what) for what in ("std", "mean"))
    found = [
        _both(comparison, std, "std", "Signal, forward", "standard deviation", axis_of),
        _both(comparison, total_series, "gradient", "Gradient, backward", "gradient scale", axis_of),
        _both(comparison, mean, "mean", "Mean, forward", "mean", signed_axis),
    ]
    units = _both(comparison, _idle_series, "units", "Units without effect", "units, %", lambda _: "linear", True)
    return [*found, units] if any(value is not None for value in units.series[0].y) else found


def _both(
    comparison: ComparisonData,
    make: SeriesMaker,
    id: str,
    title: str,
    label: str,
    axis: Callable[[Sequence[float | None]], Axis],
    percent: bool = False,
) -> Plot:
    rows = [change.after for change in comparison.changes]
    states = ([change.before for change in comparison.changes], rows)
    looks = ("before", "after")
    series = tuple(make(*state) for state in zip(states, comparison.names, looks, strict=True))
    values = [value for one in series for value in plotted(rows, one.y)]
    return Plot(id, title, CAPTIONS[id], label, axis(values), series, percent=percent)


def _idle_series(rows: Sequence[ReportRow], name: str, look: str) -> PlotSeries:
    def idle(row: ReportRow) -> float | None:
        known = [row.numbers[share] for share in SHARES if share in row.numbers]
        return min(100.0, 100 * sum(known)) if known else None

    return PlotSeries(name, look, of(rows, idle), marker="s" if look == "before" else "o")


def _factor(change: Change) -> float:
    return 2**change.size if change.size < 1000 else float("inf")


def _columns(first: str, second: str) -> list[Column]:
    """Of changes: every quantity in both states, with its factor."""

    def both(make: Callable[..., Column], what: str, value: Reader, meaning: str = "share of units") -> list[Column]:
        return [
            make(f"{what}, {first}", lambda change: value(change.before), meaning=f"{meaning}: {first}"),
            make(f"{what}, {second}", lambda change: value(change.after), meaning=f"{meaning}: {second}"),
        ]

    times = f"{second} over {first}"
    return [
        text_column("class", lambda change: change.after.class_name or "operation", meaning=MEANINGS["class"]),
        number_column("change", _factor, "the larger of the factors of std and gradient, or of their inverses", True),
        *both(number_column, "std", number_of("std"), MEANINGS["std"]),
        number_column("std, times", lambda change: change.std_factor, times),
        *both(number_column, "gradient", lambda row: row.gradient_total, "gradient summed over positions"),
        number_column("gradient, times", lambda change: change.gradient_factor, times),
        *both(number_column, "mean", number_of("mean"), MEANINGS["mean"]),
        *(column for name in SHARES for column in both(share_column, name.replace("_", " "), number_of(name))),
    ]


def _missing(comparison: ComparisonData) -> str:
    parts = [
        f"{len(labels)} row{'s' if len(labels) > 1 else ''} only in {name}, such as {labels[0]}"
        for name, labels in zip(comparison.names, (comparison.only_before, comparison.only_after), strict=True)
        if labels
    ]
    return "; ".join(parts) + "." if parts else ""
