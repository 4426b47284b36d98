"""Cells that are run together, from the search for their learning rates to their test: every piece is kept.

A piece is one round of evaluations of all searches, or a few epochs of the final training. A run that was killed
continues with the cells it had begun with, so that every number comes out the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

from .protocol import Protocol
from .records import TRAIN_LOSS, Cell, Outcome, Search
from .search import as_record, given, lockstep
from .store import Store
from .trainer import Tick, Trainer, load_

Log = Callable[[Cell, int, dict[str, float]], None]


class OutOfTime(Exception):
    """The time given is over; everything so far is kept."""


@dataclass(frozen=True)
class Surroundings:
    """What a squad needs of the run it belongs to.

    Attributes:
        store: Of the experiment.
        protocol: How cells are trained.
        search: Whether rates are searched for.
        tick: Told of every step.
        log: Told of every epoch of the final training.
        deadline: When to stop, by `time.monotonic`.
    """

    store: Store
    protocol: Protocol
    search: bool
    tick: Tick
    log: Log
    deadline: float = math.inf

    def check_time(self) -> None:
        """Stop if the time is over."""
        if time.monotonic() > self.deadline:
            raise OutOfTime


@dataclass(frozen=True)
class Plan:
    """What is kept of a squad between pieces.

    Attributes:
        name: Of its files.
        cells: In the order of the trainer.
        traces: Every evaluation so far, by key of the cell.
        seconds: Spent so far.
    """

    name: str
    cells: list[Cell]
    traces: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    seconds: float = 0.0

    def keep(self, store: Store) -> None:
        """Write it."""
        state = {"cells": [asdict(cell) for cell in self.cells], "traces": self.traces, "seconds": self.seconds}
        store.save_partial(f"{self.name}.plan", state)

    @classmethod
    def kept(cls, store: Store, name: str) -> Plan | None:
        """What an earlier run wrote."""
        state = store.load_partial(f"{name}.plan")
        if state is None:
            return None
        traces = {key: [(lr, loss) for lr, loss in trace] for key, trace in state["traces"].items()}
        return cls(name, [Cell(**cell) for cell in state["cells"]], traces, state["seconds"])


def run_squad(plan: Plan, trainer: Trainer, around: Surroundings) -> list[Outcome]:
    """Search, train and test; what was done before is not done again."""
    started = time.monotonic() - plan.seconds
    searches = _searches(plan, trainer, around, started)
    curves = _trained(plan, trainer, around, started, [search.lr for search in searches])
    tests = trainer.test()
    share = (time.monotonic() - started) / len(trainer.cells)
    diverged = [not math.isfinite(loss) for loss in trainer.losses()]
    parts = zip(trainer.cells, searches, curves, tests, diverged, trainer.gaps, strict=True)
    outcomes = [
        Outcome(cell, search, curve, _or_infinite(loss), accuracy, lost, gap, share)
        for cell, search, curve, (loss, accuracy), lost, gap in parts
    ]
    for outcome in outcomes:
        around.store.write_outcome(outcome)
    for piece in ("plan", "final"):  # in this order: what is left of a final training without a plan is ignored
        around.store.drop_partial(f"{plan.name}.{piece}")
    return outcomes


def _searches(plan: Plan, trainer: Trainer, around: Surroundings, started: float) -> list[Search]:
    if not around.search:
        return [given(cell.lr_max) for cell in trainer.cells]
    traces = {cell.key: list(plan.traces.get(cell.key, [])) for cell in trainer.cells}
    bounds = {cell.key: (around.protocol.lr_min, cell.lr_max) for cell in trainer.cells}
    idle = {cell.key: around.protocol.lr_min for cell in trainer.cells}  # of searches that are over: they run along

    def evaluate(wanted: dict[str, float]) -> dict[str, float]:
        trainer.reset([{**idle, **wanted}[cell.key] for cell in trainer.cells])
        _epochs(trainer, around)
        found = {cell.key: _or_infinite(loss) for cell, loss in zip(trainer.cells, trainer.losses(), strict=True)}
        for key, rate in wanted.items():
            traces[key].append((rate, found[key]))
        replace(plan, traces=traces, seconds=time.monotonic() - started).keep(around.store)
        around.check_time()
        return found

    known = {key: list(trace) for key, trace in traces.items()}
    around.tick(max(map(len, known.values())) * around.protocol.search_epochs * trainer.steps)
    found = lockstep(bounds, evaluate, around.protocol.evaluations, known)
    return [as_record(found[cell.key]) for cell in trainer.cells]


def _epochs(trainer: Trainer, around: Surroundings) -> None:
    for number in range(around.protocol.search_epochs):
        trainer.epoch(number, around.tick)
        if not any(map(math.isfinite, trainer.losses())):
            return


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


Curves = list[dict[str, list[float]]]


def _trained(plan: Plan, trainer: Trainer, around: Surroundings, started: float, rates: list[float]) -> Curves:
    """The curves of the final training, which goes on from where it was kept."""
    curves: Curves = [{} for _ in trainer.cells]
    kept, first = around.store.load_partial(f"{plan.name}.final"), 0
    trainer.reset(rates)
    if kept is not None and kept["cells"] == [cell.key for cell in trainer.cells]:
        curves, first = kept["curves"], int(kept["epochs"])
        load_(trainer, rates, kept["state"])
        around.tick(first * trainer.steps)
    for number in range(first, around.protocol.epochs):
        if number and not any(map(math.isfinite, trainer.losses())):
            break
        trainer.epoch(number, around.tick)
        _extend(curves, trainer, number, around.log)
        last = number + 1 == around.protocol.epochs
        if last or time.monotonic() > around.deadline or (number + 1) % around.protocol.checkpoint_epochs == 0:
            _checkpoint(plan, trainer, around.store, curves, number + 1, time.monotonic() - started)
        if not last:
            around.check_time()
    return curves


def _checkpoint(plan: Plan, trainer: Trainer, store: Store, curves: Curves, epochs: int, seconds: float) -> None:
    keys = [cell.key for cell in trainer.cells]
    store.save_partial(
        f"{plan.name}.final", {"cells": keys, "epochs": epochs, "curves": curves, "state": trainer.state()}
    )
    replace(Plan.kept(store, plan.name) or plan, seconds=seconds).keep(store)


def _extend(curves: Curves, trainer: Trainer, number: int, log: Log) -> None:
    """Add an epoch to the curve of each cell, unless it has diverged: then its curve ends."""
    for cell, curve, found in zip(trainer.cells, curves, trainer.curves(number), strict=True):
        if math.isfinite(found[TRAIN_LOSS]):
            log(cell, number, found)
            for name, value in found.items():
                curve.setdefault(name, []).append(value)
