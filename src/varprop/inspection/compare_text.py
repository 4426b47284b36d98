"""A comparison as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .compare_findings import Differences, severity_change

if TYPE_CHECKING:
    from .compare import Change

SHARES = ("saturated", "dead", "always_on")


def findings_text(found: Differences) -> list[str]:
    """A line for every finding: new, gone, and those that stayed."""
    lines = [f"new {finding}" for finding in found.new]
    lines += [f"gone {finding.severity}: {finding.where}: {finding.text}." for finding in found.gone]
    lines += [f"{severity_change(pair)} {pair[1]}" for pair in found.stayed]
    return lines or ["Neither state has findings."]


def changes_text(changes: Sequence[Change], names: tuple[str, str]) -> str:
    """The changes as a table."""
    short = [name if len(name) <= 16 else "..." + name[-13:] for name in names]
    header = ["layer", "class", *(f"{what} {name}" for what in ("std", "gradient") for name in short)]
    header = [*header[:4], "times", *header[4:], "times", "units"]
    lines = [header, *map(_line, changes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def _line(change: Change) -> list[str]:
    before, after = change.before, change.after
    return [
        change.label,
        after.name if after.kind == "module" else "",
        _number(before.numbers["std"]),
        _number(after.numbers["std"]),
        _number(change.std_factor),
        _number(before.gradient_total),
        _number(after.gradient_total),
        _number(change.gradient_factor),
        units_text(change),
    ]


def units_text(change: Change) -> str:
    """Shares of units that changed by half a percent or more."""
    parts = []
    for name in SHARES:
        first, second = change.before.numbers.get(name, 0.0), change.after.numbers.get(name, 0.0)
        if abs(first - second) >= 0.005:
            parts.append(f"{name.replace('_', ' ')} {first:.0%} -> {second:.0%}")
    return ", ".join(parts)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
