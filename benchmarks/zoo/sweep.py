"""Every model in turn or some at a time, each in a process of its own, each written down as soon as it is done."""

from __future__ import annotations

import functools
import gc
import json
import math
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varprop as vp

from .models import group_of, prepare, present

GIB = 2**30
WAITING = 10.0  # times the limit of CPU time after which a process that computes nothing is given up
Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How a sweep runs.

    Attributes:
        journal: The file results are appended to, a line of JSON each.
        study: What is done with a model, by its name; a later record of it replaces an earlier one.
        said: What is printed of a record.
        limit: Seconds of CPU time a model may take: other work on the machine changes no result.
        memory: GiB of address space a model may take.
        again: Whether to study models that have a result already.
        stamp: What every record says besides; results with another "judge" than this are taken for none.
        workers: How many models are studied at a time.
        threads: Of each model.
        max_seconds: After which no model is begun, and those under way are given up without a record.
    """

    journal: Path
    study: Callable[[str], Iterator[Record]]
    said: Callable[[Record], str]
    limit: float = 300.0
    memory: float = 8.0
    again: bool = False
    stamp: Record = field(default_factory=dict)
    workers: int = 1
    threads: int = 1
    max_seconds: float = math.inf


def sweep(names: list[str], settings: Settings) -> list[Record]:
    """The records of all models named, of which those already in the journal are taken from there."""
    settings.journal.parent.mkdir(parents=True, exist_ok=True)
    known = {} if settings.again else _by_this_judge(journal(settings.journal), settings.stamp)
    new = [name for name in present(names) if name not in known]
    for group in dict.fromkeys(map(group_of, new)):
        prepare(group)
    warm_up()
    end = time.perf_counter() + settings.max_seconds
    with ThreadPool(settings.workers) as pool:  # of threads that wait for processes
        for record in pool.imap_unordered(lambda name: run(name, settings, end), new):
            if record:
                known[record["model"]] = record | settings.stamp | {"torch": torch.__version__}
                with settings.journal.open("a") as file:
                    file.write(json.dumps(known[record["model"]]) + "\n")
                print(line(known[record["model"]], settings.said), flush=True)
    return [known[name] for name in names if name in known]


def _by_this_judge(known: dict[str, Record], stamp: Record) -> dict[str, Record]:
    return {name: record for name, record in known.items() if record.get("judge") == stamp.get("judge")}


@functools.cache
def warm_up() -> None:
    """Do once, before the fork, what the first capture in a process pays for."""
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2))
    vp.propagate(block.eval(), vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)), torch.zeros(1, 3, 4, 4))


def journal(path: Path) -> dict[str, Record]:
    """The last record of every model."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["model"]: record for record in map(json.loads, lines)}


_forking = threading.Lock()  # of one process at a time: a fork would hold the other's end of the pipe open


def run(name: str, settings: Settings, end: float = math.inf) -> Record:
    """The study in a process of its own: a crash or a hang of one model is its result, not the end of the sweep.

    Returns:
        The record; empty if the clock (`time.perf_counter`) has come to `end` before it was finished.
    """
    if time.perf_counter() >= end:
        return {}
    with _forking:
        here, there = multiprocessing.Pipe(duplex=False)
        # forked, so that packages imported by one model need not be imported again for the next; this process must
        # compute no gradients, as a torch with CUDA would then refuse to compute any in its forks
        process = multiprocessing.get_context("fork").Process(target=_work, args=(name, settings, there))
        start, found = time.perf_counter(), {}
        patience = WAITING * settings.limit
        process.start()
        there.close()
    try:
        while (left := settings.limit - _cpu_seconds(process)) > 0 and time.perf_counter() < start + patience:
            if time.perf_counter() >= end:
                return {}
            # its threads cannot use up what is left sooner
            if here.poll(min(left / settings.threads, max(0.0, end - time.perf_counter()))):
                found = _newer(found, here.recv()) | {"total_s": time.perf_counter() - start}
        late = {"error": f"not finished within {settings.limit:g} s of CPU time"}
        return found | {"apart": late} if found else {"model": name, "status": "too long"} | late
    except EOFError:
        process.join()
        return found or {"model": name, "status": "crash", "error": f"ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _cpu_seconds(process: multiprocessing.process.BaseProcess) -> float:
    """What a process has computed so far."""
    after_name = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _newer(found: Record, record: Record) -> Record:
    """A later record of a model; if the second half of its study failed, the first half stays."""
    if found and record["status"] != "done":
        return found | {"apart": {"error": record.get("error", record["status"])}}
    return record


def _work(name: str, settings: Settings, answer: Connection) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(settings.memory * GIB),) * 2)
    torch.set_num_threads(settings.threads)
    gc.disable()  # tracing makes objects by the million, and the process ends soon
    try:
        for record in settings.study(name):
            answer.send(record)
    except Exception as error:
        what = str(error).strip().splitlines() or [""]
        answer.send({"model": name, "status": "crash", "error": f"{type(error).__name__}: {what[0][:200]}"})


def line(record: Record, said: Callable[[Record], str]) -> str:
    """One line for the terminal."""
    text = record.get("error") or said(record)
    return f"{record['model']:<44} {record['status']:<8} {record.get('total_s', 0):5.1f} s  {text}"
