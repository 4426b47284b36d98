"""The page of one report, and its short form for a notebook."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..data import ReportData
from ..findings.finding import NOTHING_FOUND
from ..numbers.row import SHARES, ReportRow
from .findings import report_groups, report_items, summary
from .format import count, number, percent, rough
from .page import Page, render_summary
from .plots import (
    Axis,
    Plot,
    PlotSeries,
    axis_of,
    measured_series,
    number_of,
    of,
    plotted,
    signed_axis,
    spread_series,
    total_series,
)
from .table import Column, TableCell, number_column, share_column, text_column
from .text import shown

LEAD = "Expected statistics of every layer, computed from the weights and the mean and variance of the input."
NOTEBOOK = {"mean", "std", "gain", "shift", "gradient", "saturated", "dead", "always on"}


def _status(row: ReportRow) -> str:
    return row.status + (" ~" if row.gradient_status == "approximate" else "")


def _reasons(row: ReportRow) -> str:
    return "; ".join([*row.reasons, *([row.gradient_reason] if row.gradient_reason else [])])


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


MEANINGS = {
    "class": "class of the module, or the operation",
    "mean": "mean, averaged over the units",
    "std": "standard deviation, root mean square over the units",
    "growth": "std over that of the model's input",
    "gain": "root mean square slope of an activation; std out over std in otherwise",
    "shift": "share of the mean square that is constant: near 100 % the units hardly vary",
    "gradient": "expected scale of the gradient of one element, for a gradient of variance 1 at the output",
    "summed": "the same summed over positions, which can be compared between resolutions",
    "saturated": "units that lie in a flat part of their activation more often than not",
    "dead": "units whose rectifier is on less than once in a thousand times",
    "always on": "units whose rectifier is off less than once in a thousand times",
    "status": "exact under the engine's assumptions, approximate, or sampled; ~ if only the gradient is",
    "extents": "extents of the result; along an axis in brackets one unit stands for all",
    "measured mean": "mean on the inputs of the check, with its standard error",
    "measured std": "standard deviation on the inputs of the check, with its standard error",
    "ratio": "analytic std over the measured one: 1 is agreement",
}
MADE = (
    text_column("class", lambda row: row.class_name or "operation"),
    number_column("mean", number_of("mean")),
    number_column("std", number_of("std")),
    number_column("growth", lambda row: row.growth),
    number_column("gain", lambda row: row.gain),
    share_column("shift", number_of("shift")),
    number_column("gradient", number_of("gradient")),
    number_column("summed", lambda row: row.gradient_total),
    share_column("saturated", number_of("saturated")),
    share_column("dead", number_of("dead")),
    share_column("always on", number_of("always_on")),
    text_column("status", _status, _reasons),
    text_column("extents", lambda row: row.extents_text.replace("x", "×")),
    Column("measured mean", _measured("mean")),
    Column("measured std", _measured("std")),
    number_column("ratio", _ratio),
)
COLUMNS = tuple(replace(column, meaning=MEANINGS[column.name]) for column in MADE)
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
        facts=_facts(report),
        findings_heading=f"Findings: {summary(report.findings)}",
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


def _facts(report: ReportData) -> list[tuple[str, str]]:
    """What is known of the model as a whole."""
    layers = [row for row in report.rows if row.is_layer]
    inexact = sum(row.status != "exact" for row in layers)
    known = [
        ("parameters", count(report.parameters)),
        ("input", "; ".join(_input(**about) for about in report.inputs)),
        ("layers", f"{len(layers)}, of these {inexact} approximate" if inexact else f"{len(layers)}, all exact"),
    ]
    if report.gradient_ratio is not None:
        known.append(("gradient, first to last layer", f"{number(report.gradient_ratio)} times"))
    return known + ([("checked on", report.measured_on)] if report.check else [])


def _input(extents: Sequence[int], mean: float | None = None, std: float | None = None, **_: object) -> str:
    shape = "×".join(map(str, extents))
    return shape if mean is None else f"{shape}, mean {number(mean)}, std {number(std)}"


def _plots(report: ReportData) -> list[Plot]:
    """Forward and backward by depth, units, and the check where there was one."""
    rows, check = report.rows, bool(report.check)
    found = [_std_plot(rows, check), _gradient_plot(rows, check), _mean_plot(rows, check), *_units_plot(rows)]
    if check:
        found.append(_scatter(rows, "std", "standard deviation", axis_of))
        found.append(_scatter(rows, "mean", "mean", signed_axis))
        found.append(_scatter(rows, "gradient", "gradient scale", axis_of))
    return found


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
    one = PlotSeries("of one element", "second", of(rows, number_of("gradient")), dashed=True)
    total = total_series(rows, "summed over positions", "main")
    series: tuple[PlotSeries, ...] = (total, one) if total.y != one.y else (replace(total, name="gradient scale"),)
    name = "of one element, measured" if len(series) > 1 else "measured"
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
        PlotSeries(name.replace("_", " "), name, of(rows, number_of(name, 100.0)), marker=marker)
        for name, marker in zip(SHARES, ("o", "^", "s"), strict=True)
    ]
    known = tuple(one for one in series if any(value is not None for value in one.y))
    caption = "Share of the units of each activation that are saturated, dead (nearly never on) or always on."
    plot = Plot("units", "Units without effect", caption, "units, %", "linear", known, percent=True)
    return [plot] if known else []


def _scatter(rows: Sequence[ReportRow], what: str, name: str, axis: Callable[[Iterable[float | None]], Axis]) -> Plot:
    """Analytic against measured numbers, one point a layer."""
    seen, own = measured_series(rows, what, name), of(rows, number_of(what))
    series = PlotSeries(name, "main", own, error=seen.error, x=seen.y, marker="circle")
    ratios = [a / b for a, b in zip(plotted(rows, own), plotted(rows, seen.y), strict=True) if a and b]
    caption = f"Each point is a layer, bars are standard errors; on the line both agree.{_agreement(what, ratios)}"
    values = [*plotted(rows, own), *plotted(rows, seen.y)]
    return Plot(f"check-{what}", f"Check: {name}", caption, name, axis(values), (series,), "scatter")


def _agreement(what: str, ratios: Sequence[float]) -> str:
    if what == "mean" or not ratios:
        return ""
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    return f" Median difference: {percent(off)}."
