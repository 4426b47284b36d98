"""Findings on a page: the worst first, each with its place and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .findings import ORDER, Finding
from .page_text import escape, sentence, with_code
from .rows import Row

SHOWN = 5  # errors and warnings that are not folded
NOTHING = '<p class="fine">Nothing to worry about was found.</p>'


def places(rows: Sequence[Row]) -> dict[str, int]:
    """Index of the first row of every label."""
    found: dict[str, int] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.label, index)
    return found


def severities(rows: Sequence[Row], findings: Iterable[Finding]) -> dict[int, str]:
    """The worst that is said about a row, by its index."""
    known = places(rows)
    ordered = sorted(findings, key=lambda finding: -ORDER[finding.severity])
    return {known[finding.where]: finding.severity for finding in ordered if finding.where in known}


def findings_list(findings: Sequence[Finding], known: Mapping[str, int]) -> str:
    """The first errors and warnings in the open; more of them, and notes, folded."""
    worse = [finding for finding in findings if finding.severity != "note"]
    notes = [finding for finding in findings if finding.severity == "note"]
    parts = [_items(worse[:SHOWN], known) if worse else NOTHING]
    if further := worse[SHOWN:]:
        parts.append(_folded(f"{len(further)} more: {summary(further)}", _items(further, known)))
    if notes:
        parts.append(_folded(summary(notes), _items(notes, known), unfolded=not worse))
    return "".join(parts)


def _folded(title: str, content: str, unfolded: bool = False) -> str:
    return f'<details class="notes"{" open" if unfolded else ""}><summary>{title}</summary>{content}</details>'


def _items(findings: Sequence[Finding], known: Mapping[str, int]) -> str:
    return f'<ul class="findings">{"".join(item(finding, known) for finding in findings)}</ul>'


def item(finding: Finding, known: Mapping[str, int], word: str = "") -> str:
    """One finding; `word` stands instead of its severity."""
    where = escape(finding.where)
    if finding.where in known:
        where = f'<a class="place" href="#row-{known[finding.where]}">{where}</a>'
    badge = f'<span class="badge">{escape(word or finding.severity)}</span>'
    return (
        f'<li class="{finding.severity}">{badge}<div><p>{where}: {sentence(finding.text)}.</p>'
        f'<p class="advice">What to do: {with_code(finding.advice)}.</p></div></li>'
    )


def summary(findings: Sequence[Finding]) -> str:
    """How many there are of each severity."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ORDER}
    words = [f"{number} {severity}{'s' if number > 1 else ''}" for severity, number in counts.items() if number]
    return ", ".join(words) or "no findings"
