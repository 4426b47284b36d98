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
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch

import varprop as vp

from ..data.datasets import on_device
from ..environment import reproducible
from ..protocol.records import Cell
from ..store.files import Files
from ..store.folder import Store
from ..training.task import Task
from ..training.trainer import Tick
from .job import Context, OutOfTime, missing_jobs, run_job

_POLL_SECONDS = 0.2


class WorkerError(vp.VarpropError):
    """A process of a run ended before its work was done."""


@dataclass(frozen=True)
class Setup:
    """What a worker has to know, here or on another machine."""

    task: Task  # with its data on the CPU
    folder: Path  # of the experiment
    device: torch.device  # to train on
    threads: int  # that torch uses on a CPU, as in the process that asks: results depend on it

    @classmethod
    def of(cls, context: Context) -> Setup:
        """Of a run."""
        task = replace(context.task, dataset=on_device(context.task.dataset, torch.device("cpu")))
        return cls(task, context.store.folder.resolve(), context.task.device, torch.get_num_threads())

    def context(self, files: Files, tick: Tick, deadline: float) -> Context:
        """The same run in a worker."""
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
    """Run all missing jobs; whether the time was enough.

    Raises:
        WorkerError: If a process was killed.
    """
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
