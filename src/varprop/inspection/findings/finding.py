"""One finding: what is wrong, where, and what to do about it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
NOTHING_FOUND = "Nothing to worry about was found."


def times(factor: float) -> str:
    """A factor as people write it: "2.4 times", "12,000 times", "1/30 of"; two digits."""
    if not math.isfinite(factor) or factor == 0:
        return f"{factor:.3g} times"
    if 0.5 < factor < 1:
        return f"{factor:.2g} times"
    size = factor if factor >= 1 else 1 / factor
    rounded = float(f"{size:.2g}")
    text = f"{size:.0e}" if rounded >= 1e9 else f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"
    return f"{text} times" if factor >= 1 else f"1/{text} of"


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
