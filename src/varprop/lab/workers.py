"""Cells that are trained one at a time, several of them at once in processes of their own.

A network alone seldom fills a GPU or all cores. Every process writes what it finishes into the same folder, so that a
run can be continued with any number of them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

import varprop as vp

from .datasets import Dataset, on_device
from .material import Material
from .models import Factory
from .protocol import Experiment
from .records import Cell
from .settings import reproducible
from .squad import OutOfTime, Surroundings
from .squads import run_one
from .store import Store
from .trainer import Tick

_PAUSE = 0.2  # seconds between two looks at how far the processes are


class WorkerError(vp.VarpropError):
    """A process of a run ended before its work was done."""


@dataclass(frozen=True)
class Errand:
    """What a process has to know.

    Attributes:
        experiment: Whose cells are run.
        folder: Of its results.
        dataset: On the device of the training.
        factory: Of the network; a name, or a function of a module.
        deadline: When to stop, by `time.monotonic`, which is the same in all processes.
    """

    experiment: Experiment
    folder: Path
    dataset: Dataset
    factory: str | Factory
    deadline: float


def run_apart(errand: Errand, missing: dict[str, list[Cell]], jobs: int, tick: Tick) -> bool:
    """Run squads in so many processes; whether the time was enough for all.

    Raises:
        WorkerError: If a process was killed.
    """
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    news: SimpleQueue[int] = context.SimpleQueue()
    device = errand.dataset.train_x.device
    on_host = replace(errand, dataset=on_device(errand.dataset, torch.device("cpu")))
    with ProcessPoolExecutor(jobs, context, _begin, (on_host, device, os.getpid(), news)) as pool:
        try:
            futures = [pool.submit(_work, name, cells) for name, cells in missing.items()]
            _watch(futures, news, tick)
            return all([future.result() for future in futures])
        except BrokenProcessPool as error:
            raise WorkerError("A process of the run was ended from outside; go on with --resume.") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _watch(futures: list[Future[bool]], news: SimpleQueue[int], tick: Tick) -> None:
    """Hand on the steps reported until all is done, or something failed."""
    while True:
        over = all(future.done() for future in futures)
        failed = any(future.done() and future.exception() is not None for future in futures)
        while not news.empty():
            tick(news.get())
        if over or failed:
            return
        time.sleep(_PAUSE)


# Of the process that is one of several workers.
_own: dict[str, tuple[Material, Surroundings]] = {}


def _begin(errand: Errand, device: torch.device, parent: int, news: SimpleQueue[int]) -> None:
    """Make a new process ready."""
    experiment = errand.experiment

    def tick(steps: int) -> None:
        if os.getppid() != parent:  # nobody waits any more
            raise OutOfTime
        news.put(steps)

    material = Material(experiment, on_device(errand.dataset, device), errand.factory)
    store = Store(errand.folder)
    around = Surroundings(store, experiment.protocol, experiment.search, tick, lambda *_: None, errand.deadline)
    _own["work"] = material, around


def _work(name: str, cells: list[Cell]) -> bool:
    """Run one squad; whether the time was enough."""
    material, around = _own["work"]
    try:
        around.check_time()
        with reproducible(material.experiment, material.device):
            run_one(material, around, name, cells)
    except OutOfTime:
        return False
    return True
