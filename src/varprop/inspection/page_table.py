"""The table of all rows; its script sorts it by the keys that stand in the cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .page_figures import is_layer
from .page_text import escape, number, percent
from .rows import Row


@dataclass(frozen=True)
class Column:
    """A heading, what it means, whether it holds numbers, and whether the table begins sorted by it."""

    name: str
    meaning: str
    numeric: bool = True
    first: bool = False


@dataclass(frozen=True)
class Cell:
    """What is shown, and what it is sorted by; cells without a key come last."""

    text: str
    key: float | str | None = None
    hint: str = ""


def number_cell(value: float | None) -> Cell:
    """A number with three digits."""
    return Cell(number(value), value)


def share_cell(share: float | None) -> Cell:
    """A share in percent."""
    return Cell(percent(share), share)


def text_cell(text: str, hint: str = "") -> Cell:
    """Words."""
    return Cell(text, text, hint)


def table(
    rows: Sequence[Row], columns: Sequence[Column], cells: Sequence[Sequence[Cell]], severities: Mapping[int, str]
) -> str:
    """The table as HTML: number and name of every row, then the columns."""
    names = [Column("#", "order of execution"), Column("layer", "path of the module or operation", False), *columns]
    head = "".join(_heading(column) for column in names)
    body = "".join(
        _line(index, row, columns, cells[index], severities.get(index, "")) for index, row in enumerate(rows)
    )
    return f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _heading(column: Column) -> str:
    side = ' class="number"' if column.numeric else ""
    order = ' aria-sort="ascending"' if column.name == "#" else ' aria-sort="none"'
    order += " data-first" if column.first else ""
    button = f'<button type="button" title="{escape(column.meaning)}">{escape(column.name)}</button>'
    return f'<th scope="col"{side}{order}>{button}</th>'


def _line(index: int, row: Row, columns: Sequence[Column], cells: Sequence[Cell], severity: str) -> str:
    kind = f"{'layer' if is_layer(row) else 'other'} {severity}".strip()
    name = f'<a href="#tree-{index}">{escape(row.label)}</a>'
    shown = "".join(_cell(column, cell) for column, cell in zip(columns, cells, strict=True))
    return (
        f'<tr id="row-{index}" class="{kind}"><td class="number" data-key="{index}">{index + 1}</td>'
        f'<th scope="row" data-key="{escape(row.label)}">{name}</th>{shown}</tr>'
    )


def _cell(column: Column, cell: Cell) -> str:
    side = ' class="number"' if column.numeric else ""
    hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
    return f'<td{side}{hint} data-key="{_key(cell.key)}">{escape(cell.text)}</td>'


def _key(key: float | str | None) -> str:
    if key is None or key != key:
        return ""
    return escape(key) if isinstance(key, str) else f"{key:.6g}".replace("inf", "Infinity")
