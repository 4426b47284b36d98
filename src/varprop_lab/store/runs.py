"""Reads all results in a folder for reports; whatever cannot be read is named, and the rest still counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..protocol.experiments import PAPER_GRIDS
from ..protocol.labels import experiment_rank, method_rank, start_rank
from ..protocol.records import METHODS, STARTS, Outcome, grouped
from .files import StoreError
from .folder import Store
from .tables import read_tables

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
    found = [f.name for f in folders if (f / "manifest.json").is_file() or (f / "cells").is_dir()]
    return [read_run(out / name) for name in sorted({*asked, *found}, key=experiment_rank)]


def read_run(folder: Path) -> Run:
    """All that one experiment's folder holds."""
    problems: list[str] = []
    store, manifest = Store(folder), {}
    try:
        manifest = store.manifest()
    except StoreError as error:
        problems.append(f"How this was run is unknown: {error}")
    compact = (folder / "runs.csv").is_file() and not (folder / "cells").is_dir()
    outcomes = _read_compact(folder, problems) if compact else store.outcomes(problems)
    outcomes.sort(key=_place_in_paper)
    if folder.name not in WITHOUT_CELLS:
        problems += _missing_cells(folder.name, outcomes, manifest) + _missing_seeds(outcomes, manifest)
    return Run(folder.name, outcomes, manifest, problems, compact)


def _read_compact(folder: Path, problems: list[str]) -> list[Outcome]:
    try:
        return read_tables(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"The tables in {folder} cannot be read ({type(error).__name__}: {error})")
        return []


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
    for (bound, batch, method, variant, start), those in have.items():
        if lost := ", ".join(map(str, sorted(expected - {o.cell.seed for o in those}))):
            what = f"{method}{f' ({variant})' * bool(variant)} with seed {lost}"
            lacking.setdefault((what, f"(batch {batch}, lr at most {bound:g})"), []).append(start)
    return [f"no finished cell of {what} from {', '.join(starts)} {where}" for (what, where), starts in lacking.items()]
