"""Runs experiments: what is finished is kept, what is missing is done, and how it was done is written down.

Cells are trained one by one, from the search for the learning rate to the test: here, in processes of this machine, or
on Ray. A checkpoint is written after every evaluation of the search, and every few epochs of the final training; a run
that was killed goes on from there, and every number comes out the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

import varprop as vp
from varprop.cli import progress
from varprop.cli.models import first_line

from . import datasets
from .datasets import Dataset, on_device
from .environment import Files, chosen_device, locked, remove_unfinished, reproducible, require
from .protocol import Cell, Experiment, Factory, Outcome, Search
from .starts import without_parametrization
from .store import Store, describe, ended, fingerprints, resumed
from .training import Loss, MakeOptimizer, Task, Tick, Trainer

Trace = list[tuple[float, float]]  # (lr, loss) in the order made


def search_lr(
    loss_at: Callable[[float], float],
    bounds: tuple[float, float],
    evaluations: int = 10,
    grids: Sequence[int] = (),
    try_bounds: bool = True,
    recorded: Trace | None = None,
    limit: float | None = None,
) -> vp.LRSearch:
    """Search for a learning rate as `vp.find_lr` does, knowing the losses that an earlier run `recorded`.

    Brent's method is deterministic, so it asks for their rates again. While the best rate lies at the upper bound, the
    bound is moved up by a decade, at most to `limit` if there is one.
    """
    known = iter(recorded or ())

    def loss(lr: float) -> float:
        recorded_lr, value = next(known, (lr, None))
        if not math.isclose(recorded_lr, lr, rel_tol=1e-9):
            raise RuntimeError(
                f"The search asks for the learning rate {lr:g} where an earlier run evaluated {recorded_lr:g}: that "
                "run had other settings or versions; start again in another folder."
            )
        return loss_at(lr) if value is None else value

    search = vp.find_lr(loss, bounds, evaluations, grids=grids, try_bounds=try_bounds)
    low, high = search.bounds
    while limit is not None and high < limit and search.at_bound and search.lr > math.sqrt(low * high):
        above = vp.find_lr(loss, (high, min(10 * high, limit)), 5, grids=(3,), try_bounds=False)
        best = min(search, above, key=lambda stage: (stage.loss, stage.lr))
        high = above.bounds[1]
        at_bound = best.lr == max(rate for rate, _ in above.trace)  # no larger one was tried that is worse
        search = vp.LRSearch(best.lr, best.loss, search.trace + above.trace, (low, high), at_bound, False)
    return search


def loss_at(trainer: Trainer, rate: float, tick: Tick) -> float:
    """The running loss after the horizon of a search; infinite where it diverged.

    All evaluations see the same batches in the same order.
    """
    trainer.reset(rate)
    for number in range(trainer.protocol.search_epochs):
        trainer.epoch(number, tick)
        if not math.isfinite(trainer.loss()):
            break
    return or_infinite(trainer.loss())


def or_infinite(loss: float) -> float:
    """A loss, infinite where it is NaN."""
    return loss if math.isfinite(loss) else math.inf


Log = Callable[[Cell, int, dict[str, float]], None]


class RunError(vp.VarpropError):
    """An experiment cannot be run as asked, or not to its end; the message says why and what to do."""


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


def missing_cells(experiment: Experiment, store: Store) -> list[Cell]:
    """The cells that are not finished."""
    return [cell for cell in experiment.cells() if not store.has(cell)]


def train_cell(context: Context, cell: Cell) -> None:
    """Search, train and test; what an earlier run did is not done again."""
    job = _Job(context, cell)
    search = job.search()
    curves = job.train(search.lr)
    trainer, store = job.trainer, context.store
    loss, accuracy = trainer.test()
    diverged, seconds = not math.isfinite(trainer.loss()), job.seconds
    if not diverged:  # before the outcome: a cell that is finished has its weights
        store.write_weights(cell, without_parametrization(trainer.model, cell.method).state_dict())
    outcome = Outcome(cell, search, curves, or_infinite(loss), accuracy, diverged, trainer.gap, seconds)
    store.write_outcome(outcome)
    store.drop_partial(cell.key)


class _Job:
    """A cell in training, and its checkpoint: what the search evaluated, the final training, the time."""

    def __init__(self, context: Context, cell: Cell) -> None:
        self.context, self.cell, self.protocol = context, cell, context.task.experiment.protocol
        self.kept: dict[str, Any] = {"trace": [], "final": None, "seconds": 0.0}
        kept = context.store.load_partial(cell.key) or {}
        if "trace" in kept:  # an earlier version kept several cells at once, in another form
            self.kept = kept
        if context.task.experiment.precision.compiled:
            torch.compiler.reset()  # what was compiled for earlier cells: torch keeps a few versions of a function only
        self.trainer = Trainer(context.task, cell)
        self.started: float = time.monotonic() - self.kept["seconds"]
        self._keep()  # not before: what cannot be trained leaves nothing to go on with

    @property
    def seconds(self) -> float:
        """Spent so far, in all runs."""
        return time.monotonic() - self.started

    def _keep(self, **changes: Any) -> None:
        self.kept |= {**changes, "seconds": self.seconds}
        self.context.store.save_partial(self.cell.key, self.kept)

    def search(self) -> Search:
        """The learning rate, from what is known of it on."""
        cell, protocol, context = self.cell, self.protocol, self.context
        if not context.task.experiment.search:
            return Search(cell.lr_max, math.nan)
        trace: Trace = [(lr, loss) for lr, loss in self.kept["trace"]]
        recorded = list(trace)

        def evaluate(rate: float) -> float:
            loss = loss_at(self.trainer, rate, context.tick)
            trace.append((rate, loss))
            self._keep(trace=trace)
            context.check_time()
            return loss

        context.tick(len(recorded) * protocol.search_epochs * self.trainer.steps)
        bounds, limit = (protocol.lr_min, cell.lr_max), context.task.experiment.lr_limit
        settings = protocol.evaluations, protocol.grids, protocol.try_bounds
        found = search_lr(evaluate, bounds, *settings, recorded, limit)
        return Search(found.lr, found.loss, list(found.trace), found.at_bound, found.flat, found.diverged)

    def train(self, rate: float) -> dict[str, list[float]]:
        """The curves of the final training, which goes on from its last checkpoint."""
        trainer, context, epochs = self.trainer, self.context, self.protocol.epochs
        curves: dict[str, list[float]] = {}
        first = 0
        trainer.reset(rate)
        if self.kept["final"] is not None:
            curves, first = self.kept["final"]["curves"], int(self.kept["final"]["epochs"])
            trainer.load_(rate, self.kept["final"]["state"])
            context.tick(first * trainer.steps)
        for number in range(first, epochs):
            trainer.epoch(number, context.tick)
            if not math.isfinite(trainer.loss()):
                break
            measured = trainer.measurements(number)
            context.log(self.cell, number, measured)
            for name, value in measured.items():
                curves.setdefault(name, []).append(value)
            done = number + 1
            over = time.monotonic() > context.deadline
            if done == epochs or over or done % self.protocol.checkpoint_epochs == 0:
                self._keep(final={"epochs": done, "curves": curves, "state": trainer.state()})
            if done < epochs:
                context.check_time()
        return curves


# ---------------------------------------------------------------------------------------------------- processes, Ray

# Every process writes what it finishes into the same folder, so that a run can be continued with any number of them. On
# Ray files are written by one actor on the machine of the driver: workers need no disk in common. A worker that is lost
# costs the time since its last checkpoint, since Ray runs its task again; when the driver is lost Ray ends the tasks,
# and `--resume` goes on from the files.

_POLL_SECONDS = 0.2


class Setup:
    """All that a worker of a run has to know, here or on another machine."""

    def __init__(self, context: Context) -> None:
        self.task = replace(context.task, dataset=on_device(context.task.dataset, torch.device("cpu")))
        self.folder, self.device = context.store.folder.resolve(), context.task.device

    def context(self, files: Files, tick: Tick, deadline: float) -> Context:
        """The context of the run in a worker."""
        task = replace(self.task, dataset=on_device(self.task.dataset, self.device))
        return Context(task, Store(self.folder, files), tick, lambda *_: None, deadline)


def work(context: Context, cell: Cell) -> bool:
    """Train a cell; whether the time was enough."""
    try:
        context.check_time()
        with reproducible(context.task.device):
            train_cell(context, cell)
    except OutOfTime:
        return False
    return True


def run_in_processes(context: Context, processes: int) -> bool:
    """Train all missing cells; whether the time was enough. Raises a RunError if a process was killed."""
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    steps: SimpleQueue[int] = spawn.SimpleQueue()
    arguments = Setup(context), steps, context.deadline, os.getpid()
    with ProcessPoolExecutor(processes, spawn, _start_worker, arguments) as pool:
        try:
            futures = [pool.submit(_work, cell) for cell in missing_cells(context.task.experiment, context.store)]
            waiting = set(futures)
            while waiting:
                done, waiting = wait(waiting, _POLL_SECONDS, FIRST_EXCEPTION)
                while not steps.empty():
                    context.tick(steps.get())
                for future in done:
                    future.result()  # an error ends the run at once
            return all(future.result() for future in futures)
        except BrokenProcessPool as error:
            raise RunError(
                "A process of the run was ended from outside, or could not start (a script must start it under "
                "`if __name__ == '__main__':`); go on with --resume."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_context: Context | None = None  # of a worker process


def _start_worker(setup: Setup, steps: SimpleQueue[int], deadline: float, parent: int) -> None:
    """`deadline` is by `time.monotonic`, which is the same in all processes of a machine."""
    global _context

    def tick(count: int) -> None:
        if os.getppid() != parent:  # nobody waits any more
            raise OutOfTime
        steps.put(count)

    _context = setup.context(Files(), tick, deadline)


def _work(cell: Cell) -> bool:
    assert _context is not None
    return work(_context, cell)


LOCAL = "local"  # instead of an address: a Ray of this command's own, on this machine
RETRIES = 3  # of a cell whose worker is lost
_RAY_POLL_SECONDS = 0.5


class _FileKeeper(Files):
    """The actor: files on the driver's machine, and the steps that workers have done."""

    def __init__(self) -> None:
        self.steps = 0

    def count(self, steps: int) -> None:
        """Add steps."""
        self.steps += steps

    def counted(self) -> int:
        """Steps since the last time this was asked."""
        steps, self.steps = self.steps, 0
        return steps


class _RemoteFiles(Files):
    """`Files` in a worker, by way of the actor; each call waits until it is done."""

    def __init__(self, keeper: Any) -> None:
        self.keeper = keeper

    def write(self, path: Path, content: bytes) -> None:
        _result(self.keeper.write.remote(path, content))

    def read(self, path: Path) -> bytes | None:
        content: bytes | None = _result(self.keeper.read.remote(path))
        return content

    def remove(self, path: Path) -> None:
        _result(self.keeper.remove.remote(path))


def run_on_ray(context: Context, address: str, at_once: int = 1) -> bool:
    """Train all missing cells; whether the time was enough.

    The address is that of a cluster, as `ray.init` takes it, or `LOCAL`; so many cells `at_once` share a GPU. Raises a
    RunError if there is no such cluster, it has not what a cell needs, or a cell lost its worker too often.
    """
    ray = require("ray", "--ray", extra="ray")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    _connect(ray, address)
    try:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # writing twice does no harm, so that a call to a keeper that was lost may be repeated
        keeper_class = ray.remote(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)(
            _FileKeeper
        )
        setup, keeper = Setup(context), keeper_class.remote()
        needs = {"num_cpus": 1} | ({"num_gpus": 1 / at_once} if setup.device.type == "cuda" else {})
        _require_resources(ray.cluster_resources(), needs)
        task = ray.remote(max_retries=RETRIES, **needs)(_run_task)
        shared, until = ray.put(setup), time.time() + context.deadline - time.monotonic()
        missing = missing_cells(context.task.experiment, context.store)
        results = [task.remote(shared, keeper, until, cell) for cell in missing]
        waiting = results
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_RAY_POLL_SECONDS)
            context.tick(_result(keeper.counted.remote()))
            _results(done)  # an error ends the run at once
        return all(_results(results))
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == LOCAL:
            ray.init("local", include_dashboard=False, **quiet)
        else:
            host, _, port = address.removeprefix("ray://").rpartition(":")
            if host and port.isdigit():  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise RunError(f"There is no Ray cluster at {address!r} ({first_line(error)}).") from error


def _require_resources(available: dict[str, float], needs: dict[str, float]) -> None:
    for name, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if available.get(kind, 0) < needs.get(name, 0):
            raise RunError(f"A cell needs {needs[name]:g} {kind} of Ray, which has {available.get(kind, 0):g}.")


def _run_task(setup: Setup, keeper: Any, until: float, cell: Cell) -> bool:
    """One cell, in a worker; `until` is by the clock on the wall, which machines have in common."""
    deadline = time.monotonic() + until - time.time()
    return work(setup.context(_RemoteFiles(keeper), keeper.count.remote, deadline), cell)


def _result(reference: Any) -> Any:
    return _results([reference])[0]


def _results(references: list[Any]) -> list[Any]:
    """The values that tasks returned; raises the error of one as it was raised there."""
    import ray

    try:
        return list(ray.get(references))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise RunError(f"A worker of Ray was lost ({first_line(error)}); go on with --resume.") from error


# ---------------------------------------------------------------------------------------------------- a whole run

Show = Callable[[int, str], contextlib.AbstractContextManager[progress.Progress]]


@dataclass(frozen=True)
class RunOptions:
    """How an experiment is run, whatever it is."""

    device: str = "auto"  # ``cpu``, ``cuda``, or ``auto``: the GPU if there is one
    resume: bool = False  # whether to go on with what is in the folder; without, a folder with results is refused
    overwrite: bool = False  # whether to delete what an earlier run left in the folder and start anew
    root: Path | str | None = None  # where data sets are looked for first
    max_seconds: float = math.inf  # stop at the checkpoint that comes next then; every run reaches one at least
    jobs: int = 1  # so many networks at once, each in a process of its own; the numbers do not depend on it
    ray: str | None = None  # run on Ray instead: the address of a cluster, or ``local``
    show: Show = progress.show  # shows progress: `progress.show`, or anything like it
    tensorboard: Path | None = None  # a folder for its event files; none are written by default

    def __post_init__(self) -> None:
        if (self.jobs > 1 or self.ray is not None) and self.tensorboard is not None:
            raise RunError(
                "Event files can be written by one process only: leave out --tensorboard, or --jobs and --ray."
            )
        if self.resume and self.overwrite:
            raise RunError("--resume goes on with what is there and --overwrite deletes it: give one of them.")


def run(
    experiment: Experiment,
    out: Path,
    options: RunOptions,
    *,
    dataset: Dataset | None = None,
    factory: Factory | None = None,
    loss: Loss | None = None,
    optimizer: MakeOptimizer | None = None,
) -> list[Outcome]:
    """Run an experiment, keep everything in a folder of its name below `out`, and return its finished cells.

    These are fewer than it has if the time was over. Data set and model are those that the experiment names, the loss
    is cross-entropy and the optimizer Adam unless others are given; an optimizer is made of parameter groups. Raises a
    RunError if the folder holds results and `resume` was not given, or results of another model, other data or other
    settings.
    """
    deadline, target = time.monotonic() + options.max_seconds, chosen_device(options.device)
    if options.jobs > 1 and options.ray is None:
        _require_sendable({"model": factory, "loss": loss, "optimizer": optimizer})
    store = Store(Path(out) / experiment.name)
    _require_free(store, options)
    data = datasets.on_device(dataset or datasets.load(experiment.dataset, options.root), target)
    task = Task(experiment, data, factory or experiment.model, loss=loss, optimizer=optimizer)
    functions = {"loss": loss, "optimizer": optimizer}
    now = describe(experiment, target, fingerprints(task.factory, data, functions))
    described = _continued(store, now) if options.resume else now
    started = time.monotonic()
    with (
        _logger(options.tensorboard, experiment.name) as log,
        reproducible(target),
        _ready(store, options),
        options.show(_total_steps(task, store), experiment.name) as bar,
    ):
        store.write_manifest(described)
        bar.advance(0, f"{len(experiment.cells())} cells")
        context = Context(task, store, bar.advance, log, deadline)
        finished = False
        try:
            if options.ray is not None:
                finished = run_on_ray(context, options.ray, options.jobs)
            else:
                finished = run_in_processes(context, options.jobs) if options.jobs > 1 else _run_all(context)
        finally:  # a sitting that fails took its time too
            store.write_manifest(ended(described, time.monotonic() - started, finished))
    wanted = {cell.key for cell in experiment.cells()}
    outcomes = [outcome for outcome in store.outcomes() if outcome.cell.key in wanted]
    if not finished:
        left = f"{len(outcomes)} of {len(wanted)} cells of {experiment.name} are finished"
        print(f"The time is over: {left}; go on with --resume.", file=sys.stderr)
    return outcomes


def _require_free(store: Store, options: RunOptions) -> None:
    if not (options.resume or options.overwrite) and store.manifest() and store.begun():
        raise RunError(
            f"{store.folder} holds a run already: go on with --resume, start anew with --overwrite, or choose another "
            "--out."
        )


def _require_sendable(functions: dict[str, Any]) -> None:
    session = not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file()  # of which others know nothing
    for name, function in functions.items():
        try:
            ForkingPickler.dumps(function)
            sendable = not (session and getattr(function, "__module__", "") == "__main__")
        except (pickle.PicklingError, AttributeError, TypeError):
            sendable = False
        if not sendable:
            raise RunError(
                f"With several jobs other processes must import the {name}, and cannot import {function!r}: define it "
                "at the top level of a file, or leave out jobs."
            )


def _continued(store: Store, now: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a run that goes on; the earlier one must fit."""
    before = store.manifest()
    if not before:
        return now
    # what an earlier version did not know was as it is by default
    defaults = Experiment("", "", "").configuration()
    known = {"protocol": {"try_bounds": False} | before["configuration"].get("protocol", defaults["protocol"])}
    configuration, earlier = (
        json.loads(json.dumps(c)) for c in (now["configuration"], defaults | before["configuration"] | known)
    )
    earlier.pop("together", None)  # whether it trained cells as one batch of networks: the same but for rounding
    names = dict.fromkeys([*configuration, *earlier])
    if differing := [name for name in names if configuration.get(name) != earlier.get(name)]:
        raise RunError(
            f"{store.folder} was made with other settings ({', '.join(differing)}): repeat them, start anew with "
            "--overwrite, or choose another --out."
        )
    if different := [name for name, value in now["fingerprints"].items() if before["fingerprints"].get(name) != value]:
        raise RunError(
            f"The {' and the '.join(different)} of {store.folder} changed since it was begun, so that its learning "
            "rates and curves belong to something else: start anew with --overwrite, or choose another --out."
        )
    return resumed(now, before)


@contextlib.contextmanager
def _ready(store: Store, options: RunOptions) -> Iterator[None]:
    """The folder for this process alone, empty if it is to be overwritten.

    What fails before there is anything to go on with leaves no folder behind.
    """
    with locked(store.folder):
        _require_free(store, options)  # again: another process may have been faster
        remove_unfinished(store.folder)
        if options.overwrite:
            store.clear()
        try:
            yield
        except BaseException:
            if not store.begun():
                store.clear()
                with contextlib.suppress(OSError):  # the user's files are in it
                    store.folder.rmdir()
            raise


def _total_steps(task: Task, store: Store) -> int:
    protocol = task.experiment.protocol
    epochs = protocol.epochs + (protocol.evaluations * protocol.search_epochs if task.experiment.search else 0)
    missing = missing_cells(task.experiment, store)
    return sum(epochs * task.batches(cell.seed, cell.batch_size).steps for cell in missing)


def _run_all(context: Context) -> bool:
    """Train all missing cells, one after another; whether the time was enough."""
    try:
        for number, cell in enumerate(missing_cells(context.task.experiment, context.store)):
            if number:  # every run gets something done
                context.check_time()
            train_cell(context, cell)
    except OutOfTime:
        return False
    return True


@contextlib.contextmanager
def _logger(folder: Path | None, name: str) -> Iterator[Log]:
    """Writes the curves of every cell for TensorBoard."""
    if folder is None:
        yield lambda cell, number, values: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError("Event files need tensorboard: pip install '.[tracking]' in a checkout of varprop.") from error

    def log(cell: Cell, number: int, values: dict[str, float]) -> None:
        for curve, value in values.items():
            writer.add_scalar(f"{curve}/{cell.key}", value, number + 1)

    with SummaryWriter(str(Path(folder) / name)) as writer:
        yield log
