"""Results of a folder for reports, and as tidy tables: all that verdicts rest on, in three CSV files an experiment."""

from __future__ import annotations

import csv
import io
import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..protocol.experiments import PAPER_GRIDS
from ..protocol.records import (
    METHODS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_LOSS,
    Cell,
    Outcome,
    Search,
    experiment_rank,
    grouped,
    method_rank,
    start_rank,
)
from .folder import Store, StoreError, write_atomically

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
    searched = (search.lr, search.loss, len(search.trace), search.at_bound, search.flat, search.diverged)
    ends = {f"final_{name}": outcome.last(name) for name in _CURVES}
    ending = {name: getattr(outcome, name) for name in _TEST if hasattr(outcome, name)}
    epochs = max(map(len, outcome.curves.values()), default=0)
    return {**asdict(outcome.cell), **dict(zip(_SEARCH, searched, strict=True)), **ends, "epochs": epochs, **ending}


def _source_row(manifest: dict[str, Any]) -> Row:
    """Versions, hardware and git state, None where unknown: cells of several sittings come from any of them."""
    git = manifest.get("git", {}) if len(manifest.get("sittings", ())) < 2 else {}
    values = {**manifest.get("versions", {}), **git, **{name: manifest.get(name) for name in ("hardware", "started")}}
    return {name: values.get(name) for name in _SOURCE}


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


WITHOUT_CELLS = ("relu",)  # a figure, and nothing trained
_NO_EXPERIMENT = ("claims", "search", "all")  # names of the command line only


@dataclass(frozen=True)
class Run:
    """One experiment as found on disk."""

    experiment: str  # its name, and that of its folder
    outcomes: list[Outcome]  # of its finished cells, in a fixed order
    manifest: dict[str, Any] = field(default_factory=dict)  # how it was run; empty where the file is missing
    problems: list[str] = field(default_factory=list)  # one sentence for each thing that is missing or cannot be read
    # whether the outcomes come from the tables of a report, because the files of the cells are not there
    compact: bool = False

    def select(self, **fields: object) -> list[Outcome]:
        """The outcomes whose cells have these values."""
        return [o for o in self.outcomes if all(getattr(o.cell, name) == value for name, value in fields.items())]


def read_runs(out: Path, experiments: list[str] | None = None) -> list[Run]:
    """The runs asked for, found or not, and all others that lie in the folder given to ``--out``."""
    asked = [name for name in experiments or [] if name not in _NO_EXPERIMENT]
    folders = list(out.iterdir()) if out.is_dir() else []
    names = [f.name for f in folders if (f / "manifest.json").is_file() or (f / "cells").is_dir()]
    return [read_run(out / name) for name in sorted({*asked, *names}, key=experiment_rank)]


def read_run(folder: Path) -> Run:
    """All that one experiment's folder holds."""
    problems: list[str] = []
    store, manifest = Store(folder), {}
    try:
        manifest = store.manifest()
    except StoreError as error:
        problems.append(f"How this was run is unknown: {error}")
    compact = (folder / "runs.csv").is_file() and not (folder / "cells").is_dir()
    try:
        outcomes = read_tables(folder) if compact else store.outcomes(problems)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"The tables in {folder} cannot be read ({type(error).__name__}: {error})")
        outcomes = []
    outcomes.sort(key=_place_in_paper)
    if folder.name not in WITHOUT_CELLS:
        problems += _missing_cells(folder.name, outcomes, manifest) + _missing_seeds(outcomes, manifest)
    return Run(folder.name, outcomes, manifest, problems, compact)


def _place_in_paper(outcome: Outcome) -> tuple[Any, ...]:
    cell = outcome.cell
    ranks = start_rank(cell.start), method_rank(cell.method, cell.variant)
    return cell.lr_max, cell.batch_size, *ranks, cell.seed


def _missing_cells(experiment: str, outcomes: list[Outcome], manifest: dict[str, Any]) -> list[str]:
    """Which methods of the grid have no outcome at all, start by start."""
    if not outcomes:
        return ["no finished cells"]
    methods, starts = _expected_grid(experiment, manifest)
    settings = sorted({(o.cell.lr_max, o.cell.batch_size) for o in outcomes})
    have = {(o.cell.lr_max, o.cell.batch_size, o.cell.start, o.cell.method) for o in outcomes}
    return [
        f"no finished cell of {method} from {start} (batch {batch}, lr at most {bound:g})"
        for bound, batch in settings
        for start in starts
        for method in methods
        if (bound, batch, start, method) not in have
    ]


def _expected_grid(experiment: str, manifest: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Methods and starts to be expected: the paper's, the configuration's, or none beyond those found."""
    if experiment in PAPER_GRIDS:
        return list(METHODS), list(STARTS)
    configuration = {} if experiment == "naive" else manifest.get("configuration", {})
    return configuration.get("methods", []), configuration.get("starts", [])


def _missing_seeds(outcomes: list[Outcome], manifest: dict[str, Any]) -> list[str]:
    """Which seeds a method lacks from starts where it has others."""
    expected = {*manifest.get("seeds", []), *(o.cell.seed for o in outcomes)}
    have = grouped(outcomes, lambda c: (c.lr_max, c.batch_size, c.method, c.variant, c.start))
    lacking: dict[tuple[str, str], list[str]] = {}
    for (bound, batch, method, variant, start), group in have.items():
        if lost := ", ".join(map(str, sorted(expected - {o.cell.seed for o in group}))):
            what = f"{method}{f' ({variant})' * bool(variant)} with seed {lost}"
            lacking.setdefault((what, f"(batch {batch}, lr at most {bound:g})"), []).append(start)
    return [f"no finished cell of {what} from {', '.join(starts)} {where}" for (what, where), starts in lacking.items()]
