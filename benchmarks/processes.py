"""Jobs that do not depend on each other, one after another or in processes."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from varprop_lab.execution import RunError

Job = TypeVar("Job")
Result = TypeVar("Result")


def results_of(
    function: Callable[[Job], Result], jobs: Sequence[Job], processes: int, deadline: float = math.inf
) -> Iterator[tuple[Job, Result]]:
    """Jobs with what a function gives for them, as they come; with several processes each job runs in one of them.

    Jobs that have not begun by the deadline, by `time.monotonic`, are left out.
    """
    if processes == 1:
        for job in jobs:
            if time.monotonic() <= deadline:
                yield job, function(job)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_in_time, function, job, deadline) for job in jobs]
        try:
            for future in as_completed(futures):
                yield from future.result()
        except BrokenProcessPool as error:
            raise RunError("A process of the run was ended from outside; run the command again.") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_time(function: Callable[[Job], Result], job: Job, deadline: float) -> list[tuple[Job, Result]]:
    """The result in a process of its own; the clock is the same in all processes of a machine."""
    return [(job, function(job))] if time.monotonic() <= deadline else []
