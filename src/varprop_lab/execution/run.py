"""Runs experiments: what is finished is kept, what is missing is done, and how it was done is written down."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import varprop as vp
from varprop.cli import progress

from ..data import datasets
from ..data.datasets import Dataset
from ..environment import chosen_device, reproducible
from ..protocol.experiments import Experiment, Factory
from ..protocol.records import Cell, Outcome
from ..store.folder import Store, changed, describe, ended, fingerprints, locked, remove_unfinished, resumed
from ..training.trainer import Loss, MakeOptimizer, Task
from .job import Context, Log, OutOfTime, missing_jobs, run_job
from .workers import run_in_processes, run_on_ray

Show = Callable[[int, str], contextlib.AbstractContextManager[progress.Progress]]


class RunError(vp.VarpropError):
    """An experiment cannot be run as asked; the message says why and what to do."""


@dataclass(frozen=True)
class RunOptions:
    """How an experiment is run, whatever it is.

    Attributes:
        device: ``cpu``, ``cuda``, or ``auto``: the GPU if there is one.
        resume: Whether to go on with what is in the folder; without, a folder with results is refused.
        overwrite: Whether to delete what an earlier run left in the folder and start anew.
        root: Where data sets are looked for first.
        max_seconds: Stop at the checkpoint that comes next then; every run reaches one at least.
        jobs: So many cells at once, each in a process of its own; with one, small networks are trained together.
        ray: Run on Ray instead: the address of a cluster, or ``local``. Cells that are trained together are one task.
        show: Shows progress: `progress.show`, or anything like it.
        tensorboard: A folder for its event files; none are written by default.
    """

    device: str = "auto"
    resume: bool = False
    overwrite: bool = False
    root: Path | str | None = None
    max_seconds: float = math.inf
    jobs: int = 1
    ray: str | None = None
    show: Show = progress.show
    tensorboard: Path | None = None

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
    """Run an experiment and keep everything in a folder of its name.

    Args:
        experiment: What to do.
        out: The folder above.
        options: How to run it.
        dataset: Instead of the one the experiment names.
        factory: Instead of the model the experiment names.
        loss: Of outputs and targets, instead of cross-entropy.
        optimizer: Makes the optimizer of parameter groups, instead of Adam; only where cells are not trained together.

    Returns:
        All finished cells of the experiment; fewer than it has if the time was over.

    Raises:
        RunError: If the folder holds results and `resume` was not given, or results of another model, other data or
            other settings.
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
