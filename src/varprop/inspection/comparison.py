"""Two states of one model side by side: before and after initialization, at the first epoch and at the last."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from .data import ComparisonData
from .findings.finding import Finding
from .render.comparison_page import comparison_page, comparison_summary
from .render.exports import Exports
from .render.figure import draw
from .render.page import Page
from .render.text import comparison_text

LARGEST = 12  # changes that `show` prints


@dataclass(frozen=True, repr=False)
class Comparison(ComparisonData, Exports):
    """What changed between two states of a model; `ComparisonData` says what it holds."""

    @property
    def new(self) -> tuple[Finding, ...]:
        """Findings of the second state that the first does not have."""
        return self.findings.new

    @property
    def gone(self) -> tuple[Finding, ...]:
        """Findings of the first state that the second no longer has."""
        return self.findings.gone

    def text(self, count: int = LARGEST) -> str:
        """Findings and the largest changes as text."""
        return comparison_text(self, count)

    def show(self, file: TextIO | None = None) -> None:
        """Print findings that are new or gone, and the largest changes."""
        print(self.text(), file=file or sys.stdout)

    def figure(self, path: str | Path) -> Path:
        """One picture of both states: standard deviation and gradient by depth, as PNG, SVG or PDF.

        Raises:
            VarpropError: If matplotlib is not installed or the file cannot be written.
        """
        return draw(self, Path(path))

    def _page(self) -> Page:
        return comparison_page(self)

    def _repr_html_(self) -> str:
        return comparison_summary(self)
