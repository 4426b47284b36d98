"""The page of one report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .page import Page
from .page_figures import (
    Axis,
    Figure,
    Series,
    axis_of,
    is_layer,
    mean_series,
    measured_series,
    number_of,
    of,
    plotted,
    signed_axis,
    std_series,
    total_series,
)
from .page_findings import findings_list, places, severities, summary
from .page_table import Cell, Column, number_cell, share_cell, text_cell
from .page_text import count, number, percent, rough
from .rows import Row
from .table import extents

if TYPE_CHECKING:
    from .report import Report

LEAD = "Expected statistics of every layer, computed from the weights and the mean and variance of the input."
CHECKED = {"gaussian": "Gaussian inputs", "data": "data"}
COLUMNS = (
    Column("class", "class of the module, or the operation", False),
    Column("mean", "mean, averaged over the units"),
    Column("std", "standard deviation, root mean square over the units"),
    Column("growth", "std over that of the model's input"),
    Column("gain", "root mean square slope of an activation; std out over std in otherwise"),
    Column("shift", "share of the mean square that is constant: near 100 % the units hardly vary"),
    Column("gradient", "expected scale of the gradient of one element, for a gradient of variance 1 at the output"),
    Column("summed", "the same summed over positions, which can be compared between resolutions"),
    Column("saturated", "units that lie in a flat part of their activation more often than not"),
    Column("dead", "units whose rectifier is on less than once in a thousand times"),
    Column("always on", "units whose rectifier is off less than once in a thousand times"),
    Column("status", "exact under the engine's assumptions, approximate, or sampled; ~ if only the gradient is", False),
    Column("extents", "extents of the result; along an axis in brackets one unit stands for all", False),
)
MEASURED_COLUMNS = (
    Column("measured mean", "mean on the inputs of the check, with its standard error"),
    Column("measured std", "standard deviation on the inputs of the check, with its standard error"),
    Column("ratio", "analytic std over the measured one: 1 is agreement"),
)


def report_page(report: Report) -> Page:
    """Everything a report knows, for people."""
    columns = COLUMNS + (MEASURED_COLUMNS if report.check else ())
    return Page(
        title=f"{report.model}: inspection",
        heading=report.model,
        lead=LEAD,
        facts=facts(report),
        findings=(f"Findings: {summary(report.findings)}", findings_list(report.findings, places(report.rows))),
        figures=figures(report),
        rows=report.rows,
        columns=columns,
        cells=[_cells(row, bool(report.check)) for row in report.rows],
        severities=severities(report.rows, report.findings),
    )


def facts(report: Report) -> list[tuple[str, str]]:
    """What is known of the model as a whole."""
    layers = [row for row in report.rows if is_layer(row)]
    rough_ones = sum(row.status != "exact" for row in layers)
    known = [
        ("parameters", count(report.parameters)),
        ("input", "; ".join(_input(about) for about in report.inputs)),
        ("layers", f"{len(layers)}, of these {rough_ones} approximate" if rough_ones else f"{len(layers)}, all exact"),
    ]
    if report.gradient_ratio is not None:
        known.append(("gradient, first to last layer", f"{number(report.gradient_ratio)} times"))
    return known + ([("checked on", CHECKED.get(report.check, report.check))] if report.check else [])


def _input(about: dict[str, object]) -> str:
    shape = "×".join(str(extent) for extent in about["extents"])  # type: ignore[attr-defined]
    if "mean" not in about:
        return shape
    return f"{shape}, mean {number(about['mean'])}, std {number(about['std'])}"  # type: ignore[arg-type]


def figures(report: Report) -> list[Figure]:
    """Forward and backward by depth, units, and the check where there was one."""
    rows = report.rows
    found = [std_figure(rows, report.check), gradient_figure(rows, report.check), mean_figure(rows, report.check)]
    found += [figure] if (figure := units_figure(rows)) else []
    return found + (scatter_figures(rows) if report.check else [])


def std_figure(rows: Sequence[Row], check: str) -> Figure:
    """Signal propagation, forward."""
    main = std_series(rows, "standard deviation", "main")
    seen = (measured_series(rows, "std", "measured"),) if check else ()
    caption = "The layer's standard deviation is the root mean square over its units; bands show how units differ."
    axis = axis_of(plotted(rows, main.y))
    return Figure("std", "Signal, forward", caption, "standard deviation", axis, (main, *seen))


def mean_figure(rows: Sequence[Row], check: str) -> Figure:
    """Means by depth."""
    main = mean_series(rows, "mean", "main")
    seen = (measured_series(rows, "mean", "measured"),) if check else ()
    caption = "Means of the units; far from zero beside the standard deviation, a layer mostly passes on a constant."
    axis = signed_axis([*plotted(rows, main.low), *plotted(rows, main.high)])
    return Figure("mean", "Mean, forward", caption, "mean", axis, (main, *seen))


def gradient_figure(rows: Sequence[Row], check: str) -> Figure:
    """Signal propagation, backward."""
    one = Series("of one element", "second", of(rows, number_of("gradient")), dashed=True)
    total = total_series(rows, "summed over positions", "main")
    series = (total, one) if total.y != one.y else (replace(total, name="gradient scale"),)
    name = "of one element, measured" if len(series) > 1 else "measured"
    seen = (measured_series(rows, "gradient", name),) if check else ()
    caption = (
        "Expected scale of the gradient that reaches each layer, for a gradient of variance 1 at the output. "
        "Summed over positions it can be compared between layers of different resolution."
    )
    axis = axis_of(value for one_of in series for value in plotted(rows, one_of.y))
    return Figure("gradient", "Gradient, backward", caption, "gradient scale", axis, (*series, *seen))


def units_figure(rows: Sequence[Row]) -> Figure | None:
    """Saturated, dead and always-on units; None where no activation can be any of these."""
    kinds = (("saturated", "circle"), ("dead", "triangle"), ("always_on", "square"))
    series = [
        Series(name.replace("_", " "), name, of(rows, number_of(name, 100.0)), marker=marker) for name, marker in kinds
    ]
    known = tuple(one for one in series if any(value is not None for value in one.y))
    caption = "Share of the units of each activation that are saturated, dead (nearly never on) or always on."
    return (
        Figure("units", "Units without effect", caption, "units, %", "linear", known, percent=True) if known else None
    )


def scatter_figures(rows: Sequence[Row]) -> list[Figure]:
    """Analytic against measured numbers, one point a layer."""
    return [
        _scatter(rows, "std", "standard deviation", axis_of),
        _scatter(rows, "mean", "mean", signed_axis),
        _scatter(rows, "gradient", "gradient scale", axis_of),
    ]


def _scatter(rows: Sequence[Row], what: str, words: str, axis: Callable[[Iterable[float | None]], Axis]) -> Figure:
    seen, own = measured_series(rows, what, words), of(rows, number_of(what))
    series = Series(words, "main", own, error=seen.error, x=seen.y, marker="circle")
    ratios = [a / b for a, b in zip(plotted(rows, own), plotted(rows, seen.y), strict=True) if a and b]
    caption = f"Each point is a layer, bars are standard errors; on the line both agree.{_agreement(what, ratios)}"
    values = [*plotted(rows, own), *plotted(rows, seen.y)]
    return Figure(f"check-{what}", f"Check: {words}", caption, words, axis(values), (series,), "scatter")


def _agreement(what: str, ratios: Sequence[float]) -> str:
    if what == "mean" or not ratios:
        return ""
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    return f" Median difference: {percent(off)}."


def _cells(row: Row, checked: bool) -> list[Cell]:
    numbers = row.numbers
    cells = [
        text_cell(row.name if row.kind == "module" else "operation"),
        number_cell(numbers["mean"]),
        number_cell(numbers["std"]),
        number_cell(row.growth),
        number_cell(row.gain),
        share_cell(numbers["shift"]),
        number_cell(numbers.get("gradient")),
        number_cell(row.gradient_total),
        *(share_cell(numbers.get(name)) for name in ("saturated", "dead", "always_on")),
        _status(row),
        text_cell(extents(row).replace("x", "×")),
    ]
    return cells + _measured_cells(row) if checked else cells


def _status(row: Row) -> Cell:
    tilde = " ~" if row.gradient_status == "approximate" else ""
    reasons = [*row.reasons, *([row.gradient_reason] if row.gradient_reason else [])]
    return text_cell(row.status + tilde, "; ".join(reasons))


def _measured_cells(row: Row) -> list[Cell]:
    pairs = [row.measured.get(what) for what in ("mean", "std")]
    cells = [Cell(f"{number(p['value'])} ± {rough(p['error'])}", p["value"]) if p else Cell("") for p in pairs]
    std = pairs[1]["value"] if pairs[1] else 0.0
    return [*cells, number_cell(row.numbers["std"] / std if std else None)]
