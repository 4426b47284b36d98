"""Reads what lies in the folder of a run; whatever cannot be read is named, and the rest still counts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .records import METHODS, STARTS, Outcome
from .style import experiment_rank, method_rank, start_rank

GRIDS = ("mnist", "noisy-mnist", "noisy-cifar10")  # every method from every start
WITHOUT_CELLS = ("relu",)  # a figure, and nothing trained
NO_EXPERIMENT = ("claims", "all")  # names of the command line only


@dataclass(frozen=True)
class Run:
    """One experiment as found on disk.

    Attributes:
        experiment: Its name, and that of its folder.
        outcomes: Of its finished cells, in a fixed order.
        manifest: How it was run; empty where the file is missing.
        problems: One sentence for each thing that is missing or cannot be read.
    """

    experiment: str
    outcomes: list[Outcome]
    manifest: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def select(self, **fields: object) -> list[Outcome]:
        """The outcomes whose cells have these values."""
        return [o for o in self.outcomes if all(getattr(o.cell, name) == value for name, value in fields.items())]


def gather(out: Path, experiments: list[str] | None = None) -> list[Run]:
    """The runs asked for, found or not, and all others that lie in the folder.

    Args:
        out: The folder given to ``--out``.
        experiments: Names that must appear, if only as missing.
    """
    asked = [name for name in experiments or [] if name not in NO_EXPERIMENT]
    found = [folder.name for folder in out.iterdir() if is_experiment(folder)] if out.is_dir() else []
    return [read_run(out / name) for name in sorted({*asked, *found}, key=experiment_rank)]


def is_experiment(folder: Path) -> bool:
    """Whether a folder was written by a run."""
    return (folder / "manifest.json").is_file() or (folder / "cells").is_dir()


def read_run(folder: Path) -> Run:
    """All that one experiment's folder holds."""
    problems: list[str] = []
    manifest = read_manifest(folder / "manifest.json", problems)
    outcomes = [outcome for file in sorted((folder / "cells").glob("*.json")) for outcome in read_cell(file, problems)]
    outcomes.sort(key=cell_rank)
    if folder.name not in WITHOUT_CELLS:
        problems += missing_cells(folder.name, outcomes, manifest) + missing_seeds(outcomes, manifest)
    return Run(folder.name, outcomes, manifest, problems)


def read_manifest(file: Path, problems: list[str]) -> dict[str, Any]:
    """The manifest, or an empty one and a word about it."""
    if not file.exists():
        return {}
    try:
        values = json.loads(file.read_text("utf-8"))
        if not isinstance(values, dict):
            raise TypeError("no JSON object")
        return values
    except (OSError, ValueError, TypeError) as error:
        problems.append(f"{file} cannot be read ({error}); how this was run is unknown")
        return {}


def read_cell(file: Path, problems: list[str]) -> list[Outcome]:
    """The outcome in a file, or none and a word about it."""
    try:
        return [checked(Outcome.from_dict(json.loads(file.read_text("utf-8"))))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        problems.append(f"{file} cannot be read ({type(error).__name__}: {error}); delete it and run with --resume")
        return []


def checked(outcome: Outcome) -> Outcome:
    """The outcome, if its values are of the kind that everything here relies on.

    Raises:
        TypeError: If one is not.
    """
    cell, search = outcome.cell, outcome.search
    numbers = [cell.seed, cell.batch_size, cell.lr_max, search.lr, search.loss, outcome.start_gap, outcome.seconds]
    numbers += [outcome.test_loss, outcome.test_accuracy, *(value for pair in search.trace for value in pair)]
    numbers += [value for values in outcome.curves.values() for value in values]
    texts = [cell.experiment, cell.method, cell.start, cell.variant, *outcome.curves]
    if not all(isinstance(value, (int, float)) for value in numbers) or not all(isinstance(t, str) for t in texts):
        raise TypeError("it holds values of the wrong kind")
    if min(cell.batch_size, cell.lr_max, search.lr, *(rate for rate, _ in search.trace)) <= 0:
        raise ValueError("a batch size or a learning rate is not positive")
    return outcome


def cell_rank(outcome: Outcome) -> tuple[Any, ...]:
    """Sorts cells as the paper lists them."""
    cell = outcome.cell
    return (
        cell.lr_max,
        cell.batch_size,
        start_rank(cell.start),
        method_rank(cell.method, cell.variant),
        cell.seed,
    )


def missing_cells(experiment: str, outcomes: list[Outcome], manifest: dict[str, Any]) -> list[str]:
    """Which methods of the grid have no outcome at all, start by start."""
    if not outcomes:
        return ["no finished cells"]
    methods, starts = expected_grid(experiment, outcomes, manifest)
    settings = sorted({(o.cell.lr_max, o.cell.batch_size) for o in outcomes})
    have = {(o.cell.lr_max, o.cell.batch_size, o.cell.start, o.cell.method) for o in outcomes}
    return [
        f"no finished cell of {method} from {start} (batch {batch}, lr at most {bound:g})"
        for bound, batch in settings
        for start in starts
        for method in methods
        if (bound, batch, start, method) not in have
    ]


def missing_seeds(outcomes: list[Outcome], manifest: dict[str, Any]) -> list[str]:
    """Which seeds a method lacks from starts where it has others."""
    expected = expected_seeds(outcomes, manifest)
    have: dict[tuple[float, int, str, str, str], set[int]] = {}
    for cell in (o.cell for o in outcomes):
        key = (cell.lr_max, cell.batch_size, cell.method, cell.variant, cell.start)
        have.setdefault(key, set()).add(cell.seed)
    lacking: dict[tuple[str, str], list[str]] = {}
    for (bound, batch, method, variant, start), seeds in have.items():
        if lost := ", ".join(map(str, sorted(expected - seeds))):
            what = f"{method}{f' ({variant})' * bool(variant)} with seed {lost}"
            lacking.setdefault((what, f"(batch {batch}, lr at most {bound:g})"), []).append(start)
    return [f"no finished cell of {what} from {', '.join(starts)} {where}" for (what, where), starts in lacking.items()]


def expected_seeds(outcomes: list[Outcome], manifest: dict[str, Any]) -> set[int]:
    """Those asked for in the last command, and those found."""
    asked = manifest.get("seeds")
    asked = asked if isinstance(asked, list) else []
    return {seed for seed in asked if isinstance(seed, int)} | {o.cell.seed for o in outcomes}


def expected_grid(experiment: str, outcomes: list[Outcome], manifest: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Methods and starts to be expected: the configuration's, the paper's, or none beyond those found."""
    if experiment in GRIDS:
        return list(METHODS), list(STARTS)
    configuration = manifest.get("configuration")
    configuration = configuration if isinstance(configuration, dict) else {}
    methods, starts = configuration.get("methods"), configuration.get("starts")
    return ([], []) if experiment == "naive" else (names(methods), names(starts))


def names(value: object) -> list[str]:
    """The names in a value of the configuration; none where it is no list of them."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, (list, tuple)) else []
