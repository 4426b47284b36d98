"""Runs experiments: what is finished is kept, what is missing is done, and how it was done is written down.

A job is what runs together, from the search for learning rates to the test. Learning rates are searched in lockstep:
every round evaluates one rate of each search. A checkpoint is written after every round, and every few epochs of the
final training. A run that was killed continues with the cells it had begun with, so that every number comes out the
same. Jobs run here, in processes of this machine, or on Ray.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

import varprop as vp
from varprop.cli import progress
from varprop.cli.models import first_line

from . import datasets
from .datasets import Dataset, on_device
from .ensemble import EnsembleTrainer
from .environment import Files, chosen_device, locked, remove_unfinished, reproducible, require
from .protocol import TRAIN_LOSS, Cell, Experiment, Factory, Outcome, Protocol, Search
from .starts import without_parametrization
from .store import Store, changed, describe, ended, fingerprints, resumed
from .training import Loss, MakeOptimizer, SingleTrainer, Task, Tick, Trainer

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
    """Search for several learning rates at once, by name, as `vp.find_lr` does for one.

    Brent's method is deterministic, so in every round each search is repeated with the losses known so far, those of
    an earlier run (`recorded`) among them, until it asks for a new one; `evaluate` gives these for all of them at once.
    While the best rate lies at the upper bound, the bound is moved up by a decade, at most to `limit` if there is one.
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
        task, begun_with = context.task, [Cell(**cell) for cell in self.kept["cells"]]
        if task.experiment.precision.compiled:
            torch.compiler.reset()  # what was compiled for earlier cells: torch keeps a few versions of a function only
        together = task.experiment.together
        self.trainer: Trainer = EnsembleTrainer(task, begun_with) if together else SingleTrainer(task, begun_with[0])
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
            for cell, curve, measured in zip(trainer.cells, curves, trainer.curves(number), strict=True):
                if math.isfinite(measured[TRAIN_LOSS]):  # the curve of one that has diverged ends
                    context.log(cell, number, measured)
                    for name, value in measured.items():
                        curve.setdefault(name, []).append(value)
            done = number + 1
            over = time.monotonic() > context.deadline
            if done == epochs or over or done % self.protocol.checkpoint_epochs == 0:
                self._keep(final={"epochs": done, "curves": curves, "state": trainer.state()})
            if done < epochs:
                context.check_time()
        return curves


# ---------------------------------------------------------------------------------------------------- processes, Ray

# Every process writes what it finishes into the same folder, so that a run can be continued with any number of them. A
# task of Ray trains what `missing_jobs` would have trained here, with as many threads, so that the numbers come out the
# same. Its files are written by one actor on the machine of the driver: workers need no disk in common. A worker that
# is lost costs the time since its last checkpoint, since Ray runs its task again; when the driver is lost Ray ends the
# tasks, and `--resume` goes on from the files.

_POLL_SECONDS = 0.2


class WorkerError(vp.VarpropError):
    """A process of a run ended before its work was done."""


@dataclass(frozen=True)
class Setup:
    """All that a worker has to know, here or on another machine."""

    task: Task  # with its data on the CPU
    folder: Path  # of the experiment
    device: torch.device  # to train on
    threads: int  # that torch uses on a CPU, as in the process that asks: results depend on it

    @classmethod
    def of(cls, context: Context) -> Setup:
        """The setup for workers of a run."""
        task = replace(context.task, dataset=on_device(context.task.dataset, torch.device("cpu")))
        return cls(task, context.store.folder.resolve(), context.task.device, torch.get_num_threads())

    def context(self, files: Files, tick: Tick, deadline: float) -> Context:
        """The context of the run in a worker."""
        torch.set_num_threads(self.threads)
        task = replace(self.task, dataset=on_device(self.task.dataset, self.device))
        return Context(task, Store(self.folder, files), tick, lambda *_: None, deadline)


def work(context: Context, name: str, cells: list[Cell]) -> bool:
    """Run one job; whether the time was enough."""
    try:
        context.check_time()
        with reproducible(context.task.device, torch.get_num_threads()):
            run_job(context, name, cells)
    except OutOfTime:
        return False
    return True


def run_in_processes(context: Context, processes: int) -> bool:
    """Run all missing jobs; whether the time was enough. Raises a WorkerError if a process was killed."""
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    steps: SimpleQueue[int] = spawn.SimpleQueue()
    arguments = Setup.of(context), steps, context.deadline, os.getpid()
    with ProcessPoolExecutor(processes, spawn, _start_worker, arguments) as pool:
        try:
            missing = missing_jobs(context.task.experiment, context.store)
            futures = [pool.submit(_work, name, cells) for name, cells in missing.items()]
            _watch(futures, steps, context.tick)
            return all([future.result() for future in futures])
        except BrokenProcessPool as error:
            raise WorkerError("A process of the run was ended from outside; go on with --resume.") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _watch(futures: list[Future[bool]], steps: SimpleQueue[int], tick: Tick) -> None:
    """Hand on the steps reported until all is done, or something failed."""
    while True:
        over = all(future.done() for future in futures)
        failed = any(future.done() and future.exception() is not None for future in futures)
        while not steps.empty():
            tick(steps.get())
        if over or failed:
            return
        time.sleep(_POLL_SECONDS)


_context: Context | None = None  # of a worker process


def _start_worker(setup: Setup, steps: SimpleQueue[int], deadline: float, parent: int) -> None:
    """`deadline` is by `time.monotonic`, which is the same in all processes of a machine."""
    global _context

    def tick(count: int) -> None:
        if os.getppid() != parent:  # nobody waits any more
            raise OutOfTime
        steps.put(count)

    _context = setup.context(Files(), tick, deadline)


def _work(name: str, cells: list[Cell]) -> bool:
    assert _context is not None
    return work(_context, name, cells)


LOCAL = "local"  # instead of an address: a Ray of this command's own, on this machine
RETRIES = 3  # of a job whose worker is lost
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
    """Run all missing jobs; whether the time was enough.

    The address is that of a cluster, as `ray.init` takes it, or `LOCAL`; so many jobs `at_once` share a GPU. Raises a
    WorkerError if there is no such cluster, it has not what a job needs, or a job lost its worker too often.
    """
    ray = require("ray", "--ray", extra="ray")
    _connect(ray, address)
    try:
        return _run(ray, context, at_once)
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == LOCAL:
            ray.init("local", include_dashboard=False, **quiet)
        else:
            _require_answer(address)
            ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise WorkerError(f"There is no Ray cluster at {address!r} ({first_line(error)}).") from error


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _run(ray: Any, context: Context, at_once: int) -> bool:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # writing twice does no harm, so that a call to a keeper that was lost may be repeated
    keeper_class = ray.remote(num_cpus=0, scheduling_strategy=here, max_restarts=-1, max_task_retries=-1)(_FileKeeper)
    setup, keeper = Setup.of(context), keeper_class.remote()
    needs = _needs(setup, at_once)
    _require_resources(ray.cluster_resources(), needs)
    task = ray.remote(max_retries=RETRIES, **needs)(_run_task)
    shared, until = ray.put(setup), time.time() + context.deadline - time.monotonic()
    # again, since a job that was begun with fewer seeds goes on with these alone
    while missing := missing_jobs(context.task.experiment, context.store):
        results = [task.remote(shared, keeper, until, name, cells) for name, cells in missing.items()]
        waiting = results
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_RAY_POLL_SECONDS)
            context.tick(_result(keeper.counted.remote()))
            _results(done)  # an error ends the run at once
        if not all(_results(results)):
            return False
    return True


def _needs(setup: Setup, at_once: int) -> dict[str, float]:
    """The resources that Ray sets aside for a job: a GPU or its share, or the threads that it computes with."""
    if setup.device.type == "cuda":
        return {"num_cpus": 1, "num_gpus": 1 / at_once}
    return {"num_cpus": 1 if setup.task.experiment.together else setup.threads}


def _require_resources(available: dict[str, float], needs: dict[str, float]) -> None:
    for name, kind in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        if available.get(kind, 0) < needs.get(name, 0):
            raise WorkerError(f"A job needs {needs[name]:g} {kind} of Ray, which has {available.get(kind, 0):g}.")


def _run_task(setup: Setup, keeper: Any, until: float, name: str, cells: list[Any]) -> bool:
    """One job, in a worker; `until` is by the clock on the wall, which machines have in common."""
    deadline = time.monotonic() + until - time.time()
    return work(setup.context(_RemoteFiles(keeper), keeper.count.remote, deadline), name, cells)


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
        raise WorkerError(f"A worker of Ray was lost ({first_line(error)}); go on with --resume.") from error


# ---------------------------------------------------------------------------------------------------- a whole run

Show = Callable[[int, str], contextlib.AbstractContextManager[progress.Progress]]


class RunError(vp.VarpropError):
    """An experiment cannot be run as asked; the message says why and what to do."""


@dataclass(frozen=True)
class RunOptions:
    """How an experiment is run, whatever it is."""

    device: str = "auto"  # ``cpu``, ``cuda``, or ``auto``: the GPU if there is one
    resume: bool = False  # whether to go on with what is in the folder; without, a folder with results is refused
    overwrite: bool = False  # whether to delete what an earlier run left in the folder and start anew
    root: Path | str | None = None  # where data sets are looked for first
    max_seconds: float = math.inf  # stop at the checkpoint that comes next then; every run reaches one at least
    jobs: int = 1  # so many cells at once, each in a process of its own; with one, small networks are trained together
    # run on Ray instead: the address of a cluster, or ``local``. Cells that are trained together are one task
    ray: str | None = None
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
    is cross-entropy and the optimizer Adam unless others are given; an optimizer is made of parameter groups, and only
    where cells are not trained together. Raises a RunError if the folder holds results and `resume` was not given, or
    results of another model, other data or other settings.
    """
    deadline, target = time.monotonic() + options.max_seconds, chosen_device(options.device)
    small = experiment.together  # networks that more than one thread would not make faster
    if options.jobs > 1 and options.ray is None:
        experiment = replace(experiment, together=False)
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
        reproducible(target, 1 if small else max(1, torch.get_num_threads() // options.jobs)),
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
    names = dict.fromkeys([*configuration, *earlier])
    if differing := [name for name in names if configuration.get(name) != earlier.get(name)]:
        raise RunError(
            f"{store.folder} was made with other settings ({', '.join(differing)}): repeat them, start anew with "
            "--overwrite, or choose another --out."
        )
    if different := changed(now["fingerprints"], before["fingerprints"]):
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
    first = [cells[0] for cells in missing_jobs(task.experiment, store).values()]
    return sum(epochs * task.batches(cell.seed, cell.batch_size).steps for cell in first)


def _run_all(context: Context) -> bool:
    """Run every cell that is missing, one job after the other; whether the time was enough."""
    try:
        while missing := missing_jobs(context.task.experiment, context.store):
            run_job(context, *next(iter(missing.items())))
            if missing_jobs(context.task.experiment, context.store):
                context.check_time()
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
