"""The tree of modules as nested lists that fold without a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .findings import ORDER
from .page_figures import is_layer
from .page_text import escape
from .rows import Row

DEEPEST, LARGEST_PART = 4, 0.6  # levels of the tree that can be parts, and their largest share of the layers
OPEN_ROWS = 60  # a tree of more rows begins folded below its first level


def tree(rows: Sequence[Row], severities: Mapping[int, str]) -> str:
    """The whole tree; every entry leads to its row of the table."""
    parts: list[str] = []
    open_depths: list[int] = []
    for index, row in enumerate(rows):
        while open_depths and row.depth <= open_depths[-1]:
            parts.append("</div></details>")
            open_depths.pop()
        entry = _entry(index, row, _mark(index, ends(rows, index), severities))
        if ends(rows, index) > index + 1:
            unfolded = " open" if len(rows) <= OPEN_ROWS or row.depth == 0 else ""
            parts.append(f"<details{unfolded}><summary>{entry}</summary><div>")
            open_depths.append(row.depth)
        else:
            parts.append(f'<div class="leaf">{entry}</div>')
    return "".join([*parts, *["</div></details>"] * len(open_depths)])


def ends(rows: Sequence[Row], index: int) -> int:
    """The index after the last row inside a row."""
    after = index + 1
    while after < len(rows) and rows[after].depth > rows[index].depth:
        after += 1
    return after


def groups(rows: Sequence[Row]) -> list[str]:
    """For every row the part of the model it belongs to, for the axis of the plots: few, and none nearly all of it."""
    found: list[str] = []
    for length in range(1, DEEPEST + 1):
        found = [".".join(row.path.split(".")[:length]) for row in rows]
        sizes = Counter(group for group, row in zip(found, rows, strict=True) if is_layer(row))
        if len(sizes) > 2 and max(sizes.values()) <= LARGEST_PART * sum(sizes.values()):
            return found
    return found


def _mark(index: int, end: int, severities: Mapping[int, str]) -> str:
    """The worst that is said about a row, or about those inside it."""
    if own := severities.get(index):
        return f'<span class="mark {own}" title="{own}"></span>'
    inside = [severities[row] for row in range(index + 1, end) if row in severities]
    worst = min(inside, key=ORDER.__getitem__, default="")
    return f'<span class="mark inside {worst}" title="{worst} inside"></span>' if worst else ""


def _entry(index: int, row: Row, mark: str) -> str:
    own = row.path.rpartition(".")[2] or "(model)"
    own += f" #{row.call + 1}" if row.call else ""
    name, kind = (own, row.name) if row.kind == "module" else (row.name, "operation")
    return f'<a href="#row-{index}" id="tree-{index}">{escape(name)}</a>{mark}<i>{escape(kind)}</i>'
