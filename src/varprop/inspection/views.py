"""The contents of the pages of reports and comparisons: facts, findings, plots, columns; a picture of two states."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import VarpropError
from .data import Change, ComparisonData, ReportData
from .findings import NEITHER_FOUND, NOTHING_FOUND
from .page import (
    Axis,
    Column,
    Page,
    Plot,
    PlotSeries,
    Reader,
    TableCell,
    axis_of,
    comparison_groups,
    comparison_items,
    count,
    measured_series,
    number,
    number_column,
    number_of,
    per_row,
    percent,
    plotted,
    render_summary,
    report_groups,
    report_items,
    rough,
    severity_counts,
    share_column,
    signed_axis,
    spread_series,
    text_column,
    total_series,
)
from .rows import SHARES, ReportRow
from .text import shown

LEAD = "Expected statistics of every layer, computed from the weights and the mean and variance of the input."
NOTEBOOK = {"mean", "std", "gain", "shift", "gradient", "saturated", "dead", "always on"}


def _measured(what: str) -> Callable[[ReportRow], TableCell]:
    def read(row: ReportRow) -> TableCell:
        seen = row.measured.get(what)
        return TableCell(f"{number(seen['value'])} ± {rough(seen['error'])}", seen["value"]) if seen else TableCell("")

    return read


def _measured_std(row: ReportRow) -> float | None:
    return row.measured.get("std", {}).get("value")


def _ratio(row: ReportRow) -> float | None:
    seen = _measured_std(row)
    return row.numbers["std"] / seen if seen else None


COLUMNS = (
    text_column("class", lambda row: row.class_name or "operation", "class of the module, or the operation"),
    number_column("mean", number_of("mean"), "mean, averaged over the units"),
    number_column("std", number_of("std"), "standard deviation, root mean square over the units"),
    number_column("growth", lambda row: row.growth, "std over that of the model's input"),
    number_column(
        "gain", lambda row: row.gain, "root mean square slope of an activation; std out over std in otherwise"
    ),
    share_column(
        "shift", number_of("shift"), "share of the mean square that is constant; near 100 % units hardly vary"
    ),
    number_column("gradient", number_of("gradient"), "scale of one element's gradient, for variance 1 at the output"),
    number_column("summed", lambda row: row.gradient_total, "gradient summed over positions, to compare resolutions"),
    share_column("saturated", number_of("saturated"), "units in a flat part of their activation most of the time"),
    share_column("dead", number_of("dead"), "units whose rectifier is on less than once in a thousand times"),
    share_column(
        "always on", number_of("always_on"), "units whose rectifier is off less than once in a thousand times"
    ),
    Column(
        "rank",
        lambda row: TableCell("" if row.rank is None else f"{row.rank:.0f} of {row.full_rank}", row.rank),
        "effective rank of the weight, of the largest that it could have: near 1 all units are copies",
    ),
    number_column(
        "on trial",
        lambda row: row.trial_ratio,
        "std on a few random inputs over the computed one where these differ: units are not independent",
    ),
    text_column(
        "status",
        lambda row: row.status + (" ~" if row.gradient_status == "approximate" else ""),
        "exact if units are Gaussian, and independent unless covariances were followed; approximate; sampled; "
        "~ if only the gradient is approximate",
        lambda row: "; ".join(filter(None, [*row.reasons, row.gradient_reason])),
    ),
    text_column(
        "extents",
        lambda row: row.extents_text.replace("x", "×"),
        "of the result, (n) where one unit stands for n positions",
    ),
    Column("measured mean", _measured("mean"), "mean on the inputs of the check, with its standard error"),
    Column("measured std", _measured("std"), "standard deviation on the inputs of the check, with its standard error"),
    number_column("ratio", _ratio, "analytic std over the measured one: 1 is agreement"),
)
MEANINGS = {column.name: column.meaning for column in COLUMNS}
MEASURED = 3  # of them are there after a check only
NOTEBOOK_COLUMNS = (
    text_column("layer", lambda row: row.indented),
    text_column("class", lambda row: row.class_name),
    *(column for column in COLUMNS if column.name in NOTEBOOK),
)


def report_page(report: ReportData) -> Page:
    """Everything a report knows, for people."""
    return Page(
        title=f"{report.model}: inspection",
        heading=report.model,
        lead=LEAD,
        facts=_report_facts(report),
        findings_heading=f"Findings: {severity_counts(report.findings)}",
        findings=report_groups(report.findings),
        no_findings=NOTHING_FOUND,
        plots=_plots(report),
        rows=report.rows,
        columns=COLUMNS if report.check else COLUMNS[:-MEASURED],
        subjects=report.rows,
        judged=report.findings,
    )


def report_summary(report: ReportData) -> str:
    """Findings and the table."""
    ratio = report.gradient_ratio
    remark = f"{count(report.parameters)} parameters"
    remark += f", gradient first to last {number(ratio)}" if ratio is not None else ""
    columns = NOTEBOOK_COLUMNS + ((number_column("measured std", _measured_std),) if report.check else ())
    findings = report_items(report.findings)
    about = {"title": report.model, "remark": remark, "no_findings": NOTHING_FOUND}
    return render_summary(columns, shown(report.rows), findings=findings, **about)


def _report_facts(report: ReportData) -> list[tuple[str, str]]:
    """Facts about the model, by name."""
    layers = [row for row in report.rows if row.is_layer]
    inexact = sum(row.status != "exact" for row in layers)
    status = f"of these {inexact} approximate" if inexact else report.assumption
    facts = [
        ("parameters", count(report.parameters)),
        ("input", "; ".join(map(_input, report.inputs))),
        ("layers", f"{len(layers)}, {status}"),
    ]
    if report.gradient_ratio is not None:
        facts.append(("gradient, first to last layer", f"{number(report.gradient_ratio)} times"))
    return facts + ([("checked on", report.measured_on)] if report.check else [])


def _input(about: dict[str, Any]) -> str:
    shape = "×".join(map(str, about["extents"]))
    return f"{shape}, mean {number(about['mean'])}, std {number(about['std'])}" if "mean" in about else shape


def _plots(report: ReportData) -> list[Plot]:
    """Forward and backward by depth, units, and the check where there was one."""
    rows, check = report.rows, bool(report.check)
    plots = [_std_plot(rows, check), _gradient_plot(rows, check), _mean_plot(rows, check), *_units_plot(rows)]
    if check:
        plots.append(_scatter(rows, "std", "standard deviation", axis_of))
        plots.append(_scatter(rows, "mean", "mean", signed_axis))
        plots.append(_scatter(rows, "gradient", "gradient scale", axis_of))
    return plots


def _seen(rows: Sequence[ReportRow], what: str, check: bool, name: str = "measured") -> tuple[PlotSeries, ...]:
    return (measured_series(rows, what, name),) if check else ()


def _std_plot(rows: Sequence[ReportRow], check: bool) -> Plot:
    main = spread_series("std", rows, "standard deviation", "main")
    caption = "The layer's standard deviation is the root mean square over its units; bands show how units differ."
    axis, series = axis_of(plotted(rows, main.y)), (main, *_seen(rows, "std", check))
    return Plot("std", "Signal, forward", caption, "standard deviation", axis, series)


def _mean_plot(rows: Sequence[ReportRow], check: bool) -> Plot:
    main = spread_series("mean", rows, "mean", "main")
    caption = "Means of the units; far from zero beside the standard deviation, a layer mostly passes on a constant."
    axis = signed_axis([*plotted(rows, main.low), *plotted(rows, main.high)])
    return Plot("mean", "Mean, forward", caption, "mean", axis, (main, *_seen(rows, "mean", check)))


def _gradient_plot(rows: Sequence[ReportRow], check: bool) -> Plot:
    single = PlotSeries("of one element", "second", per_row(rows, number_of("gradient")), dashed=True)
    total = total_series(rows, "summed over positions", "main")
    differ = total.y != single.y
    series: tuple[PlotSeries, ...] = (total, single) if differ else (replace(total, name="gradient scale"),)
    name = "of one element, measured" if differ else "measured"
    caption = (
        "Expected scale of the gradient that reaches each layer, for a gradient of variance 1 at the output. "
        "Summed over positions it can be compared between layers of different resolution."
    )
    axis = axis_of(value for one_of in series for value in plotted(rows, one_of.y))
    series += _seen(rows, "gradient", check, name)
    return Plot("gradient", "Gradient, backward", caption, "gradient scale", axis, series)


def _units_plot(rows: Sequence[ReportRow]) -> list[Plot]:
    """Saturated, dead and always-on units; nothing where no activation can be any of these."""
    series = [
        PlotSeries(name.replace("_", " "), name, per_row(rows, number_of(name, 100.0)), marker=marker)
        for name, marker in zip(SHARES, ("o", "^", "s"), strict=True)
    ]
    applicable = tuple(series_of for series_of in series if any(value is not None for value in series_of.y))
    caption = "Share of the units of each activation that are saturated, dead (nearly never on) or always on."
    plot = Plot("units", "Units without effect", caption, "units, %", "linear", applicable, percent=True)
    return [plot] if applicable else []


def _scatter(rows: Sequence[ReportRow], what: str, name: str, axis: Callable[[Iterable[float | None]], Axis]) -> Plot:
    """Analytic against measured numbers, one point a layer."""
    seen, computed = measured_series(rows, what, name), per_row(rows, number_of(what))
    series = PlotSeries(name, "main", computed, error=seen.error, x=seen.y, marker="circle")
    ratios = [a / b for a, b in zip(plotted(rows, computed), plotted(rows, seen.y), strict=True) if a and b]
    caption = "Each point is a layer, bars are standard errors; on the line both agree."
    if what != "mean" and ratios:
        caption += f" Median difference: {percent(statistics.median(abs(ratio - 1) for ratio in ratios))}."
    values = [*plotted(rows, computed), *plotted(rows, seen.y)]
    return Plot(f"check-{what}", f"Check: {name}", caption, name, axis(values), (series,), "scatter")


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
        facts=_comparison_facts(comparison),
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
    label = text_column("layer", lambda change: change.label)
    name = text_column("class", lambda change: change.after.class_name)
    findings = comparison_items(comparison.findings)
    about = {"title": comparison.after.model, "remark": f"{first} → {second}", "no_findings": NEITHER_FOUND}
    return render_summary((label, name, *columns), comparison.largest(CHANGES), findings=findings, **about)


def _comparison_facts(comparison: ComparisonData) -> list[tuple[str, str]]:
    before, after = comparison.before, comparison.after
    layers = [change for change in comparison.changes if change.after.is_layer]
    facts = [("parameters", count(after.parameters)), ("layers in both", str(len(layers)))]
    if before.gradient_ratio is not None and after.gradient_ratio is not None:
        ratios = f"{number(before.gradient_ratio)} → {number(after.gradient_ratio)} times"
        facts.append(("gradient, first to last layer", ratios))
    if largest := comparison.largest(1):
        facts.append(("largest change", largest[0].label))
    return facts


def comparison_plots(comparison: ComparisonData) -> list[Plot]:
    """Forward, backward, and units, both states in each."""
    std, mean = (partial(spread_series, what) for what in ("std", "mean"))
    plots = [
        _of_two_states(comparison, std, "std", "Signal, forward", "standard deviation", axis_of),
        _of_two_states(comparison, total_series, "gradient", "Gradient, backward", "gradient scale", axis_of),
        _of_two_states(comparison, mean, "mean", "Mean, forward", "mean", signed_axis),
    ]
    units = _of_two_states(
        comparison, _idle_series, "units", "Units without effect", "units, %", lambda _: "linear", True
    )
    return [*plots, units] if any(value is not None for value in units.series[0].y) else plots


def _of_two_states(
    comparison: ComparisonData,
    make: SeriesMaker,
    id: str,
    title: str,
    label: str,
    axis: Callable[[Sequence[float | None]], Axis],
    percent: bool = False,
) -> Plot:
    before, after = zip(*((change.before, change.after) for change in comparison.changes), strict=True)
    first, second = comparison.names
    series = make(before, first, "before"), make(after, second, "after")
    values = [value for state in series for value in plotted(after, state.y)]
    return Plot(id, title, CAPTIONS[id], label, axis(values), series, percent=percent)


def _idle_series(rows: Sequence[ReportRow], name: str, look: str) -> PlotSeries:
    def idle(row: ReportRow) -> float | None:
        shares = [row.numbers[share] for share in SHARES if share in row.numbers]
        return min(100.0, 100 * sum(shares)) if shares else None

    return PlotSeries(name, look, per_row(rows, idle), marker="s" if look == "before" else "o")


def _factor(change: Change) -> float:
    return 2**change.size if change.size < 1000 else math.inf


def _columns(first: str, second: str) -> list[Column]:
    """Columns of changes: every quantity in both states, with its factor."""

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
    sentences = [
        f"{len(labels)} row{'s' if len(labels) > 1 else ''} only in {name}, such as {labels[0]}"
        for name, labels in zip(comparison.names, (comparison.only_before, comparison.only_after), strict=True)
        if labels
    ]
    return "; ".join(sentences) + "." if sentences else ""


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
        raise VarpropError("The figure needs matplotlib: pip install '.[report]' in a checkout of varprop.") from error
    return Figure(figsize=(10, 3.8), layout="constrained")


def _panel(axes: Any, plot: Plot, layers: list[int]) -> None:
    for series in plot.series:
        _draw_series(axes, series, layers)
    axes.set_title(plot.title)
    axes.set_xlabel("layer, in order of execution")
    axes.set_ylabel(plot.label)
    # the lines decide what is seen: bands may reach far beyond them
    values = [series.y[index] or 0.0 for series in plot.series for index in layers]
    seen = [value for value in values if 0 < value < math.inf]
    if plot.axis == "log" and seen:
        axes.set_yscale("log")
        axes.set_ylim(min(seen) / 3, max(seen) * 3)
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_series(axes: Any, series: PlotSeries, layers: list[int]) -> None:
    points = [(position, index) for position, index in enumerate(layers) if series.y[index] is not None]
    positions, colour = [position for position, _ in points], COLOURS[series.look]
    axes.plot(positions, [series.y[index] for _, index in points], color=colour, label=series.name, linewidth=1.4)
    if series.low:
        low, high = ([values[index] for _, index in points] for values in (series.low, series.high))
        axes.fill_between(positions, low, high, color=colour, alpha=0.18, linewidth=0)
