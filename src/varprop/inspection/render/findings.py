"""Findings as pages and notebooks show them: in groups, each with its row and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..findings.differences import Differences, severity_change
from ..findings.finding import ORDER, Finding
from ..numbers.row import ReportRow

SHOWN = 5  # errors and warnings that are not folded


@dataclass(frozen=True)
class FindingItem:
    """One finding: its look, the word on its badge, where it is (and in which row), what it is, and what to do."""

    look: str
    badge: str
    where: str
    row: int | None
    text: str
    advice: str


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


def severities(rows: Sequence[ReportRow], findings: Iterable[Finding]) -> dict[int, str]:
    """The worst that is said about a row, by its index."""
    known = row_numbers(rows)
    ordered = sorted(findings, key=lambda finding: -ORDER[finding.severity])
    return {known[finding.where]: finding.severity for finding in ordered if finding.where in known}


def report_groups(findings: Sequence[Finding], known: Mapping[str, int]) -> list[FindingGroup]:
    """The first errors and warnings in the open; more of them, and notes, folded."""
    items = [item(finding, known) for finding in findings]
    worse = [one for one in items if one.look != "note"]
    notes = [one for one in items if one.look == "note"]
    more = f"{len(worse[SHOWN:])} more: {summary([one for one in findings if one.severity != 'note'][SHOWN:])}"
    found = [
        FindingGroup("", worse[:SHOWN]),
        FindingGroup(more, worse[SHOWN:], "folded"),
        FindingGroup(summary([one for one in findings if one.severity == "note"]), notes, _fold(bool(worse))),
    ]
    return [group for group in found if group.items]


def _fold(folded: bool) -> Literal["folded", "unfolded"]:
    return "folded" if folded else "unfolded"


def comparison_groups(found: Differences, known: Mapping[str, int]) -> list[FindingGroup]:
    """What is new, gone, and in both states."""
    groups = [
        FindingGroup("New", [item(finding, known) for finding in found.new]),
        FindingGroup("Gone", [gone_item(finding, known, f"was {finding.severity}") for finding in found.gone]),
        FindingGroup("In both", [item(pair[1], known, _word(pair)) for pair in found.stayed]),
    ]
    return [group for group in groups if group.items]


def changed_items(found: Differences) -> list[FindingItem]:
    """The same in one list."""
    return [
        *(item(finding, {}, f"new {finding.severity}") for finding in found.new),
        *(gone_item(finding, {}, "gone") for finding in found.gone),
        *(item(pair[1], {}, f"{severity_change(pair)} {pair[1].severity}") for pair in found.stayed),
    ]


def _word(pair: tuple[Finding, Finding]) -> str:
    change = severity_change(pair)
    return pair[1].severity if change == "stayed" else f"{change}: {pair[1].severity}"


def item(finding: Finding, known: Mapping[str, int], word: str = "") -> FindingItem:
    """One finding; `word` stands instead of its severity."""
    row, badge = known.get(finding.where), word or finding.severity
    return FindingItem(finding.severity, badge, finding.where, row, finding.text, finding.advice)


def gone_item(finding: Finding, known: Mapping[str, int], word: str) -> FindingItem:
    """One that is no more: nothing is to be done about it."""
    return FindingItem("gone", word, finding.where, known.get(finding.where), finding.text, "")


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each severity."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ORDER}
    words = [f"{number} {severity}{'s' if number > 1 else ''}" for severity, number in counts.items() if number]
    return ", ".join(words) or "no findings"
