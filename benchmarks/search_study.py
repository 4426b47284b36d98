"""How much each search for the learning rate loses: every way on the same cells, against all rates anybody tried.

    python -m benchmarks.search_study [--root DIR] [--jobs 6] [--max-seconds 500] --out docs/results

Cells that OUT/search.json has are not compared again.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from varprop.cli import progress
from varprop.text_table import Table
from varprop_lab import datasets
from varprop_lab.environment import StoreError, provenance, reproducible, write_atomically
from varprop_lab.execution import loss_at, search_lr
from varprop_lab.paper.experiments import EXPERIMENTS
from varprop_lab.protocol import SEARCHES, Cell, Experiment
from varprop_lab.training import Task, Trainer

from .processes import results_of

# MNIST from random weights is where losses are noisiest; less data, for a CPU. The grids were chosen on the last.
STUDIED = {
    "MNIST, init = None, seeds 0 to 2": replace(
        EXPERIMENTS["mnist"], starts=("none",), seeds=(0, 1, 2), train_samples=10_000
    ),
    "digits, seeds 1 and 2": replace(EXPERIMENTS["digits"], seeds=(1, 2)),
    "digits, seed 0": EXPERIMENTS["digits"],
}
GRID, DECADES = 16, 2.0  # rates of the dense grid, and how far it reaches below the bound
Cells = dict[str, dict[str, Any]]
_CPU = torch.device("cpu")


def study(
    out: Path,
    root: Path | None = None,
    experiments: Mapping[str, Experiment] = STUDIED,
    jobs: int = 1,
    max_seconds: float = math.inf,
) -> Path:
    """Compare the searches on the CPU, cell by cell; cells that ``search.json`` has are not compared again.

    Args:
        out: The folder of the record and of the page.
        root: Where MNIST is looked for first.
        experiments: Of one bound, by their titles.
        jobs: So many cells at once, each in a process of its own.
        max_seconds: After this time no cell is begun.

    Returns:
        The page written, ``search.md``.
    """
    file, deadline = out / "search.json", time.monotonic() + max_seconds
    if not find_spec("sklearn"):  # a bare machine makes what it can
        experiments = {title: e for title, e in experiments.items() if e.dataset != "digits"}
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"searches": SEARCHES, "cells": {}}
    if json.dumps(kept.get("searches")) != json.dumps(SEARCHES):
        raise StoreError(f"{file} compares other searches: choose another --out.")
    places = {(title, cell.key): cell for title, experiment in experiments.items() for cell in experiment.cells()}
    missing = [
        _SearchedCell(title, replace(experiments[title], seeds=(cell.seed,)), cell, root)
        for (title, key), cell in places.items()
        if key not in kept["cells"].get(title, {})
    ]
    if missing:
        kept = {**provenance(_CPU), **{name: kept[name] for name in ("searches", "cells")}}
    with progress.show(len(missing), "search") as shown:
        for job, found in results_of(_SearchedCell.found, missing, jobs, deadline):
            shown.advance(text=job.title)
            kept["cells"].setdefault(job.title, {})[job.cell.key] = found
            write_atomically(file, f"{json.dumps(kept, indent=1)}\n".encode())
    cells = {
        title: {key: kept["cells"][title][key] for at, key in places if at == title and key in kept["cells"][title]}
        for title in experiments
        if title in kept["cells"]
    }
    write_atomically(out / "search.md", markdown(cells).encode())
    return out / "search.md"


@dataclass(frozen=True)
class _SearchedCell:
    """One cell."""

    title: str
    experiment: Experiment
    cell: Cell
    root: Path | None

    def found(self) -> dict[str, Any]:
        """What `compared` finds."""
        with reproducible(_CPU):
            data = datasets.load(self.experiment.dataset, self.root, _CPU)
            trainer = Trainer(Task(self.experiment, data, self.experiment.model), self.cell)
            bounds = self.experiment.protocol.lr_min, self.cell.lr_max
            return compared(bounds, lambda rate: loss_at(trainer, rate, lambda steps: None))


def compared(bounds: tuple[float, float], evaluate: Callable[[float], float]) -> dict[str, dict[str, float]]:
    """What each search found, the dense grid too, and by which share it lies above the best of all."""
    loss = functools.cache(evaluate)  # searches that begin alike ask for the same rates
    grid = [bounds[1] * 10 ** (-DECADES * (index + 0.5) / GRID) for index in range(GRID)]  # evenly spaced
    traces = {"grid": [(rate, loss(rate)) for rate in grid]}
    chosen = {"grid": min(traces["grid"], key=lambda pair: pair[1])}
    for name, settings in SEARCHES.items():
        found = search_lr(loss, bounds, **settings)
        traces[name], chosen[name] = list(found.trace), (found.lr, found.loss)
    best = min(value for trace in traces.values() for _, value in trace)
    return {name: {"lr": lr, "loss": value, "regret": value / best - 1} for name, (lr, value) in chosen.items()}


def markdown(results: Mapping[str, Cells]) -> str:
    """The table of regrets."""
    evaluations = {
        "grid": str(GRID),
        **{name: f"{s['evaluations']}{' or one more' * s['try_bounds']}" for name, s in SEARCHES.items()},
    }
    rows = [
        (experiment, search, evaluations[search], *_shares([cell[search]["regret"] for cell in cells.values()]))
        for experiment, cells in results.items()
        for search in evaluations
    ]
    headings = ("cells", "search", "evaluations", "mean regret", "largest", "above 2 %")
    return (
        "# Searches for the learning rate\n\n"
        "Written by `python -m benchmarks.search_study --out docs/results` from search.json, which says how its "
        "cells were compared. The regret of a search is the share by which the loss at its chosen rate is above the "
        "lowest loss of the same cell at any rate that any search here tried. All evaluations of a cell see the same "
        "samples in the same order. The grid sizes of grid+brent were chosen among four on the digits of seed 0.\n\n"
        f"{Table('', headings, rows, left=headings[:2]).markdown()}\n"
    )


def _shares(regrets: Sequence[float]) -> tuple[str, str, str]:
    above = sum(regret > 0.02 for regret in regrets)
    return f"{100 * statistics.fmean(regrets):.2f} %", f"{100 * max(regrets):.1f} %", f"{above} of {len(regrets)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    options = parser.parse_args()
    print(study(options.out, options.root, jobs=options.jobs, max_seconds=options.max_seconds))
