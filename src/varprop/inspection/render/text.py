"""Reports and comparisons as text: aligned columns, and with rich a coloured table."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from ...text_table import text_table
from ..data import Change, ComparisonData, ReportData
from ..findings.differences import NEITHER_FOUND, Differences, severity_change
from ..findings.finding import NOTHING_FOUND, Finding
from ..numbers.row import SHARES, ReportRow

HEADER = ("module", "class", "extents", "mean", "std", "growth", "gain", "shift", "gradient", "units", "")
NUMBERS = {"mean", "std", "growth", "gain", "shift", "gradient"}
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def report_text(report: ReportData) -> str:
    """Findings and the table of the tree of modules."""
    findings = [line for _, line in _finding_lines(report.findings)] or [NOTHING_FOUND]
    table = text_table(HEADER, [_cells(row) for row in shown(report.rows)])
    return "\n".join([_heading(report), *findings, "", table])


def show_report(report: ReportData, file: TextIO | None) -> None:
    """Print the same; coloured where rich is installed."""
    file = file or sys.stdout
    try:
        from rich.console import Console
    except ImportError:
        print(report_text(report), file=file)
        return
    console = Console(file=file)
    # in a file or a pipe nothing is folded to the width of a terminal
    console = console if console.is_terminal else Console(file=file, width=200)
    console.print(_heading(report), markup=False, highlight=False)
    for severity, line in _finding_lines(report.findings):
        console.print(line, style=STYLES[severity], markup=False, highlight=False)
    console.print()
    console.print(_rich_table(report))


def _finding_lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str]]:
    """A line for each with its severity; what to do about several in a row stands behind the last of them."""
    for finding, following in itertools.zip_longest(findings, findings[1:]):
        shared = following is not None and following.advice == finding.advice
        yield finding.severity, f"{finding.severity}: {finding.where}: {finding.text}" if shared else str(finding)


def _rich_table(report: ReportData) -> Any:
    """Rows with findings are coloured."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name == "module")
    worst = {finding.where: finding.severity for finding in reversed(report.findings)}
    for row in shown(report.rows):
        table.add_row(*map(escape, _cells(row)), style=STYLES.get(worst.get(row.label, ""), ""))
    return table


def _heading(report: ReportData) -> str:
    ratio = f"; gradient first to last: {report.gradient_ratio:.3g}" if report.gradient_ratio is not None else ""
    checked = f"; after | measured on {report.measured_on}" if report.check else ""
    return f"{report.model}, {report.parameters:,} parameters{ratio}{checked}"


def shown(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """The rows without operations that only move elements."""
    return [row for row in rows if row.kind == "module" or not row.moves]


def _cells(row: ReportRow) -> tuple[str, ...]:
    return (
        row.indented,
        row.class_name,
        row.extents_text,
        _number(row.numbers["mean"]) + _measured(row, "mean"),
        _number(row.numbers["std"]) + _measured(row, "std"),
        _number(row.growth),
        _number(row.gain),
        f"{row.numbers['shift']:.0%}",
        _number(row.numbers.get("gradient")) + ("~" if row.gradient_status == "approximate" else ""),
        _units(row),
        "" if row.status == "exact" else row.status,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _measured(row: ReportRow, what: str) -> str:
    seen = row.measured.get(what)
    return f" | {seen['value']:.3g} +- {seen['error']:.1g}" if seen else ""


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
    return "\n".join([heading, *_findings(comparison.findings), "", table])


def _findings(found: Differences) -> list[str]:
    """A line for every finding: new, gone, and those that stayed."""
    lines = [f"new {finding}" for finding in found.new]
    lines += [f"gone {finding.severity}: {finding.where}: {finding.text}." for finding in found.gone]
    lines += [f"{severity_change(pair)} {pair[1]}" for pair in found.stayed]
    return lines or [NEITHER_FOUND]


def _change(change: Change) -> list[str]:
    before, after = change.before, change.after
    std = (before.numbers["std"], after.numbers["std"], change.std_factor)
    gradient = (before.gradient_total, after.gradient_total, change.gradient_factor)
    return [change.label, after.class_name, *map(_number, (*std, *gradient)), _changed_units(change)]


def _changed_units(change: Change) -> str:
    """Shares of units that changed by half a percent or more."""
    parts = []
    for name in SHARES:
        first, second = change.before.numbers.get(name, 0.0), change.after.numbers.get(name, 0.0)
        if abs(first - second) >= 0.005:
            parts.append(f"{name.replace('_', ' ')} {first:.0%} -> {second:.0%}")
    return ", ".join(parts)
