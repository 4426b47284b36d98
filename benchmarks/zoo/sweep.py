"""Every model in turn, each in a process of its own, each written down as soon as it is done."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varprop as vp

from .measure import study
from .models import group_of, prepare, present

GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """How a sweep runs.

    Attributes:
        journal: The file results are appended to, a line of JSON each.
        samples: Monte Carlo samples; none for counting operations only.
        limit: Seconds a model may take.
        memory: GiB of address space a model may take.
        again: Whether to study models that have a result already.
    """

    journal: Path
    samples: int = 24
    limit: float = 300.0
    memory: float = 8.0
    again: bool = False


def sweep(names: list[str], settings: Settings) -> list[dict[str, Any]]:
    """The records of all models named, of which those already in the journal are taken from there."""
    settings.journal.parent.mkdir(parents=True, exist_ok=True)
    known = {} if settings.again else journal(settings.journal)
    for name in present(names):
        if name in known:
            continue
        prepare(group_of(name))
        warm_up()
        known[name] = run(name, settings)
        with settings.journal.open("a") as file:
            file.write(json.dumps(known[name]) + "\n")
        print(line(known[name]), flush=True)
    return [known[name] for name in names if name in known]


@functools.cache
def warm_up() -> None:
    """Do once, before the fork, what the first capture in a process pays for."""
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 2))
    vp.propagate(block.eval(), vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1)), torch.zeros(1, 3, 4, 4))


def journal(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of every model."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["model"]: record for record in map(json.loads, lines)}


def run(name: str, settings: Settings) -> dict[str, Any]:
    """`study` in a process of its own: a crash or a hang of one model is its result, not the end of the sweep."""
    here, there = multiprocessing.Pipe(duplex=False)
    # forked, so that packages imported by one model need not be imported again for the next
    process = multiprocessing.get_context("fork").Process(target=_work, args=(name, settings, there))
    start, found = time.perf_counter(), {}
    process.start()
    there.close()
    try:
        while here.poll(max(0.0, start + settings.limit - time.perf_counter())):
            found = _newer(found, here.recv()) | {"total_s": time.perf_counter() - start}
        late = {"error": f"not finished within {settings.limit:g} s"}
        return found | {"apart": late} if found else {"model": name, "status": "too long"} | late
    except EOFError:
        process.join()
        return found or {"model": name, "status": "crash", "error": f"ended with code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _newer(found: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """A later record of a model; if the second half of its study failed, the first half stays."""
    if found and record["status"] != "done":
        return found | {"apart": {"error": record.get("error", record["status"])}}
    return record


def _work(name: str, settings: Settings, answer: Connection) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(settings.memory * GIB),) * 2)
    gc.disable()  # tracing makes objects by the million, and the process ends soon
    try:
        for record in study(name, settings.samples):
            answer.send(record)
    except Exception as error:
        what = str(error).strip().splitlines() or [""]
        answer.send({"model": name, "status": "crash", "error": f"{type(error).__name__}: {what[0][:200]}"})


def line(record: dict[str, Any]) -> str:
    """One line for the terminal."""
    said = record.get("error") or f"{record.get('exact')} exact, {record.get('approximate')} approximate"
    missing, median, apart = record.get("missing"), record.get("median_error"), record.get("apart", {})
    said += f", missing {missing}" if missing else f", median error {median:.1%}" if median is not None else ""
    said += f", positions apart {apart['median_error']:.1%}" if "median_error" in apart else ""
    return f"{record['model']:<44} {record['status']:<8} {record.get('total_s', 0):5.1f} s  {said}"
