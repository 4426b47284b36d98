"""Results as tidy tables, one observation a row."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..protocol.records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Outcome
from ..store.files import write_atomically
from ..store.runs import Run
from .facts import part, sittings

Row = dict[str, Any]
_CELL = ("experiment", "method", "start", "seed", "batch_size", "lr_max", "variant")
_CURVES = (TRAIN_LOSS, TRAIN_EVAL_LOSS, VALID_LOSS, VALID_ACCURACY)
_SEARCH = ("lr", "search_loss", "evaluations", "at_bound", "flat", "search_diverged")
_TEST = ("test_loss", "test_accuracy", "epochs", "diverged", "start_gap", "seconds")
_SOURCE = ("varprop", "torch", "cuda", "hardware", "commit", "dirty", "started")
COLUMNS = {
    "runs": (*_CELL, *_SEARCH, *(f"final_{name}" for name in _CURVES), *_TEST, *_SOURCE),
    "curves": (*_CELL, "curve", "epoch", "value"),
    "searches": (*_CELL, "evaluation", "lr", "loss", "chosen"),
}


def write(run: Run, folder: Path) -> None:
    """Write ``runs.csv``, ``curves.csv`` and ``searches.csv`` of an experiment."""
    for name, rows in _tables(run).items():
        stream = io.StringIO()
        writer = csv.DictWriter(stream, COLUMNS[name], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(folder / f"{name}.csv", stream.getvalue().encode())


def _tables(run: Run) -> dict[str, list[Row]]:
    source = _source_row(run.manifest)
    return {
        "runs": [{**_run_row(outcome), **source} for outcome in run.outcomes],
        "curves": [
            {**asdict(outcome.cell), "curve": name, "epoch": epoch, "value": value}
            for outcome in run.outcomes
            for name, values in outcome.curves.items()
            for epoch, value in enumerate(values, 1)
        ],
        "searches": [
            {**asdict(o.cell), "evaluation": index, "lr": lr, "loss": loss, "chosen": lr == o.search.lr}
            for o in run.outcomes
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
    git = part(manifest, "git") if len(sittings(manifest)) < 2 else {}
    known = {**part(manifest, "versions"), **git, **{name: manifest.get(name) for name in ("hardware", "started")}}
    return {name: known.get(name) for name in _SOURCE}
