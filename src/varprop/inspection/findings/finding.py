"""One finding: what is wrong, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
NOTHING_FOUND = "Nothing to worry about was found."


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing.

    Attributes:
        severity: ``error``, ``warning`` or ``note``.
        kind: What it is about, for programs: growth, decay, saturated, dead, always_on, shift, gradient, ...
        where: Label of the row it was found at.
        text: A sentence.
        advice: What to do about it.
        value: The number behind it.
    """

    severity: Severity
    kind: str
    where: str
    text: str
    advice: str
    value: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.text} -> {self.advice}."
