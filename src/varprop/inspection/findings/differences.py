"""Findings of two states: which are new, which are gone, which stayed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .finding import ORDER, Finding

NEITHER_FOUND = "Neither state has findings."


@dataclass(frozen=True)
class Differences:
    """Findings of two states."""

    new: tuple[Finding, ...]  # in the second state alone
    gone: tuple[Finding, ...]  # in the first state alone
    stayed: tuple[tuple[Finding, Finding], ...]  # in both, as pairs; severity, place and size may differ

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "new": [finding.to_dict() for finding in self.new],
            "gone": [finding.to_dict() for finding in self.gone],
            "stayed": [{"before": first.to_dict(), "after": second.to_dict()} for first, second in self.stayed],
        }


def differences(before: Sequence[Finding], after: Sequence[Finding]) -> Differences:
    """Pair findings of one kind and place, then those of one kind: each tells of its worst layer, which may move."""
    gone, new, stayed = list(before), list(after), list[tuple[Finding, Finding]]()
    for same in (("kind", "where"), ("kind",)):
        key = operator.attrgetter(*same)
        for finding in list(gone):
            match = next((other for other in new if key(finding) == key(other)), None)
            if match is not None:
                stayed.append((finding, match))
                gone.remove(finding)
                new.remove(match)
    ordered = sorted(stayed, key=lambda pair: ORDER[pair[1].severity])
    return Differences(tuple(new), tuple(gone), tuple(ordered))


def severity_change(pair: tuple[Finding, Finding]) -> str:
    """``stayed``, or ``worse`` or ``milder`` where the severity changed."""
    first, second = (ORDER[finding.severity] for finding in pair)
    return "stayed" if first == second else "worse" if second < first else "milder"
