"""Reports in a notebook: compact, in the colours of the notebook whether light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .compare_findings import severity_change
from .findings import Finding
from .page_text import count, escape, number, percent, sentence, with_code
from .rows import Row
from .table import shown

if TYPE_CHECKING:
    from .compare import Change, Comparison
    from .report import Report

# Nothing but the notebook's own colour, thinned: so it is readable on any ground.
STYLE = """<style>
.varprop-report { font-size: 0.9em; line-height: 1.4; }
.varprop-report ul { list-style: none; margin: 0.4em 0; padding: 0; }
.varprop-report li { margin: 0.25em 0; padding-left: 0.6em; border-left: 3px solid #8884; }
.varprop-report li.error { border-color: #d43c31; }
.varprop-report li.warning { border-color: #d99a1c; }
.varprop-report small { opacity: 0.75; }
.varprop-report div.scroll { max-height: 28em; overflow: auto; border: 1px solid #8884; border-radius: 4px; }
.varprop-report table { border-collapse: collapse; margin: 0; color: inherit; font-variant-numeric: tabular-nums; }
.varprop-report th, .varprop-report td { padding: 0.15em 0.7em; text-align: right; white-space: pre; color: inherit;
  background: none; border: 0; border-bottom: 1px solid #8883; }
.varprop-report th:first-child, .varprop-report td:first-child, .varprop-report td:nth-child(2),
.varprop-report th:nth-child(2) { text-align: left; }
</style>"""
HEADER = ("layer", "class", "mean", "std", "gain", "shift", "gradient", "saturated", "dead", "always on")
CHANGES = 20  # that a comparison shows


def report_html(report: Report) -> str:
    """Findings and the table."""
    ratio = report.gradient_ratio
    about = f"{count(report.parameters)} parameters"
    about += f", gradient first to last {number(ratio)}" if ratio is not None else ""
    header = (*HEADER, "measured std") if report.check else HEADER
    rows = [_cells(row, bool(report.check)) for row in shown(list(report.rows))]
    items = [_item(finding.severity, finding) for finding in report.findings]
    return _frame(report.model, about, items, "Nothing to worry about was found.", header, rows)


def comparison_html(comparison: Comparison) -> str:
    """Findings new, gone and stayed, and the largest changes."""
    found, (first, second) = comparison.findings, comparison.names
    items = [_item(f"new {finding.severity}", finding) for finding in found.new]
    items += [f"<li><b>gone</b> {escape(finding.where)}: {sentence(finding.text)}.</li>" for finding in found.gone]
    items += [_item(f"{severity_change(pair)} {pair[1].severity}", pair[1]) for pair in found.stayed]
    pairs = [f"{what}, {state}" for what in ("std", "gradient") for state in (first, second)]
    header = ("layer", "class", *pairs[:2], "times", *pairs[2:], "times")
    rows = [_change(change) for change in comparison.largest(CHANGES)]
    return _frame(comparison.after.model, f"{first} → {second}", items, "Neither state has findings.", header, rows)


def _frame(
    title: str, about: str, items: Sequence[str], nothing: str, header: Iterable[str], rows: Iterable[Sequence[str]]
) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    findings = f"<ul>{''.join(items)}</ul>" if items else f"<p>{nothing}</p>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return (
        f'<div class="varprop-report">{STYLE}<b>{escape(title)}</b> <small>{escape(about)}</small>'
        f'{findings}<div class="scroll">{table}</div></div>'
    )


def _item(word: str, finding: Finding) -> str:
    text = f"<b>{escape(word)}</b> {escape(finding.where)}: {sentence(finding.text)}."
    return f'<li class="{finding.severity}">{text} <small>{with_code(finding.advice)}.</small></li>'


def _cells(row: Row, checked: bool) -> list[str]:
    name = (row.path.rpartition(".")[2] or "(model)") + (f" #{row.call + 1}" if row.call else "")
    cells = [
        "  " * row.depth + (name if row.kind == "module" else f"[{row.name}]"),
        row.name if row.kind == "module" else "",
        *(number(value) for value in (row.numbers["mean"], row.numbers["std"], row.gain)),
        percent(row.numbers["shift"]),
        number(row.numbers.get("gradient")),
        *(percent(row.numbers.get(share)) for share in ("saturated", "dead", "always_on")),
    ]
    return [*cells, number(row.measured["std"]["value"] if "std" in row.measured else None)] if checked else cells


def _change(change: Change) -> list[str]:
    before, after = change.before, change.after
    return [
        change.label,
        after.name if after.kind == "module" else "",
        *(number(value) for value in (before.numbers["std"], after.numbers["std"], change.std_factor)),
        *(number(value) for value in (before.gradient_total, after.gradient_total, change.gradient_factor)),
    ]
