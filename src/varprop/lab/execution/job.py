"""A job: cells that run together, from the search for their learning rates to their test, with checkpoints.

A checkpoint is written after every round of evaluations of all searches, and every few epochs of the final training. A
run that was killed continues with the cells it had begun with, so that every number comes out the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch

from ..protocol.experiments import Experiment
from ..protocol.initialization import without_parametrization
from ..protocol.records import TRAIN_LOSS, Cell, Outcome, Search
from ..store.folder import Store
from ..training.ensemble import EnsembleTrainer
from ..training.single import SingleTrainer
from ..training.task import Task
from ..training.trainer import Tick, Trainer
from .lr_search import Trace, find_lrs, losses_at, or_infinite

Log = Callable[[Cell, int, dict[str, float]], None]
Curves = list[dict[str, list[float]]]


class OutOfTime(Exception):
    """The time given is over; everything so far is kept."""


@dataclass(frozen=True)
class Context:
    """What a job needs of the run it belongs to."""

    task: Task  # the experiment and its data
    store: Store  # of the experiment
    tick: Tick  # called after every step
    log: Log  # called after every epoch of the final training
    deadline: float = math.inf  # when to stop, by `time.monotonic`

    @property
    def experiment(self) -> Experiment:
        """What is run."""
        return self.task.experiment

    def check_time(self) -> None:
        """Stop if the time is over."""
        if time.monotonic() > self.deadline:
            raise OutOfTime


@dataclass(frozen=True)
class JobState:
    """What is kept of a job between checkpoints."""

    name: str  # of its files
    cells: list[Cell]  # in the order of the trainer
    # every evaluation of the searches so far, by key of the cell
    traces: dict[str, Trace] = field(default_factory=dict)
    seconds: float = 0.0  # spent so far

    def save(self, store: Store) -> None:
        """Write it."""
        state = {"cells": [asdict(cell) for cell in self.cells], "traces": self.traces, "seconds": self.seconds}
        store.save_partial(f"{self.name}.plan", state)

    @classmethod
    def load(cls, store: Store, name: str) -> JobState | None:
        """What an earlier run wrote."""
        state = store.load_partial(f"{name}.plan")
        if state is None:
            return None
        traces = {key: [(lr, loss) for lr, loss in trace] for key, trace in state["traces"].items()}
        return cls(name, [Cell(**cell) for cell in state["cells"]], traces, state["seconds"])


def missing_jobs(experiment: Experiment, store: Store) -> dict[str, list[Cell]]:
    """Which of the cells that are not finished run together, by the name of their files."""
    found: dict[str, list[Cell]] = {}
    for cell in experiment.cells():
        if not store.has(cell):
            found.setdefault(f"b{cell.batch_size}" if experiment.together else cell.key, []).append(cell)
    return found


def run_job(context: Context, name: str, cells: list[Cell]) -> None:
    """Search, train and test; what an earlier run did is not done again."""
    state = JobState.load(context.store, name) or JobState(name, cells)
    trainer = _trainer(context.task, state.cells)
    state.save(context.store)  # not before: what cannot be trained leaves nothing to go on with
    started = time.monotonic() - state.seconds
    searches = _searches(state, trainer, context, started)
    curves = _final_training(state, trainer, context, started, [search.lr for search in searches])
    tests = trainer.test()
    share = (time.monotonic() - started) / len(trainer.cells)
    diverged = [not math.isfinite(loss) for loss in trainer.losses()]
    for cell, model, lost in zip(trainer.cells, trainer.trained(), diverged, strict=True):
        if not lost:  # before the outcomes: a cell that is finished has its weights
            context.store.write_weights(cell, without_parametrization(model, cell.method).state_dict())
    parts = zip(trainer.cells, searches, curves, tests, diverged, trainer.gaps, strict=True)
    for cell, search, curve, (loss, accuracy), lost, gap in parts:
        context.store.write_outcome(Outcome(cell, search, curve, or_infinite(loss), accuracy, lost, gap, share))
    for part in ("plan", "final"):  # in this order: what is left of a final training without a plan is ignored
        context.store.drop_partial(f"{name}.{part}")


def _trainer(task: Task, cells: list[Cell]) -> Trainer:
    if task.experiment.together:
        return EnsembleTrainer(task, cells)
    if task.experiment.precision.compiled:
        torch.compiler.reset()  # what was compiled for earlier cells: torch keeps a few versions of a function only
    return SingleTrainer(task, cells[0])


def _searches(state: JobState, trainer: Trainer, context: Context, started: float) -> list[Search]:
    if not context.experiment.search:
        return [Search(cell.lr_max, math.nan) for cell in trainer.cells]
    protocol = context.experiment.protocol
    traces = {cell.key: list(state.traces.get(cell.key, [])) for cell in trainer.cells}

    def evaluate(wanted: dict[str, float]) -> dict[str, float]:
        losses = losses_at(trainer, wanted, protocol, context.tick)
        for key, rate in wanted.items():
            traces[key].append((rate, losses[key]))
        replace(state, traces=traces, seconds=time.monotonic() - started).save(context.store)
        context.check_time()
        return losses

    context.tick(max(map(len, traces.values())) * protocol.search_epochs * trainer.steps)
    bounds = {cell.key: (protocol.lr_min, cell.lr_max) for cell in trainer.cells}
    found = find_lrs(bounds, evaluate, protocol.evaluations, protocol.grids, traces)
    searches = [found[cell.key] for cell in trainer.cells]
    return [Search(s.lr, s.loss, list(s.trace), s.at_bound, s.flat, s.diverged) for s in searches]


def _final_training(state: JobState, trainer: Trainer, context: Context, started: float, rates: list[float]) -> Curves:
    """The curves of the final training, which goes on from its last checkpoint."""
    store, protocol, name = context.store, context.experiment.protocol, f"{state.name}.final"
    keys = [cell.key for cell in trainer.cells]
    curves: Curves = [{} for _ in keys]
    checkpoint, first = store.load_partial(name), 0
    trainer.reset(rates)
    if checkpoint is not None and checkpoint["cells"] == keys:
        curves, first = checkpoint["curves"], int(checkpoint["epochs"])
        trainer.load_(rates, checkpoint["state"])
        context.tick(first * trainer.steps)
    for number in range(first, protocol.epochs):
        if number and not any(map(math.isfinite, trainer.losses())):
            break
        trainer.epoch(number, context.tick)
        _extend(curves, trainer, number, context.log)
        done = number + 1
        if done == protocol.epochs or time.monotonic() > context.deadline or done % protocol.checkpoint_epochs == 0:
            store.save_partial(name, {"cells": keys, "epochs": done, "curves": curves, "state": trainer.state()})
            seconds = time.monotonic() - started
            replace(JobState.load(store, state.name) or state, seconds=seconds).save(store)
        if done < protocol.epochs:
            context.check_time()
    return curves


def _extend(curves: Curves, trainer: Trainer, number: int, log: Log) -> None:
    """Add an epoch to the curve of each cell, unless it has diverged: then its curve ends."""
    for cell, curve, found in zip(trainer.cells, curves, trainer.curves(number), strict=True):
        if math.isfinite(found[TRAIN_LOSS]):
            log(cell, number, found)
            for name, value in found.items():
                curve.setdefault(name, []).append(value)
