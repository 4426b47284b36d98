"""Jobs of one cell each, several at once in processes of their own.

A network alone seldom fills a GPU or all cores. Every process writes what it finishes into the same folder, so that a
run can be continued with any number of them.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

import varprop as vp

from ..data.datasets import Dataset, on_device
from ..environment import reproducible
from ..protocol.experiments import Experiment
from ..protocol.models import Factory
from ..protocol.records import Cell
from ..store.folder import Store
from ..training.task import Task
from ..training.trainer import Tick
from .job import Context, OutOfTime, missing_jobs, run_job

_POLL_SECONDS = 0.2


class WorkerError(vp.VarpropError):
    """A process of a run ended before its work was done."""


@dataclass(frozen=True)
class _Setup:
    """What a worker has to know; `deadline` is by `time.monotonic`, which is the same in all processes."""

    experiment: Experiment
    dataset: Dataset  # on the CPU
    factory: str | Factory
    folder: Path
    deadline: float
    device: torch.device
    parent: int


def run_in_processes(context: Context, processes: int) -> bool:
    """Run all missing jobs; whether the time was enough.

    Raises:
        WorkerError: If a process was killed.
    """
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    steps: SimpleQueue[int] = spawn.SimpleQueue()
    task, dataset = context.task, on_device(context.task.dataset, torch.device("cpu"))
    folder, deadline = context.store.folder, context.deadline
    setup = _Setup(task.experiment, dataset, task.factory, folder, deadline, task.device, os.getpid())
    with ProcessPoolExecutor(processes, spawn, _start_worker, (setup, steps)) as pool:
        try:
            missing = missing_jobs(task.experiment, context.store)
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


def _start_worker(setup: _Setup, steps: SimpleQueue[int]) -> None:
    global _context

    def tick(count: int) -> None:
        if os.getppid() != setup.parent:  # nobody waits any more
            raise OutOfTime
        steps.put(count)

    task = Task(setup.experiment, on_device(setup.dataset, setup.device), setup.factory)
    _context = Context(task, Store(setup.folder), tick, lambda *_: None, setup.deadline)


def _work(name: str, cells: list[Cell]) -> bool:
    """Run one job; whether the time was enough."""
    assert _context is not None
    try:
        _context.check_time()
        with reproducible(_context.task.device, _context.experiment.together):
            run_job(_context, name, cells)
    except OutOfTime:
        return False
    return True
