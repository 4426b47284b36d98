"""Jobs in processes of their own on this machine, or as tasks of Ray on a cluster.

Every process writes what it finishes into the same folder, so that a run can be continued with any number of them. A
task of Ray trains what `missing_jobs` would have trained here, with as many threads, so that the numbers come out the
same. Its files are written by one actor on the machine of the driver: workers need no disk in common. A worker that is
lost costs the time since its last checkpoint, since Ray runs its task again; when the driver is lost Ray ends the
tasks, and `--resume` goes on from the files.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeVar

import torch

import varprop as vp
from varprop.cli.models import first_line

from ..data.datasets import on_device
from ..environment import reproducible, require
from ..protocol.records import Cell
from ..store.folder import Files, Store
from ..training.trainer import Task, Tick
from .job import Context, OutOfTime, missing_jobs, run_job

_POLL_SECONDS = 0.2


class WorkerError(vp.VarpropError):
    """A process of a run ended before its work was done."""


Job = TypeVar("Job")
Result = TypeVar("Result")


def results_of(function: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> Iterator[Result]:
    """The result of a function for every job, as they come; with several processes each job runs in one of them."""
    if processes == 1:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(function, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise WorkerError("A process of the run was ended from outside; run the command again.") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


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

    Args:
        context: Of the run.
        address: Of a cluster, as `ray.init` takes it, or `LOCAL`.
        at_once: Jobs that share a GPU.

    Raises:
        WorkerError: If there is no such cluster, it has not what a job needs, or a job lost its worker too often.
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
