"""A job: cells that run together, from the search for their learning rates to their test, with checkpoints.

Learning rates are searched in lockstep: every round evaluates one rate of each search. A checkpoint is written after
every round, and every few epochs of the final training. A run that was killed continues with the cells it had begun
with, so that every number comes out the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import varprop as vp

from ..protocol.experiments import Experiment, Protocol
from ..protocol.records import TRAIN_LOSS, Cell, Outcome, Search
from ..protocol.starts import without_parametrization
from ..store.folder import Store
from ..training.ensemble import EnsembleTrainer
from ..training.single import SingleTrainer
from ..training.trainer import Task, Tick, Trainer

Trace = list[tuple[float, float]]  # (lr, loss) in the order made
Evaluate = Callable[[dict[str, float]], Mapping[str, float]]


class _Unknown(Exception):
    """Interrupts a search at the first rate whose loss is not known yet."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


def find_lrs(
    bounds: Mapping[str, tuple[float, float]],
    evaluate: Evaluate,
    evaluations: int = 10,
    grids: Sequence[int] = (),
    try_bounds: bool = True,
    recorded: Mapping[str, Trace] | None = None,
    limit: float | None = None,
) -> dict[str, vp.LRSearch]:
    """Search for several learning rates at once, as `vp.find_lr` does for one.

    Brent's method is deterministic, so in every round each search is repeated from its first evaluation with the
    losses known so far; the rate at which it asks for a new loss is what it wants next.

    Args:
        bounds: Of every search, by name.
        evaluate: Gives the losses at the rates that all searches that are not finished want next, by name.
        evaluations: At most so many for each.
        grids: As for `vp.find_lr`.
        try_bounds: Likewise.
        recorded: Evaluations of an earlier run, in order.
        limit: While the best rate lies at the upper bound, the bound is moved up by a decade, at most to here; by
            default it stays.
    """
    traces = {name: list((recorded or {}).get(name, [])) for name in bounds}
    searches: dict[str, vp.LRSearch] = {}
    while True:
        wanted: dict[str, float] = {}
        for name in bounds.keys() - searches.keys():
            try:
                loss = _recorded_loss(name, traces[name])
                search = vp.find_lr(loss, bounds[name], evaluations, grids=grids, try_bounds=try_bounds)
                searches[name] = _widened(loss, search, limit)
            except _Unknown as next_evaluation:
                wanted[name] = next_evaluation.lr
        if not wanted:
            return {name: searches[name] for name in bounds}
        losses = evaluate({name: wanted[name] for name in bounds if name in wanted})
        for name, lr in wanted.items():
            traces[name].append((lr, losses[name]))


def _widened(loss: Callable[[float], float], search: vp.LRSearch, limit: float | None) -> vp.LRSearch:
    """The search, gone on with above its upper bound as long as the best rate lies there."""
    low, high = search.bounds
    while limit is not None and high < limit and search.at_bound and search.lr > math.sqrt(low * high):
        above = vp.find_lr(loss, (high, min(10 * high, limit)), 5, grids=(3,), try_bounds=False)
        best = min(search, above, key=lambda stage: (stage.loss, stage.lr))
        high = above.bounds[1]
        at_bound = best.lr == max(rate for rate, _ in above.trace)  # no larger one was tried that is worse
        search = vp.LRSearch(best.lr, best.loss, search.trace + above.trace, (low, high), at_bound, False)
    return search


def _recorded_loss(name: str, trace: Trace) -> Callable[[float], float]:
    recorded = iter(trace)

    def loss(lr: float) -> float:
        recorded_lr, value = next(recorded, (None, math.nan))
        if recorded_lr is None:
            raise _Unknown(lr)
        if not math.isclose(recorded_lr, lr, rel_tol=1e-9):
            raise RuntimeError(
                f"The search for {name} asks for the learning rate {lr:g} where an earlier run evaluated "
                f"{recorded_lr:g}: that run had other settings or versions; start again in another folder."
            )
        return value

    return loss


def losses_at(trainer: Trainer, rates: Mapping[str, float], protocol: Protocol, tick: Tick) -> dict[str, float]:
    """The running loss after the horizon of a search, by key of the cell; infinite where it diverged.

    All evaluations of a cell see the same batches in the same order. Cells that no rate is given for run along.
    """
    trainer.reset([rates.get(cell.key, protocol.lr_min) for cell in trainer.cells])
    for number in range(protocol.search_epochs):
        trainer.epoch(number, tick)
        if not any(map(math.isfinite, trainer.losses())):
            break
    return {cell.key: or_infinite(loss) for cell, loss in zip(trainer.cells, trainer.losses(), strict=True)}


def or_infinite(loss: float) -> float:
    """A loss, infinite where it is NaN."""
    return loss if math.isfinite(loss) else math.inf


Log = Callable[[Cell, int, dict[str, float]], None]
Curves = list[dict[str, list[float]]]


class OutOfTime(Exception):
    """The time given is over; everything so far is kept."""


@dataclass(frozen=True)
class Context:
    """The run that a job belongs to."""

    task: Task  # the experiment and its data
    store: Store  # of the experiment
    tick: Tick  # called after every step
    log: Log  # called after every epoch of the final training
    deadline: float = math.inf  # when to stop, by `time.monotonic`

    def check_time(self) -> None:
        """Stop if the time is over."""
        if time.monotonic() > self.deadline:
            raise OutOfTime


def missing_jobs(experiment: Experiment, store: Store) -> dict[str, list[Cell]]:
    """Which of the cells that are not finished run together, by the name of their files."""
    jobs: dict[str, list[Cell]] = {}
    for cell in experiment.cells():
        if not store.has(cell):
            jobs.setdefault(f"b{cell.batch_size}" if experiment.together else cell.key, []).append(cell)
    return jobs


def run_job(context: Context, name: str, cells: list[Cell]) -> None:
    """Search, train and test; what an earlier run did is not done again."""
    job = _Job(context, name, cells)
    searches = job.search()
    curves = job.train([search.lr for search in searches])
    trainer, store = job.trainer, context.store
    tests = trainer.test()
    share = job.seconds / len(trainer.cells)
    diverged = [not math.isfinite(loss) for loss in trainer.losses()]
    for cell, model, lost in zip(trainer.cells, trainer.trained(), diverged, strict=True):
        if not lost:  # before the outcomes: a cell that is finished has its weights
            store.write_weights(cell, without_parametrization(model, cell.method).state_dict())
    results = zip(trainer.cells, searches, curves, tests, diverged, trainer.gaps, strict=True)
    for cell, search, curve, (loss, accuracy), lost, gap in results:
        store.write_outcome(Outcome(cell, search, curve, or_infinite(loss), accuracy, lost, gap, share))
    store.drop_partial(name)


class _Job:
    """Cells in training, and their checkpoint: the cells, what searches evaluated, the final training, the time."""

    def __init__(self, context: Context, name: str, cells: list[Cell]) -> None:
        self.context, self.name, self.protocol = context, name, context.task.experiment.protocol
        begun: dict[str, Any] = {"cells": [asdict(cell) for cell in cells], "traces": {}, "final": None, "seconds": 0.0}
        self.kept = context.store.load_partial(name) or begun
        self.trainer = _trainer(context.task, [Cell(**cell) for cell in self.kept["cells"]])
        self.started: float = time.monotonic() - self.kept["seconds"]
        self._keep()  # not before: what cannot be trained leaves nothing to go on with

    @property
    def seconds(self) -> float:
        """Spent so far, in all runs."""
        return time.monotonic() - self.started

    def _keep(self, **changes: Any) -> None:
        self.kept |= {**changes, "seconds": self.seconds}
        self.context.store.save_partial(self.name, self.kept)

    def search(self) -> list[Search]:
        """The learning rate of every cell, from what is known of it on."""
        cells, protocol, context = self.trainer.cells, self.protocol, self.context
        if not context.task.experiment.search:
            return [Search(cell.lr_max, math.nan) for cell in cells]
        recorded = self.kept["traces"]
        traces: dict[str, Trace] = {cell.key: [(lr, loss) for lr, loss in recorded.get(cell.key, ())] for cell in cells}

        def evaluate(wanted: dict[str, float]) -> dict[str, float]:
            losses = losses_at(self.trainer, wanted, protocol, context.tick)
            for key, rate in wanted.items():
                traces[key].append((rate, losses[key]))
            self._keep(traces=traces)
            context.check_time()
            return losses

        context.tick(max(map(len, traces.values())) * protocol.search_epochs * self.trainer.steps)
        bounds = {cell.key: (protocol.lr_min, cell.lr_max) for cell in cells}
        search = protocol.evaluations, protocol.grids, protocol.try_bounds
        result = find_lrs(bounds, evaluate, *search, traces, context.task.experiment.lr_limit)
        searches = [result[cell.key] for cell in cells]
        return [Search(s.lr, s.loss, list(s.trace), s.at_bound, s.flat, s.diverged) for s in searches]

    def train(self, rates: list[float]) -> Curves:
        """The curves of the final training, which goes on from its last checkpoint."""
        trainer, context, epochs = self.trainer, self.context, self.protocol.epochs
        curves: Curves = [{} for _ in trainer.cells]
        first = 0
        trainer.reset(rates)
        if self.kept["final"] is not None:
            curves, first = self.kept["final"]["curves"], int(self.kept["final"]["epochs"])
            trainer.load_(rates, self.kept["final"]["state"])
            context.tick(first * trainer.steps)
        for number in range(first, epochs):
            if number and not any(map(math.isfinite, trainer.losses())):
                break
            trainer.epoch(number, context.tick)
            _extend(curves, trainer, number, context.log)
            done = number + 1
            over = time.monotonic() > context.deadline
            if done == epochs or over or done % self.protocol.checkpoint_epochs == 0:
                self._keep(final={"epochs": done, "curves": curves, "state": trainer.state()})
            if done < epochs:
                context.check_time()
        return curves


def _trainer(task: Task, cells: list[Cell]) -> Trainer:
    if task.experiment.together:
        return EnsembleTrainer(task, cells)
    if task.experiment.precision.compiled:
        torch.compiler.reset()  # what was compiled for earlier cells: torch keeps a few versions of a function only
    return SingleTrainer(task, cells[0])


def _extend(curves: Curves, trainer: Trainer, number: int, log: Log) -> None:
    """Add an epoch to the curve of each cell, unless it has diverged: then its curve ends."""
    for cell, curve, measured in zip(trainer.cells, curves, trainer.curves(number), strict=True):
        if math.isfinite(measured[TRAIN_LOSS]):
            log(cell, number, measured)
            for name, value in measured.items():
                curve.setdefault(name, []).append(value)
