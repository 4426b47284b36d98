"""Columns of the tables on pages and in notebooks: what they are called, what they mean, and what they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .format import number, percent

Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class TableCell:
    """What is shown, and what it is sorted by; cells without a key come last."""

    text: str
    key: float | str | None = None
    hint: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # its heading
    read: Callable[[Any], TableCell]  # the cell of a row, or of a change in the table of a comparison
    meaning: str = ""  # what it means
    text: bool = False  # whether it holds words
    first: bool = False  # whether the table begins sorted by it


def number_column(name: str, value: Reader, meaning: str = "", first: bool = False) -> Column:
    """A column of numbers with three digits."""
    return Column(name, lambda subject: TableCell(number(value(subject)), value(subject)), meaning, first=first)


def share_column(name: str, value: Reader, meaning: str = "") -> Column:
    """A column of shares in percent."""
    return Column(name, lambda subject: TableCell(percent(value(subject)), value(subject)), meaning)


def text_column(name: str, value: Reader, hint: Reader = lambda _: "", meaning: str = "") -> Column:
    """A column of words, with what to show when they are pointed at."""
    return Column(name, lambda s: TableCell(value(s), value(s), hint(s)), meaning, text=True)


def sort_key(key: float | str | None) -> str:
    """What the page's script sorts by."""
    if key is None or key != key:
        return ""
    return key if isinstance(key, str) else f"{key:.6g}".replace("inf", "Infinity")
