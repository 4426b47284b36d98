"""Findings as pages and notebooks show them: in groups, each with the word on its badge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..findings.differences import Differences, severity_change
from ..findings.finding import ORDER, Finding
from ..numbers.row import ReportRow

SHOWN = 5  # errors and warnings that are not folded


@dataclass(frozen=True)
class FindingItem:
    """A finding and the word on its badge; about one that is gone nothing is to be done."""

    finding: Finding
    badge: str
    gone: bool = False


@dataclass(frozen=True)
class FindingGroup:
    """Findings under a title; folded ones show it alone."""

    title: str
    items: Sequence[FindingItem]
    fold: Literal["", "folded", "unfolded"] = ""


def row_numbers(rows: Sequence[ReportRow]) -> dict[str, int]:
    """Index of the first row of every label."""
    found: dict[str, int] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.label, index)
    return found


def severities(known: dict[str, int], findings: Iterable[Finding]) -> dict[int, str]:
    """The worst that is said about a row, by its index; `known` has the index of every label."""
    ordered = sorted(findings, key=lambda finding: -ORDER[finding.severity])
    return {known[finding.where]: finding.severity for finding in ordered if finding.where in known}


def report_groups(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The first errors and warnings in the open; more of them, and notes, folded."""
    worse = [finding for finding in findings if finding.severity != "note"]
    notes = [finding for finding in findings if finding.severity == "note"]
    more = worse[SHOWN:]
    found = [
        FindingGroup("", report_items(worse[:SHOWN])),
        FindingGroup(f"{len(more)} more: {summary(more)}", report_items(more), "folded"),
        FindingGroup(summary(notes), report_items(notes), "folded" if worse else "unfolded"),
    ]
    return [group for group in found if group.items]


def report_items(findings: Iterable[Finding]) -> list[FindingItem]:
    """Findings with their severity on the badge."""
    return [FindingItem(finding, finding.severity) for finding in findings]


def comparison_groups(found: Differences) -> list[FindingGroup]:
    """What is new, gone, and in both states."""
    groups = [
        FindingGroup("New", report_items(found.new)),
        FindingGroup("Gone", [FindingItem(finding, f"was {finding.severity}", gone=True) for finding in found.gone]),
        FindingGroup("In both", [FindingItem(pair[1], _severity_after(pair)) for pair in found.stayed]),
    ]
    return [group for group in groups if group.items]


def comparison_items(found: Differences) -> list[FindingItem]:
    """The same in one list."""
    return [
        *(FindingItem(finding, f"new {finding.severity}") for finding in found.new),
        *(FindingItem(finding, "gone", gone=True) for finding in found.gone),
        *(FindingItem(pair[1], f"{severity_change(pair)} {pair[1].severity}") for pair in found.stayed),
    ]


def _severity_after(pair: tuple[Finding, Finding]) -> str:
    change = severity_change(pair)
    return pair[1].severity if change == "stayed" else f"{change}: {pair[1].severity}"


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each severity."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ORDER}
    words = [f"{number} {severity}{'s' if number > 1 else ''}" for severity, number in counts.items() if number]
    return ", ".join(words) or "no findings"
