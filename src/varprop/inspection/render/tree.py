"""The tree of modules as nested lists that fold without a script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..findings.finding import ORDER
from ..numbers.row import ReportRow

DEEPEST, LARGEST_PART = 4, 0.6  # levels of the tree that can be parts, and their largest share of the layers
OPEN_ROWS = 60  # a tree of more rows begins folded below its first level


@dataclass(frozen=True)
class TreeEntry:
    """One line of the tree."""

    name: str  # of the module or operation
    kind: str  # class of the module, or ``operation``
    mark: str  # look of the mark behind it, if any
    mark_title: str  # what the mark says
    closes: int  # how many levels end before it
    holds: bool  # whether a level begins with it
    unfolded: bool  # whether that is open at first


def entries(rows: Sequence[ReportRow], severities: Mapping[int, str]) -> tuple[list[TreeEntry], int]:
    """All lines in order, and how many levels are open after the last."""
    found: list[TreeEntry] = []
    open_depths: list[int] = []
    for index, row in enumerate(rows):
        still = [depth for depth in open_depths if depth < row.depth]
        end = ends(rows, index)
        name, kind = (row.own_name, row.name) if row.kind == "module" else (row.name, "operation")
        unfolded = len(rows) <= OPEN_ROWS or row.depth == 0
        mark = _mark(index, end, severities)
        found.append(TreeEntry(name, kind, *mark, len(open_depths) - len(still), end > index + 1, unfolded))
        open_depths = [*still, row.depth] if end > index + 1 else still
    return found, len(open_depths)


def ends(rows: Sequence[ReportRow], index: int) -> int:
    """The index after the last row inside a row."""
    after = index + 1
    while after < len(rows) and rows[after].depth > rows[index].depth:
        after += 1
    return after


def groups(rows: Sequence[ReportRow]) -> list[str]:
    """For every row the part of the model it belongs to, for the axis of the plots: few, and none nearly all of it."""
    found: list[str] = []
    for length in range(1, DEEPEST + 1):
        found = [".".join(row.path.split(".")[:length]) for row in rows]
        sizes = Counter(group for group, row in zip(found, rows, strict=True) if row.is_layer)
        if len(sizes) > 2 and max(sizes.values()) <= LARGEST_PART * sum(sizes.values()):
            return found
    return found


def _mark(index: int, end: int, severities: Mapping[int, str]) -> tuple[str, str]:
    """The worst that is said about a row, or about those inside it."""
    if own := severities.get(index):
        return own, own
    inside = [severities[row] for row in range(index + 1, end) if row in severities]
    worst = min(inside, key=ORDER.__getitem__, default="")
    return (f"inside {worst}", f"{worst} inside") if worst else ("", "")
