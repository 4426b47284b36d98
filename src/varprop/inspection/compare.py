"""Two states of one model side by side: before and after initialization, at the first epoch and at the last."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import VarpropError
from .compare_findings import Differences, differences
from .compare_text import changes_text, findings_text
from .findings import Finding
from .page_figures import is_layer
from .page_text import finite_json
from .rows import Row

if TYPE_CHECKING:
    from .report import Report

FORMAT = 1  # of to_dict
LARGEST = 12  # changes that `show` prints


@dataclass(frozen=True)
class Change:
    """One row in both states.

    Attributes:
        before: In the first state.
        after: In the second.
    """

    before: Row
    after: Row

    @property
    def label(self) -> str:
        """Of the row."""
        return self.after.label

    @property
    def std_factor(self) -> float | None:
        """By how much the standard deviation was multiplied."""
        return _factor(self.before.numbers["std"], self.after.numbers["std"])

    @property
    def gradient_factor(self) -> float | None:
        """By how much the gradient summed over positions was multiplied."""
        return _factor(self.before.gradient_total, self.after.gradient_total)

    @property
    def size(self) -> float:
        """How large the change is: the larger of both factors or of their inverses, as a logarithm to the base 2."""
        return max(_doublings(self.std_factor), _doublings(self.gradient_factor))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        states = {"before": self.before, "after": self.after}
        numbers = {
            name: {**row.numbers, "gradient_total": row.gradient_total, "growth": row.growth}
            for name, row in states.items()
        }
        factors = {"std_factor": self.std_factor, "gradient_factor": self.gradient_factor, "size": self.size}
        return {"label": self.label, "name": self.after.name, "leaf": self.after.leaf, **numbers, **factors}


@dataclass(frozen=True)
class Comparison:
    """What changed between two states of a model.

    Attributes:
        before: The report of the first state.
        after: The report of the second.
        names: What the states are called.
        changes: Every row both have, in the order of execution.
        only_before: Labels of rows that only the first has.
        only_after: Labels of rows that only the second has.
        findings: Which findings are new, gone, or stayed.
    """

    before: Report
    after: Report
    names: tuple[str, str]
    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    findings: Differences

    @property
    def new(self) -> tuple[Finding, ...]:
        """Findings of the second state that the first does not have."""
        return self.findings.new

    @property
    def gone(self) -> tuple[Finding, ...]:
        """Findings of the first state that the second no longer has."""
        return self.findings.gone

    def largest(self, count: int | None = None) -> list[Change]:
        """The layers that changed most, the largest change first."""
        layers = [change for change in self.changes if is_layer(change.after)]
        return sorted(layers, key=lambda change: -change.size)[:count]

    def text(self, count: int = LARGEST) -> str:
        """Findings and the largest changes as text."""
        heading = f"{self.after.model}: {self.names[0]} -> {self.names[1]}"
        return "\n".join([heading, *findings_text(self.findings), "", changes_text(self.largest(count), self.names)])

    def show(self, file: TextIO | None = None) -> None:
        """Print findings that are new or gone, and the largest changes."""
        print(self.text(), file=file or sys.stdout)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""
        return {
            "format": FORMAT,
            "model": self.after.model,
            "names": list(self.names),
            "findings": self.findings.to_dict(),
            "gradient_ratio": [self.before.gradient_ratio, self.after.gradient_ratio],
            "changes": [change.to_dict() for change in self.changes],
            "only_before": list(self.only_before),
            "only_after": list(self.only_after),
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """The dict as JSON text, also written to a file if a path is given; what is not finite becomes null."""
        text = finite_json(self.to_dict())
        if path is not None:
            Path(path).write_text(text + "\n", "utf-8")
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page with nothing outside it, also written to a file if a path is given.

        Raises:
            VarpropError: If the file cannot be written.
        """
        from .compare_page import comparison_page
        from .page import render, write

        text = render(comparison_page(self))
        if path is not None:
            write(text, path)
        return text

    def figure(self, path: str | Path) -> Path:
        """One picture of both states: standard deviation and gradient by depth, as PNG, SVG or PDF.

        Raises:
            VarpropError: If matplotlib is not installed or the file cannot be written.
        """
        from .compare_figure import draw

        return draw(self, Path(path))

    def _repr_html_(self) -> str:
        from .page_notebook import comparison_html

        return comparison_html(self)

    def __repr__(self) -> str:
        return self.text()


def compare(before: Report, after: Report, names: tuple[str, str] = ("before", "after")) -> Comparison:
    """Pair the rows of two reports by their labels, and their findings.

    Raises:
        VarpropError: If the reports have no row in common.
    """
    first, second = _labelled(before.rows), _labelled(after.rows)
    common = [key for key in second if key in first]
    if not any(first[key].leaf and second[key].leaf for key in common):
        raise VarpropError(
            f"These are reports of different models, {before.model} and {after.model}: no layer has the same name."
        )
    return Comparison(
        before,
        after,
        names,
        tuple(Change(first[key], second[key]) for key in common),
        tuple(label for label, number in first if (label, number) not in second),
        tuple(label for label, number in second if (label, number) not in first),
        differences(before.findings, after.findings),
    )


def _labelled(rows: tuple[Row, ...]) -> dict[tuple[str, int], Row]:
    """Rows by label, and by number among those of one label."""
    seen: Counter[str] = Counter()
    found = {}
    for row in rows:
        found[row.label, seen[row.label]] = row
        seen[row.label] += 1
    return found


def _factor(before: float | None, after: float | None) -> float | None:
    if before is None or after is None or (before == 0 and after == 0):
        return None
    return after / before if before else math.inf


def _doublings(factor: float | None) -> float:
    if factor is None or math.isnan(factor):
        return 0.0
    return abs(math.log2(factor)) if 0 < factor < math.inf else math.inf
