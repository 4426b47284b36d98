"""A grid of trainings that share a GPU: cells handed to processes, recorded as they end, gone on with another time.

Records are a file of JSON lines, one for every finished cell; cells that it has are not made again, and a line that was
cut off is none. `Grid` starts processes and hands them cells, the most important first; `serve` is the other end, where
a `GridWorker` trains. What the cells are, and which process may take which, is said by a subclass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import varprop as vp
from varprop_lab.environment import git_state, versions

from .side_by_side import Member, SideBySide

ROOT = Path(__file__).parents[2]
SEARCH, TEST, COST = "search", "test", "cost"
HELD_OUT = 5000
TRIES = 2  # of a cell that breaks its process
LAST_START = 25.0  # seconds before the limit; later there is no time to load and record anything
GRACE = 45.0  # seconds after the limit in which processes save their state


@dataclass(frozen=True)
class GridCell:
    """A normalization with a batch size, and the networks that are trained with it."""

    kind: str
    norm: str
    batch: int
    members: tuple[Member, ...]
    label: str = ""  # of cells with the same batch; the batch otherwise

    @property
    def key(self) -> str:
        """Under which it is recorded."""
        return f"{self.kind} {self.norm} {self.label or self.batch}"


def best_of(runs: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The run with the highest accuracy; None if all diverged."""
    return max((r for r in runs if r["accuracy"] is not None), key=lambda run: run["accuracy"], default=None)


def read(file: Path) -> dict[str, Any]:
    """The records of a file by cell."""
    records = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["cell"]] = record
    return records


def loaded(script: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------- one process


class GridWorker:
    """Trains cells one after another in a process of its own."""

    settings: tuple[str, ...] = ("model", "width", "epochs", "images", "jobs")  # options that a record says
    cutout = 0  # side of a square that is cut out of every image

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.example = loaded(ROOT / "examples" / "train_cifar.py")
        self.device = torch.device(options.device)
        self.data: dict[int, Any] = {}

    def prepare(self, cell: GridCell) -> dict[str, Any]:
        """Make ready for cells like this one."""
        raise NotImplementedError

    def trained(self, cell: GridCell, until: float) -> dict[str, Any]:
        """The record of a cell; the steps done if it was stopped, the seconds it takes if there is no time for it."""
        raise NotImplementedError

    def cost(self, cell: GridCell) -> dict[str, Any]:
        """Time and memory of a step, after `prepare`, with no other process at work."""
        milliseconds = min(self.trainer.milliseconds(0.5) for _ in range(3))
        memory = torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else 0.0
        return {**self.about(cell), "ms": round(milliseconds, 3), "MiB": round(memory), "runs": []}

    trainer: SideBySide

    def about(self, cell: GridCell) -> dict[str, Any]:
        """The first fields of a record."""
        where = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        names = {"cell": cell.key, "kind": cell.kind, "norm": cell.norm, "batch": cell.batch}
        settings = {name: getattr(self.options, name) for name in self.settings}
        return {**names, **settings, "hardware": where, "git": git_state(), "torch": versions()["torch"]}

    def runs(self, cell: GridCell, trainer: SideBySide, judged: tuple[Tensor, Tensor]) -> list[dict[str, Any]]:
        """The outcome of every network, by the images to judge by."""
        columns = list(zip(*trainer.losses, strict=True))
        return [
            {
                **{name: value for name, value in asdict(member).items() if name != "adaptive" or value},
                "accuracy": accuracy if math.isfinite(losses[-1]) else None,
                "losses": [round(loss, 5) if math.isfinite(loss) else None for loss in losses],
            }
            for member, accuracy, losses in zip(cell.members, trainer.accuracies(*judged), columns, strict=True)
        ]

    def images(self, held_out: int) -> Any:
        """Images on the device: read once, and shared by all cells; noise, for times, where there is no folder."""
        if held_out not in self.data:
            options = self.options
            if options.data is None:
                train, judged = (
                    (torch.randn(n, 3, 32, 32, device=self.device), torch.randint(10, (n,), device=self.device))
                    for n in (options.images or 50_000, options.held_out)
                )
                self.data[held_out] = self.example.Data(train, judged)
            else:
                chosen = ["--data", str(options.data), "--held-out", str(held_out), "--images", str(options.images)]
                self.data[held_out] = self.example.load_data(self.example.parser().parse_args(chosen), self.device)
        return self.data[held_out]

    def epochs(self, data: Any, batch: int) -> Any:
        """The images of a seed's epoch, in their order."""

        def epoch(seed: int, number: int) -> tuple[Tensor, Tensor]:
            xs, ys = zip(*self.example.epoch_of(*data.train, batch, seed, number, self.cutout), strict=True)
            return torch.cat(xs), torch.cat(ys)

        return epoch


def serve(worker: GridWorker) -> None:
    """Read cells from the standard input, write what became of them to the standard output, a line each."""
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not look like an answer
    for line in sys.stdin:
        asked = json.loads(line)
        members = tuple(Member(*values) for values in asked["members"])
        cell = GridCell(asked["kind"], asked["norm"], asked["batch"], members, asked["label"])
        if worker.options.crash == cell.key:
            os._exit(7)
        try:
            if asked["prepare"]:
                answer = worker.prepare(cell)
            else:
                answer = worker.cost(cell) if cell.kind == COST else worker.trained(cell, asked["until"])
        except Exception as error:  # out of memory, a kernel that failed: this process may be unusable
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=out, flush=True)
        if "error" in answer:
            return


# ---------------------------------------------------------------------------------------------------- all of them


class Grid:
    """Hands cells to processes and writes what they answer at once; touches no GPU itself."""

    module = ""  # whose command line has the action `serve`
    same: tuple[str, ...] = ("model", "width", "epochs", "images")  # options in which records have to agree

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Condition()
        self.records = read(options.records)
        self.start = time.time()
        self.until = self.start + options.max_seconds
        self.busy: dict[str, GridCell] = {}
        self.waiting: set[str] = set()  # processes without a cell
        self.failures: dict[str, int] = {}
        self.left: set[str] = set()  # for another sitting
        self.processes: list[subprocess.Popen[str]] = []
        self.preparing = threading.Semaphore(options.preparing)
        self.alive = threading.Semaphore(getattr(options, "alive", options.jobs))

    def ready(self) -> list[GridCell]:
        """Cells that are missing and can be made now, the most important first."""
        raise NotImplementedError

    def names(self) -> Sequence[str]:
        """Names of the processes."""
        return [str(number) for number in range(self.options.jobs)]

    def takes(self, name: str, cell: GridCell) -> bool:
        """True if a process may take a cell."""
        return True

    def prepared(self, name: str) -> GridCell | None:
        """A cell for which a process makes ready before it takes any; None if it need not."""
        return None

    def run(self) -> None:
        """All cells that there is time for.

        Raises:
            VarpropError: If there are records of another network or of other epochs.
        """
        for record in self.records.values():
            different = [name for name in self.same if name in record and record[name] != getattr(self.options, name)]
            if different and record["kind"] != COST:
                said = ", ".join(f"{name} {record[name]}" for name in different)
                raise vp.VarpropError(
                    f"{self.options.records} has records with {said}: give the same, or another file."
                )
        self._in_threads(self._work, self.names())
        missing = [cell.key for cell in self.ready()]
        self.say(f"{len(self.records)} records; missing of what is ready: {', '.join(missing) or 'nothing'}")

    def cost(self, cells: Iterable[GridCell]) -> None:
        """Record the cost of cells: all make ready at the same time, then each is timed while the others wait."""
        missing = {cell.key: cell for cell in cells if cell.key not in self.records}
        ready: dict[str, subprocess.Popen[str]] = {}

        def work(key: str) -> None:
            process = self._started(key)
            with self.preparing:
                answer = self._asked(process, missing[key], prepare=True)
            self.say(f"{key}: {answer}")
            if "error" not in answer:
                ready[key] = process

        self._in_threads(work, list(missing), kill=False)
        for key, process in ready.items():
            self._keep(missing[key], self._asked(process, missing[key]))
        self._kill()

    def _in_threads(self, work: Any, names: Sequence[str], kill: bool = True) -> None:
        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(None if self.until == math.inf else max(0.0, self.until + GRACE - time.time()))
        if kill:
            self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _work(self, name: str) -> None:
        with self.alive:
            self._work_as(name)

    def _work_as(self, name: str) -> None:
        process = self._prepared(name)
        while process is not None:
            cell = self._next(name)
            if cell is None:
                process.kill()
                return
            answer = self._asked(process, cell)
            with self.lock:
                self._keep(cell, answer)
                del self.busy[cell.key]
                self.lock.notify_all()
            if "error" in answer:
                process.kill()
                process = self._prepared(name)

    def _prepared(self, name: str) -> subprocess.Popen[str] | None:
        """A process that is ready; None if it cannot be."""
        first = self.prepared(name)
        if first is None:
            return self._started(name)
        with self.preparing:
            for _ in range(TRIES):
                if time.time() > self.until - LAST_START:
                    return None
                process = self._started(name)
                answer = self._asked(process, first, prepare=True)
                self.say(f"{name}: {answer}")
                if "error" not in answer:
                    return process
        return None

    def _next(self, name: str) -> GridCell | None:
        """The first cell that a waiting process may take, if it is this one's; waits otherwise. None at the end."""
        with self.lock:
            self.waiting.add(name)
            while time.time() < self.until - LAST_START:
                free = [cell for cell in self.ready() if cell.key not in self.busy and cell.key not in self.left]
                first = next((c for c in free if any(self.takes(other, c) for other in self.waiting)), None)
                if first is not None and self.takes(name, first) and len(self.busy) < self.options.jobs:
                    self.busy[first.key] = first
                    self.waiting.discard(name)
                    return first
                if not any(self.takes(name, cell) for cell in (*free, *self.busy.values())):
                    break
                self.lock.wait(1.0)
            self.waiting.discard(name)
        return None

    def _asked(self, process: subprocess.Popen[str], cell: GridCell, prepare: bool = False) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        members = [list(asdict(member).values()) for member in cell.members]
        asked = {"kind": cell.kind, "norm": cell.norm, "batch": cell.batch, "members": members, "label": cell.label}
        try:
            process.stdin.write(json.dumps({**asked, "until": self.until, "prepare": prepare}) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            return {"error": f"its process ended with status {process.wait()}"}
        return answer

    def _keep(self, cell: GridCell, answer: dict[str, Any]) -> None:
        if "runs" in answer:
            self.records[cell.key] = answer
            with self.options.records.open("a") as file:
                file.write(json.dumps(answer) + "\n")
            if cell.kind == COST:
                self.say(f"{cell.key}: {answer['ms']} ms, {answer['MiB']} MiB")
            else:
                self.say(f"{cell.key}: {[run['accuracy'] for run in answer['runs']]} in {answer['seconds']} s")
            return
        self.say(f"{cell.key}: {answer}")
        if "error" in answer:
            self.failures[cell.key] = self.failures.get(cell.key, 0) + 1
        if "error" not in answer or self.failures[cell.key] >= TRIES:
            self.left.add(cell.key)

    def _started(self, name: str) -> subprocess.Popen[str]:
        words = ["serve", str(self.options.records)]
        for option, value in vars(self.options).items():
            if option not in ("action", "records", "max_seconds") and value is not None and value is not False:
                words += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
        command = [sys.executable, "-m", self.module, *words]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        threads = {"TORCHINDUCTOR_COMPILE_THREADS": "3", **os.environ, "OMP_NUM_THREADS": "1"}
        environment = threads | {"PYTHONPATH": path}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        with self.lock:
            self.processes.append(process)
        return process

    def say(self, line: str) -> None:
        """With the seconds since the beginning."""
        print(f"[{time.time() - self.start:.0f}] {line}", flush=True)


def parser(description: str | None, actions: Sequence[str]) -> argparse.ArgumentParser:
    """Options of every grid."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("action", choices=[*actions, "serve"])
    made.add_argument("records", type=Path)
    made.add_argument("--model", default="resnet18")
    made.add_argument("--images", type=int, default=0, help="train on the first so many only")
    made.add_argument("--held-out", type=int, default=HELD_OUT)
    made.add_argument("--max-seconds", type=float, default=math.inf)
    made.add_argument("--data", type=Path, help="folder with CIFAR-10; without it, noise")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--crash", help=argparse.SUPPRESS)  # a cell that ends its process, for tests
    return made
