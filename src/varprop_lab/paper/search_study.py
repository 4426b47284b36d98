"""How much each search for the learning rate loses: every way on the same cells, against all rates anybody tried."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from varprop.cli import progress
from varprop.text_table import Table

from ..data import datasets
from ..environment import provenance, reproducible
from ..execution.job import Evaluate, Trace, find_lrs, losses_at
from ..protocol.experiments import SEARCHES, Experiment
from ..store.folder import write_atomically
from ..training.ensemble import EnsembleTrainer
from ..training.trainer import Task
from .experiments import EXPERIMENTS

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


def study(out: Path, root: Path | None = None, experiments: Mapping[str, Experiment] = STUDIED) -> Path:
    """Compare the searches on the CPU, on experiments of one bound by their titles; the page written, ``search.md``."""
    source = provenance(_CPU)
    rounds = len(experiments) * sum(_evaluations().values())
    with reproducible(_CPU, 1), progress.show(rounds, "search") as shown:
        results = {title: _compared(experiment, root, shown) for title, experiment in experiments.items()}
    write_atomically(out / "search.json", f"{json.dumps({**source, 'cells': results}, indent=1)}\n".encode())
    write_atomically(out / "search.md", markdown(results, source["command"]).encode())
    return out / "search.md"


def _evaluations() -> dict[str, int]:
    """By search, how many rates it may try."""
    return {"grid": GRID, **{name: count for name, (count, _) in SEARCHES.items()}}


def _compared(experiment: Experiment, root: Path | None, shown: progress.Progress) -> Cells:
    data = datasets.load(experiment.dataset, root, _CPU)
    trainer = EnsembleTrainer(Task(experiment, data, experiment.model), experiment.cells())
    bounds = {cell.key: (experiment.protocol.lr_min, experiment.lr_max[0]) for cell in trainer.cells}

    def evaluate(rates: dict[str, float]) -> Mapping[str, float]:
        losses = losses_at(trainer, rates, experiment.protocol, lambda steps: None)
        shown.advance(text=experiment.name)
        return losses

    return compared(bounds, evaluate)


def compared(bounds: Mapping[str, tuple[float, float]], evaluate: Evaluate) -> Cells:
    """By cell: what each search found, the dense grid too, and by which share it lies above the best of all."""
    seen: dict[str, Trace] = {name: [] for name in bounds}

    def recorded(wanted: dict[str, float]) -> Mapping[str, float]:
        losses = evaluate(wanted)
        for name, rate in wanted.items():
            seen[name].append((rate, losses[name]))
        return losses

    for index in range(GRID):  # evenly spaced below the upper bound
        recorded({name: high * 10 ** (-DECADES * (index + 0.5) / GRID) for name, (_, high) in bounds.items()})
    chosen = {"grid": {name: min(trace, key=lambda pair: pair[1]) for name, trace in seen.items()}}
    for search, (evaluations, grids) in SEARCHES.items():
        results = find_lrs(bounds, recorded, evaluations, grids)
        chosen[search] = {name: (result.lr, result.loss) for name, result in results.items()}
    best = {name: min(loss for _, loss in trace) for name, trace in seen.items()}
    return {
        name: {
            s: {"lr": f[name][0], "loss": f[name][1], "regret": f[name][1] / best[name] - 1} for s, f in chosen.items()
        }
        for name in bounds
    }


def markdown(results: Mapping[str, Cells], command: str) -> str:
    """The table of regrets."""
    evaluations = _evaluations()
    rows = [
        (experiment, search, str(evaluations[search]), *_shares([cell[search]["regret"] for cell in cells.values()]))
        for experiment, cells in results.items()
        for search in evaluations
    ]
    headings = ("cells", "search", "evaluations", "mean regret", "largest", "above 2 %")
    return (
        "# Searches for the learning rate\n\n"
        f"Written by `{command}`. The regret of a search is the share by which the loss at the rate it chose lies "
        "above the lowest loss of the same cell at any rate that any search here tried. All evaluations of a cell see "
        "the same samples in the same order. The sizes of grid+brent's grids were chosen among four on the digits of "
        "seed 0.\n\n"
        f"{Table('', headings, rows, left=headings[:2]).markdown()}\n"
    )


def _shares(regrets: Sequence[float]) -> tuple[str, str, str]:
    above = sum(regret > 0.02 for regret in regrets)
    return f"{100 * statistics.fmean(regrets):.2f} %", f"{100 * max(regrets):.1f} %", f"{above} of {len(regrets)}"
