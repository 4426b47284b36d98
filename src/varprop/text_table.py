"""Tables of text: aligned columns for a terminal, or Markdown; the core, the lab and the command line share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """A heading, the columns, and rows of text; the columns named in `left` are aligned to the left."""

    heading: str
    columns: Sequence[str]
    rows: Rows
    left: Sequence[str] = ()

    def without_empty_columns(self) -> Table:
        """The table without columns that no row has anything in."""
        used = [index for index in range(len(self.columns)) if any(row[index] for row in self.rows)]
        columns, *rows = ([row[index] for index in used] for row in (self.columns, *self.rows))
        return Table(self.heading, columns, rows, self.left)

    def plain(self) -> str:
        """The heading, if it has one, and aligned columns."""
        aligned = [_aligned(column, column[0] in self.left) for column in zip(self.columns, *self.rows, strict=True)]
        lines = ["  ".join(row).rstrip() for row in zip(*aligned, strict=True)]
        return "\n".join([self.heading, *lines] if self.heading else lines)

    def markdown(self) -> str:
        """The columns as Markdown, without the heading."""
        rules = ["---" if column in self.left else "---:" for column in self.columns]
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.columns, rules, *self.rows))


def _aligned(column: Sequence[str], left: bool) -> list[str]:
    width = max(map(len, column))
    return [text.ljust(width) if left else text.rjust(width) for text in column]


def text_table(header: Sequence[str], lines: Rows) -> str:
    """Columns aligned to the left, with a rule below the header."""
    first, *others = Table("", header, lines, left=header).plain().split("\n")
    return "\n".join([first, "-" * max(map(len, (first, *others))), *others])


def extents_text(full: Sequence[int], uniform: Sequence[bool]) -> str:
    """Extents joined by x, those of uniform axes in brackets."""
    return "x".join(f"({extent})" if alike else str(extent) for extent, alike in zip(full, uniform, strict=True))
