"""Outcomes from the tables that a report leaves: all that verdicts rest on, in three files an experiment."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

from ..protocol.records import Cell, Outcome, Search

Row = dict[str, str]
_CELL = ("experiment", "method", "start", "seed", "batch_size", "lr_max", "variant")


def read_tables(folder: Path) -> list[Outcome]:
    """What ``runs.csv``, ``curves.csv`` and ``searches.csv`` of a folder hold; numbers come back as they were."""
    curves: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for row in _rows(folder / "curves.csv"):
        curves.setdefault(_key(row), {}).setdefault(row["curve"], []).append(float(row["value"]))
    traces: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in _rows(folder / "searches.csv"):
        traces.setdefault(_key(row), []).append((float(row["lr"]), float(row["loss"])))
    return [_outcome(row, curves.get(_key(row), {}), traces.get(_key(row), [])) for row in _rows(folder / "runs.csv")]


def _rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream)


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in _CELL)


def _outcome(row: Row, curves: dict[str, list[float]], trace: list[tuple[float, float]]) -> Outcome:
    sizes = int(row["seed"]), int(row["batch_size"]), float(row["lr_max"])
    cell = Cell(row["experiment"], row["method"], row["start"], *sizes, row["variant"])  # type: ignore[arg-type]
    flags = (_flag(row[name]) for name in ("at_bound", "flat", "search_diverged"))
    search = Search(float(row["lr"]), _number(row["search_loss"]), trace, *flags)
    tests = _number(row["test_loss"]), _number(row["test_accuracy"]), _flag(row["diverged"])
    return Outcome(cell, search, curves, *tests, float(row["start_gap"]), float(row["seconds"])).checked()


def _number(text: str) -> float:
    return float(text) if text else math.nan


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"{text!r} is neither True nor False")
    return text == "True"
