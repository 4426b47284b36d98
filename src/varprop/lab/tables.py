"""Results as tidy tables, one observation a row: CSV always, Parquet where pyarrow is installed."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .gather import Run
from .records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Outcome
from .store import write_atomically

Row = dict[str, Any]
CELL = ("experiment", "method", "start", "seed", "batch_size", "lr_max", "variant")
ENDS = (TRAIN_LOSS, TRAIN_EVAL_LOSS, VALID_LOSS, VALID_ACCURACY)
FOUND = ("lr", "search_loss", "evaluations", "at_bound", "flat", "search_diverged")
END = (*(f"final_{name}" for name in ENDS), "test_loss", "test_accuracy", "epochs", "diverged", "start_gap", "seconds")
SOURCE = ("varprop", "torch", "cuda", "hardware", "commit", "dirty", "started")
COLUMNS = {
    "runs": (*CELL, *FOUND, *END, *SOURCE),
    "curves": (*CELL, "curve", "epoch", "value"),
    "searches": (*CELL, "evaluation", "lr", "loss", "chosen"),
}


def write(run: Run, folder: Path) -> list[Path]:
    """Writes ``runs``, ``curves`` and ``searches`` of an experiment.

    Args:
        run: The experiment.
        folder: Made where it does not exist.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in tables(run).items():
        written.append(write_csv(folder / f"{name}.csv", COLUMNS[name], rows))
        written += write_parquet(folder / f"{name}.parquet", COLUMNS[name], rows, run.manifest)
    return written


def tables(run: Run) -> dict[str, list[Row]]:
    """The rows of every table."""
    source = source_row(run.manifest)
    return {
        "runs": [{**run_row(outcome), **source} for outcome in run.outcomes],
        "curves": [row for outcome in run.outcomes for row in curve_rows(outcome)],
        "searches": [row for outcome in run.outcomes for row in search_rows(outcome)],
    }


def run_row(outcome: Outcome) -> Row:
    """One training run: what it was, what rate was found, how it ended."""
    search = outcome.search
    found = (search.lr, search.loss, len(search.trace), search.at_bound, search.flat, search.diverged)
    ends = {f"final_{name}": last(outcome, name) for name in ENDS}
    rest = {name: getattr(outcome, name) for name in END if hasattr(outcome, name)}
    epochs = max(map(len, outcome.curves.values()), default=0)
    return {**asdict(outcome.cell), **dict(zip(FOUND, found, strict=True)), **ends, "epochs": epochs, **rest}


def last(outcome: Outcome, name: str) -> float | None:
    """The last value of a curve, None where there is none."""
    values = outcome.curves.get(name)
    return values[-1] if values else None


def source_row(manifest: dict[str, Any]) -> Row:
    """Versions, hardware and git state, None where unknown: cells of several sittings come from any of them."""
    versions = part(manifest, "versions")
    git = part(manifest, "git") if len(sittings(manifest)) < 2 else {}
    known = {**versions, **git, "hardware": manifest.get("hardware"), "started": manifest.get("started")}
    return {name: known.get(name) for name in SOURCE}


def sittings(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The commands of a run that was made in pieces, each with its git state where that was kept."""
    kept = manifest.get("sittings")
    if isinstance(kept, list):
        return [sitting for sitting in kept if isinstance(sitting, dict)]
    command = manifest.get("command")
    return [{"command": one} for one in command.split(" && ")] if isinstance(command, str) and command else []


def part(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the manifest, empty where it is missing."""
    value = manifest.get(name)
    return value if isinstance(value, dict) else {}


def curve_rows(outcome: Outcome) -> Iterator[Row]:
    """One row an epoch and curve."""
    for name, values in outcome.curves.items():
        for epoch, value in enumerate(values, 1):
            yield {**asdict(outcome.cell), "curve": name, "epoch": epoch, "value": value}


def search_rows(outcome: Outcome) -> Iterator[Row]:
    """One row for each evaluation of the search, in its order."""
    for index, (rate, loss) in enumerate(outcome.search.trace, 1):
        chosen = rate == outcome.search.lr
        yield {**asdict(outcome.cell), "evaluation": index, "lr": rate, "loss": loss, "chosen": chosen}


def write_csv(file: Path, columns: tuple[str, ...], rows: list[Row]) -> Path:
    """Writes rows under a header, whole or not at all."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(file, stream.getvalue().encode())
    return file


def write_parquet(file: Path, columns: tuple[str, ...], rows: list[Row], manifest: dict[str, Any]) -> list[Path]:
    """The same as Parquet, the manifest in its metadata; nothing where pyarrow is not installed."""
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        return []
    table = pyarrow.table({name: pyarrow.array([text_or_value(row.get(name)) for row in rows]) for name in columns})
    buffer = io.BytesIO()
    parquet.write_table(table.replace_schema_metadata({"varprop": json.dumps(manifest, default=str)}), buffer)
    write_atomically(file, buffer.getvalue())
    return [file]


def text_or_value(value: Any) -> Any:
    """A plain value as it is, anything else as text."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
