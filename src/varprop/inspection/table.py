"""The rows as a table: for a terminal with rich, as plain text, and as HTML."""

from __future__ import annotations

from typing import Any

from .findings import Finding
from .rows import Row

HEADER = ("module", "class", "extents", "mean", "std", "growth", "gain", "shift", "gradient", "units", "")
NUMBERS = {"mean", "std", "growth", "gain", "shift", "gradient"}
STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def shown(rows: list[Row]) -> list[Row]:
    """The rows without operations that only move elements."""
    return [row for row in rows if row.kind == "module" or not row.moves]


def cells(row: Row) -> tuple[str, ...]:
    """What the table shows of a row."""
    name = (row.path.rpartition(".")[2] or "(model)") + (f" #{row.call + 1}" if row.call else "")
    return (
        "  " * row.depth + (name if row.kind == "module" else f"[{row.name}]"),
        row.name if row.kind == "module" else "",
        extents(row),
        _number(row.numbers["mean"]) + _measured(row, "mean"),
        _number(row.numbers["std"]) + _measured(row, "std"),
        _number(row.growth),
        _number(row.gain),
        f"{row.numbers['shift']:.0%}",
        _number(row.numbers.get("gradient")) + ("~" if row.gradient_status == "approximate" else ""),
        _units(row),
        "" if row.status == "exact" else row.status,
    )


def extents(row: Row) -> str:
    """Extents of the result, uniform axes in brackets."""
    pairs = zip(row.extents, row.uniform, strict=True)
    return "x".join(f"({extent})" if uniform else str(extent) for extent, uniform in pairs)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _measured(row: Row, what: str) -> str:
    seen = row.measured.get(what)
    return f" | {seen['value']:.3g} +- {seen['error']:.1g}" if seen else ""


def _units(row: Row) -> str:
    shares = {name: row.numbers.get(name, 0.0) for name in ("saturated", "dead", "always_on")}
    return ", ".join(f"{share:.0%} {name.replace('_', ' ')}" for name, share in shares.items() if share >= 0.005)


def plain(rows: list[Row]) -> str:
    """The table as text."""
    lines = [HEADER, *map(cells, shown(rows))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def rich_table(rows: list[Row], findings: tuple[Finding, ...]) -> Any:
    """The table for a terminal; rows with findings are coloured. Needs rich."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    for name in HEADER:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name == "module")
    worst = {finding.where: finding.severity for finding in reversed(findings)}
    for row in shown(rows):
        table.add_row(*map(escape, cells(row)), style=STYLES.get(worst.get(row.label, ""), ""))
    return table
