"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, with a rule below the header."""
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *lines)
    ]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def extents_text(full: Sequence[int], uniform: Sequence[bool]) -> str:
    """Extents joined by x, those of uniform axes in brackets."""
    return "x".join(f"({extent})" if alike else str(extent) for extent, alike in zip(full, uniform, strict=True))
