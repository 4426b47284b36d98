"""Findings of two states: which are new, which are gone, which stayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .finding import ORDER, Finding


@dataclass(frozen=True)
class Differences:
    """Findings of two states.

    Attributes:
        new: In the second state alone.
        gone: In the first state alone.
        stayed: In both, as pairs; severity, place and size may differ.
    """

    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    stayed: tuple[tuple[Finding, Finding], ...]

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
    for same in (_same_place, _same_kind):
        _pair(gone, new, stayed, same)
    ordered = sorted(stayed, key=lambda pair: ORDER[pair[1].severity])
    return Differences(tuple(new), tuple(gone), tuple(ordered))


def severity_change(pair: tuple[Finding, Finding]) -> str:
    """``stayed``, or ``worse`` or ``milder`` where the severity changed."""
    first, second = (ORDER[finding.severity] for finding in pair)
    return "stayed" if first == second else "worse" if second < first else "milder"


def _pair(
    gone: list[Finding],
    new: list[Finding],
    stayed: list[tuple[Finding, Finding]],
    same: Callable[[Finding, Finding], bool],
) -> None:
    for finding in list(gone):
        match = next((other for other in new if same(finding, other)), None)
        if match is not None:
            stayed.append((finding, match))
            gone.remove(finding)
            new.remove(match)


def _same_place(first: Finding, second: Finding) -> bool:
    return (first.kind, first.where) == (second.kind, second.where)


def _same_kind(first: Finding, second: Finding) -> bool:
    return first.kind == second.kind
