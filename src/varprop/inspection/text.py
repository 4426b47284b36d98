"""Reports and comparisons as text: findings, aligned columns, a legend and a verdict; coloured where rich is there."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from ..text_table import text_table
from .data import Change, ComparisonData, ReportData
from .findings import NEITHER_FOUND, NOTHING_FOUND, Differences, Finding, severity_change
from .page import severity_counts
from .rows import SHARES, ReportRow

WIDTH = 100  # columns of a terminal that a table fits
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
# columns of the table with what they mean, in order; the numbers say which is left out first where there is no room
COLUMNS: dict[str, tuple[int, str]] = {
    "layer": (0, ""),
    "class": (5, ""),
    "extents": (3, "of the result, (n) where one unit stands for n positions"),
    "mean": (6, "over the units"),
    "std": (0, "root mean square over the units"),
    "measured": (0, "std on the inputs of the check"),
    "trial": (0, "std on a few random inputs over the computed one, where they differ: units are not independent"),
    "growth": (1, "std over that of the input"),
    "gain": (2, "std out over std in; of an activation its root mean square slope"),
    "shift": (4, "share of the mean square that is constant"),
    "gradient": (0, "expected scale for a gradient of variance 1 at the output, ~ if approximate"),
    "units": (0, ""),
    "rank": (7, "effective rank of the weight of how many"),
    "": (8, ""),
}


def report_text(report: ReportData, depth: int | None = None) -> str:
    """Findings, the table of the tree of modules with a legend, and a verdict."""
    return "\n".join(line for _, line in _report_lines(report, depth))


def show_report(report: ReportData, file: TextIO | None, depth: int | None = None) -> None:
    """Print `report_text`, coloured where rich is installed."""
    file = file or sys.stdout
    try:
        from rich.console import Console
    except ImportError:
        print(report_text(report, depth), file=file)
        return
    console = Console(file=file, soft_wrap=True)
    for severity, line in _report_lines(report, depth):
        console.print(line, style=STYLES.get(severity), markup=False, highlight=False)


def _report_lines(report: ReportData, depth: int | None) -> Iterator[tuple[str, str]]:
    """Every line with the severity that colours it."""
    ratio = f"; gradient first to last: {report.gradient_ratio:.3g}" if report.gradient_ratio is not None else ""
    checked = f"; measured on {report.measured_on}" if report.check else ""
    yield "", f"{report.model}, {report.parameters:,} parameters{ratio}{checked}"
    yield from _finding_lines(report.findings)
    yield "", ""
    rows = [row for row in shown(report.rows) if depth is None or row.depth <= depth]
    worst = {finding.where: finding.severity for finding in reversed(report.findings)}
    names, lines = _table(rows)
    yield from (("", line) for line in lines[:2])
    yield from ((worst.get(row.label, ""), line) for row, line in zip(rows, lines[2:], strict=True))
    yield "", ""
    meanings = [f"{name}: {COLUMNS[name][1]}" for name in names if COLUMNS[name][1]]
    if report.check:
        meanings = [line.replace("the inputs of the check", report.measured_on) for line in meanings]
    gaussian = "" if report.covariance else " and Gaussian"
    exact = f"all computed numbers are {report.assumption}{gaussian}, unless marked"
    for line in textwrap.wrap("; ".join([*meanings, exact]) + ".", WIDTH):
        yield "note", line
    yield "", verdict(report)


def verdict(report: ReportData) -> str:
    """One line on how the model is."""
    counts, first = severity_counts(report.findings), next(iter(report.findings), None)  # the worst come first
    if first is not None and first.severity != "note":
        return f"Verdict: {counts}; begin with {first.where} ({first.kind})."
    return f"Verdict: {NOTHING_FOUND[0].lower()}{NOTHING_FOUND[1:-1]}{f' ({counts})' if first else ''}."


def _table(rows: Sequence[ReportRow]) -> tuple[list[str], list[str]]:
    """Names of the columns that fit, and the lines; names of layers are never cut."""
    cells = [_cells(row) for row in rows]
    names = [name for name in COLUMNS if name == "layer" or any(line[name] for line in cells)]
    widths = {name: 2 + max(len(name), *(len(line[name]) for line in cells), 0) for name in names}
    for name in sorted((name for name in names if COLUMNS[name][0]), key=lambda name: COLUMNS[name][0]):
        if sum(widths[kept] for kept in names) - 2 > WIDTH:
            names.remove(name)
    table = text_table(names, [[line[name] for name in names] for line in cells])
    return names, table.split("\n")


def _finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """Lines for each with its severity; what to do about several in a row stands behind the last of them."""
    for finding, following in itertools.zip_longest(findings, findings[1:]):
        shared = following is not None and following.advice == finding.advice
        text = f"{finding.severity}: {finding.where}: {finding.text}" if shared else str(finding)
        lines = textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        yield from ((finding.severity, line) for line in lines)


def shown(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows without operations that only move elements."""
    return [row for row in rows if row.kind == "module" or not row.moves]


def _cells(row: ReportRow) -> dict[str, str]:
    seen = row.measured.get("std")
    return {
        "layer": row.indented,
        "class": row.class_name,
        "extents": row.extents_text,
        "mean": _number(row.numbers["mean"]),
        "std": _number(row.numbers["std"]),
        "measured": f"{seen['value']:.3g} +- {seen['error']:.1g}" if seen else "",
        "trial": "" if row.trial_ratio is None else f"x{row.trial_ratio:.2g}",
        "growth": _number(row.growth),
        "gain": _number(row.gain),
        "shift": f"{row.numbers['shift']:.0%}",
        "gradient": _number(row.numbers.get("gradient")) + ("~" if row.gradient_status == "approximate" else ""),
        "units": _units(row),
        "rank": "" if row.rank is None else f"{row.rank:.0f}/{row.full_rank}",
        "": "" if row.status == "exact" else row.status,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _units(row: ReportRow) -> str:
    shares = {name: row.numbers.get(name, 0.0) for name in SHARES}
    return ", ".join(f"{share:.0%} {name.replace('_', ' ')}" for name, share in shares.items() if share >= 0.005)


def comparison_text(comparison: ComparisonData, count: int) -> str:
    """Findings and the largest changes."""
    first, second = (name if len(name) <= 16 else "..." + name[-13:] for name in comparison.names)
    pairs = [f"{what} {name}" for what in ("std", "gradient") for name in (first, second)]
    header = ["layer", "class", *pairs[:2], "times", *pairs[2:], "times", "units"]
    table = text_table(header, [_change(change) for change in comparison.largest(count)])
    heading = f"{comparison.after.model}: {' -> '.join(comparison.names)}"
    return "\n".join([heading, *_difference_lines(comparison.findings), "", table])


def _difference_lines(differences: Differences) -> list[str]:
    """A line for every finding: new, gone, and those that stayed."""
    lines = [f"new {finding}" for finding in differences.new]
    lines += [f"gone {finding.severity}: {finding.where}: {finding.text}." for finding in differences.gone]
    lines += [f"{severity_change(pair)} {pair[1]}" for pair in differences.stayed]
    return lines or [NEITHER_FOUND]


def _change(change: Change) -> list[str]:
    before, after = change.before, change.after
    std = (before.numbers["std"], after.numbers["std"], change.std_factor)
    gradient = (before.gradient_total, after.gradient_total, change.gradient_factor)
    return [change.label, after.class_name, *map(_number, (*std, *gradient)), _changed_units(change)]


def _changed_units(change: Change) -> str:
    """Shares of units that changed by half a percent or more."""
    changes = []
    for name in SHARES:
        first, second = change.before.numbers.get(name, 0.0), change.after.numbers.get(name, 0.0)
        if abs(first - second) >= 0.005:
            changes.append(f"{name.replace('_', ' ')} {first:.0%} -> {second:.0%}")
    return ", ".join(changes)
