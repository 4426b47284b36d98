"""Outcomes as tidy tables, one observation a row: all that verdicts rest on, in three CSV files an experiment."""

from __future__ import annotations

import csv
import io
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..protocol.records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Cell, Outcome, Search
from .files import write_atomically

Row = Mapping[str, Any]
_CELL = ("experiment", "method", "start", "seed", "batch_size", "lr_max", "variant")
_key = operator.itemgetter(*_CELL)
_CURVES = (TRAIN_LOSS, TRAIN_EVAL_LOSS, VALID_LOSS, VALID_ACCURACY)
_SEARCH = ("lr", "search_loss", "evaluations", "at_bound", "flat", "search_diverged")
_TEST = ("test_loss", "test_accuracy", "epochs", "diverged", "start_gap", "seconds")
_SOURCE = ("varprop", "torch", "cuda", "hardware", "commit", "dirty", "started")
_COLUMNS = {
    "runs": (*_CELL, *_SEARCH, *(f"final_{name}" for name in _CURVES), *_TEST, *_SOURCE),
    "curves": (*_CELL, "curve", "epoch", "value"),
    "searches": (*_CELL, "evaluation", "lr", "loss", "chosen"),
}


def write_tables(folder: Path, outcomes: Iterable[Outcome], manifest: dict[str, Any]) -> None:
    """Write ``runs.csv``, ``curves.csv`` and ``searches.csv`` of an experiment."""
    for name, rows in _tables(list(outcomes), manifest).items():
        stream = io.StringIO()
        writer = csv.DictWriter(stream, _COLUMNS[name], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", stream.getvalue().encode())


def _tables(outcomes: list[Outcome], manifest: dict[str, Any]) -> dict[str, list[Row]]:
    source = _source_row(manifest)
    return {
        "runs": [{**_run_row(outcome), **source} for outcome in outcomes],
        "curves": [
            {**asdict(outcome.cell), "curve": name, "epoch": epoch, "value": value}
            for outcome in outcomes
            for name, values in outcome.curves.items()
            for epoch, value in enumerate(values, 1)
        ],
        "searches": [
            {**asdict(o.cell), "evaluation": index, "lr": lr, "loss": loss, "chosen": lr == o.search.lr}
            for o in outcomes
            for index, (lr, loss) in enumerate(o.search.trace, 1)
        ],
    }


def _run_row(outcome: Outcome) -> Row:
    """One training run: what it was, what rate was found, how it ended."""
    search = outcome.search
    found = (search.lr, search.loss, len(search.trace), search.at_bound, search.flat, search.diverged)
    ends = {f"final_{name}": outcome.last(name) for name in _CURVES}
    rest = {name: getattr(outcome, name) for name in _TEST if hasattr(outcome, name)}
    epochs = max(map(len, outcome.curves.values()), default=0)
    return {**asdict(outcome.cell), **dict(zip(_SEARCH, found, strict=True)), **ends, "epochs": epochs, **rest}


def _source_row(manifest: dict[str, Any]) -> Row:
    """Versions, hardware and git state, None where unknown: cells of several sittings come from any of them."""
    git = manifest.get("git", {}) if len(manifest.get("sittings", ())) < 2 else {}
    known = {**manifest.get("versions", {}), **git, **{name: manifest.get(name) for name in ("hardware", "started")}}
    return {name: known.get(name) for name in _SOURCE}


def read_tables(folder: Path) -> list[Outcome]:
    """The outcomes that `write_tables` wrote; numbers come back as they were."""
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


def _outcome(row: Row, curves: dict[str, list[float]], trace: list[tuple[float, float]]) -> Outcome:
    sizes = int(row["seed"]), int(row["batch_size"]), float(row["lr_max"])
    cell = Cell(row["experiment"], row["method"], row["start"], *sizes, row["variant"])
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
