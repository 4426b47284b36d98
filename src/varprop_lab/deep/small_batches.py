"""Accuracy over batch sizes by normalization: a grid of trainings that share a GPU, in as many sittings as it takes.

    python -m varprop_lab.deep.small_batches run RECORDS [--epochs 4] [--jobs 10] [--max-seconds 540] [--data DIR]
    python -m varprop_lab.deep.small_batches probe RECORDS     # times of steps, and what the grid would take
    python -m varprop_lab.deep.small_batches cost RECORDS      # time and memory of a step, each alone
    python -m varprop_lab.deep.small_batches show RECORDS      # the table; RECORDS.png and .svg if matplotlib is there

RECORDS is a file of JSON lines, one for every finished cell of the grid; cells that it has are not made again. A cell
is a method with a batch size: first a search of rates and bounds of the gradient on held-out training images, six
networks side by side, then the best of them on the test images, a network for every seed. With `--state DIR` cells that
the limit of time stops are saved there, and the next sitting goes on with them; without it, cells that cannot end in
time are not begun.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table

from ..environment import git_state, versions
from ..report.plotting import draw
from ..report.series import Figure, Panel, PlottedSeries
from .runs import example
from .side_by_side import Member, SideBySide, joined

METHODS = {  # names of examples/train_cifar.py; where there are several, the best with the largest batch
    "batch norm": ("batch",),
    "batch renorm": ("renorm",),
    "group norm": ("group", "group16"),
    "group norm + WS": ("group-ws", "group16-ws"),
    "analytic": ("analytic",),
}
BATCHES = (2, 4, 8, 16, 32)
RATES = (0.4, 1.0, 2.5)  # multiples of 0.2 batch / 256
SEEDS = (0, 1, 2)
SEARCH, TEST, COST = "search", "test", "cost"
HELD_OUT = 5000
TRIES = 2  # of a cell that breaks its process
LAST_START = 25.0  # seconds before the limit; later there is no time to load and record anything
GRACE = 45.0  # seconds after the limit in which processes save their state


@dataclass(frozen=True)
class GridCell:
    """A method with a batch size, searched for its best setting or tested with it."""

    kind: str
    norm: str
    batch: int
    members: tuple[Member, ...]

    @property
    def key(self) -> str:
        """Under which it is recorded."""
        return f"{self.kind} {self.norm} {self.batch}"


def rate_of(batch: int, multiple: float) -> float:
    """Rates grow with the batch."""
    return float(f"{multiple * 0.2 * batch / 256:.6g}")


def clip_of(batch: int) -> float:
    """Noise falls with the root of the batch, and so does the bound."""
    return float(f"{2 * (256 / batch) ** 0.5:.4g}")


def search_of(norm: str, batch: int) -> GridCell:
    """All rates, with and without clipping."""
    tried = [Member(rate_of(batch, multiple), clip, 0) for clip in (0.0, clip_of(batch)) for multiple in RATES]
    return GridCell(SEARCH, norm, batch, tuple(tried))


def best_of(record: dict[str, Any]) -> dict[str, Any] | None:
    """The run of a search with the highest accuracy on held-out images; None if all diverged."""
    runs = [run for run in record["runs"] if run["accuracy"] is not None]
    return max(runs, key=lambda run: run["accuracy"]) if runs else None


def norm_of(method: str, records: dict[str, Any]) -> str | None:
    """The variant of a method, chosen with the largest batch; None while that is not known."""
    norms = METHODS[method]
    if len(norms) == 1:
        return norms[0]
    searched = {norm: records.get(search_of(norm, BATCHES[-1]).key) for norm in norms}
    if any(record is None for record in searched.values()):
        return None
    scores = {norm: (best_of(record) or {"accuracy": 0.0})["accuracy"] for norm, record in searched.items() if record}
    return max(norms, key=lambda norm: scores[norm])


def ready(records: dict[str, Any]) -> list[GridCell]:
    """Cells that can be made now, the most steps first: what is last is short, and all processes end together."""
    cells = []
    for method, norms in METHODS.items():
        if len(norms) > 1:
            cells += [search_of(norm, BATCHES[-1]) for norm in norms]
        norm = norm_of(method, records)
        for batch in BATCHES if norm else ():
            assert norm is not None
            search = search_of(norm, batch)
            cells.append(search)
            best = best_of(records[search.key]) if search.key in records else None
            if best is not None:
                members = tuple(Member(best["rate"], best["clip"], seed) for seed in SEEDS)
                cells.append(GridCell(TEST, norm, batch, members))
    missing = {cell.key: cell for cell in cells if cell.key not in records}
    deciding = [cell for cell in missing.values() if cell.kind == SEARCH and cell.norm.startswith("group")]
    first = {cell.key for cell in deciding if cell.batch == BATCHES[-1]}  # others wait for them
    order = {cell: (cell.key not in first, cell.batch, cell.kind, cell.norm != "analytic") for cell in missing.values()}
    return sorted(order, key=lambda cell: order[cell])


# ---------------------------------------------------------------------------------------------------- one cell


def train_cifar() -> Any:
    """The example, as a module."""
    spec = importlib.util.spec_from_file_location("train_cifar", example("train_cifar.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Worker:
    """Trains cells one after another in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.example = options, train_cifar()
        self.device = torch.device(options.device)
        self.data: dict[int, Any] = {}
        self.moments: dict[int, vp.Moments] = {}
        self.ways_file = (options.state or options.records.parent) / "convolutions.json"

    def trained(self, cell: GridCell, until: float, probe: float = 0.0) -> dict[str, Any]:
        """The record of a cell; the steps done if it was stopped, the seconds it takes if there is no time for it."""
        start = time.time()
        data = self._data(0 if cell.kind == TEST else self.options.held_out)
        trainer = self._trainer(cell, data)
        name = f"{cell.key.replace(' ', '-')}-{self.options.epochs}.pt"
        state = self.options.state / name if self.options.state else None
        if state and state.exists():
            trainer.load(state)
        trainer.prepare()
        self._keep_ways(trainer.ways)
        prepared = round(time.time() - start, 1)
        if probe:
            return {"ms": round(trainer.milliseconds(probe), 3), "prepared": prepared}
        if state is None:
            needed = trainer.steps * trainer.epochs * trainer.milliseconds(0.5) / 1000
            if time.time() + needed > until:
                return {"needs": round(needed)}
        if not trainer.train(until):
            if state:
                trainer.save(state)
            return {"stopped": trainer.done, "of": trainer.steps * trainer.epochs}
        accuracies = trainer.accuracies(*data.judged)
        columns = list(zip(*trainer.losses, strict=True))
        runs = [
            {
                "rate": member.rate,
                "clip": member.clip,
                "seed": member.seed,
                "accuracy": accuracy if math.isfinite(losses[-1]) else None,
                "losses": [round(loss, 5) if math.isfinite(loss) else None for loss in losses],
            }
            for member, accuracy, losses in zip(cell.members, accuracies, columns, strict=True)
        ]
        times = {"prepared": prepared, "seconds": round(time.time() - start, 1)}
        return {**self._about(cell), "steps": trainer.steps, **times, "runs": runs}

    def _ways(self) -> dict[str, str]:
        """How convolutions are fastest, as far as any process has found out."""
        ways: dict[str, str] = json.loads(self.ways_file.read_text()) if self.ways_file.exists() else {}
        return ways

    def _keep_ways(self, ways: dict[str, str]) -> None:
        """Write them by way of a file of this process alone: others write at the same time."""
        written = self.ways_file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({**self._ways(), **ways}))
        written.replace(self.ways_file)

    def _about(self, cell: GridCell) -> dict[str, Any]:
        settings = {name: getattr(self.options, name) for name in ("model", "width", "epochs", "images", "jobs")}
        where = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        about = {"hardware": where, "git": git_state(), "torch": versions()["torch"]}
        return {"cell": cell.key, "kind": cell.kind, "norm": cell.norm, "batch": cell.batch, **settings, **about}

    def _data(self, held_out: int) -> Any:
        """Images on the device: read once, and shared by all cells."""
        if held_out not in self.data:
            options = self.options
            if options.data is None:
                self.data[held_out] = self._made_up()
            else:
                chosen = ["--data", str(options.data), "--held-out", str(held_out), "--images", str(options.images)]
                self.data[held_out] = self.example.load_data(self.example.parser().parse_args(chosen), self.device)
            self.moments[held_out] = vp.input_moments(self.data[held_out].train[0].cpu())
        return self.data[held_out]

    def _made_up(self) -> Any:
        """Noise, for times."""
        train, judged = (
            (torch.randn(n, 3, 32, 32, device=self.device), torch.randint(10, (n,), device=self.device))
            for n in (self.options.images or 50_000, 1000)
        )
        return self.example.Data(train, judged)

    def network(self, norm: str, members: Iterable[Member], moments: vp.Moments, batch: int) -> nn.Module:
        """Networks with the weights of their seeds, joined and normalized."""
        models = []
        for member in members:
            torch.manual_seed(member.seed)
            models.append(self.example.resnet(self.options.model, norm, self.options.width))
        model = joined(models)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):  # its running statistics are averages of as many images for all sizes
                layer.momentum = 0.1 * min(1.0, batch / BATCHES[-1])
        if norm != "analytic":
            return model
        mean, var = (tensor.repeat(1, len(models), 1, 1) for tensor in (moments.mean, moments.var))
        return vp.normalize(model, vp.Moments(mean, var, (1, mean.shape[1], 32, 32)), form="deep")

    def _trainer(self, cell: GridCell, data: Any) -> SideBySide:
        images, labels = data.train

        def epoch(seed: int, number: int) -> tuple[Tensor, Tensor]:
            xs, ys = zip(*self.example.epoch_of(images, labels, cell.batch, seed, number), strict=True)
            return torch.cat(xs), torch.cat(ys)

        moments = self.moments[0 if cell.kind == TEST else self.options.held_out]
        model = self.network(cell.norm, cell.members, moments, cell.batch)
        arguments = (cell.members, epoch, len(images), cell.batch, self.options.epochs, self.device)
        return SideBySide(model, *arguments, ways=self._ways())


def serve(options: argparse.Namespace) -> None:
    """Read cells from the standard input, write what became of them to the standard output, a line each."""
    worker = Worker(options)
    out, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not look like an answer
    for line in sys.stdin:
        asked = json.loads(line)
        members = tuple(Member(*values) for values in asked["members"])
        cell = GridCell(asked["kind"], asked["norm"], asked["batch"], members)
        if options.crash == cell.key:
            os._exit(7)
        try:
            answer = worker.trained(cell, asked["until"], asked["probe"])
        except Exception as error:  # out of memory, a kernel that failed: this process may be unusable
            answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=out, flush=True)
        if "error" in answer:
            return


# ---------------------------------------------------------------------------------------------------- the grid


class Grid:
    """Hands cells to processes and writes what they answer at once; touches no GPU itself."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.lock = options, threading.Condition()
        self.records = read(options.records)
        self.until = time.time() + options.max_seconds
        self.busy: set[str] = set()
        self.failures: dict[str, int] = {}
        self.left: set[str] = set()  # for another sitting
        self.processes: list[subprocess.Popen[str]] = []

    def run(self) -> None:
        """All cells that there is time for."""
        check(self.records.values(), self.options)
        self._in_threads(self._work)
        missing = [cell.key for cell in ready(self.records)]
        self.say(f"{len(self.records)} records; missing of what is ready: {', '.join(missing) or 'nothing'}")

    def probe(self, seconds: float = 6.0) -> None:
        """Times of steps while all processes work, and what the grid would take with so many epochs."""
        norms = [norms[0] for norms in METHODS.values()]
        self.probed = [search_of(norm, batch) for batch in (2, 8, 32) for norm in norms]
        self.times: dict[str, float] = {}
        self._in_threads(lambda number: self._probe(number, seconds))
        hours = {norm: _interpolated({b: self.times.get(search_of(norm, b).key) for b in (2, 8, 32)}) for norm in norms}
        if any(len(by_batch) < len(BATCHES) for by_batch in hours.values()):
            self.say("Not all steps could be timed: no estimate.")
            return
        steps = {batch: (self.options.images or 50_000) / batch for batch in BATCHES}
        # a search trains six networks, a test three, which takes at most as long
        epoch = sum(2 * steps[b] * ms[b] / 1000 for ms in hours.values() for b in BATCHES) / self.options.jobs
        longest = max(steps[2] * ms[2] / 1000 for ms in hours.values())
        self.say(f"An epoch of the grid takes at most {epoch:.0f} s, of its longest cell {longest:.0f} s.")

    def _in_threads(self, work: Any) -> None:
        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(self.options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.until + GRACE - time.time()))
        for process in self.processes:
            process.kill()

    def _probe(self, number: int, seconds: float) -> None:
        process = self._started(number)
        while True:
            with self.lock:
                if not self.probed or time.time() > self.until - LAST_START:
                    return
                cell = self.probed.pop(0)
            answer = self._asked(process, cell, probe=seconds)
            self.say(f"{cell.key}: {answer}")
            if "ms" in answer:
                self.times[cell.key] = answer["ms"]
            else:
                process = self._started(number)

    def _work(self, number: int) -> None:
        process = self._started(number)
        while True:
            cell = self._next()
            if cell is None:
                process.kill()
                return
            answer = self._asked(process, cell)
            with self.lock:
                self._keep(cell, answer)
                self.busy.discard(cell.key)
                self.lock.notify_all()
            if "error" in answer:
                process.kill()
                process = self._started(number)

    def _next(self) -> GridCell | None:
        """A cell that nobody works on; waits for those that others make possible. None at the end."""
        with self.lock:
            while time.time() < self.until - LAST_START:
                for cell in ready(self.records):
                    if cell.key not in self.busy | self.left:
                        self.busy.add(cell.key)
                        return cell
                if not self.busy:
                    return None
                self.lock.wait(1.0)
        return None

    def _asked(self, process: subprocess.Popen[str], cell: GridCell, probe: float = 0.0) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        members = [[member.rate, member.clip, member.seed] for member in cell.members]
        question = {"kind": cell.kind, "norm": cell.norm, "batch": cell.batch, "members": members}
        try:
            process.stdin.write(json.dumps({**question, "until": self.until, "probe": probe}) + "\n")
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
            values = [run["accuracy"] for run in answer["runs"]]
            self.say(f"{cell.key}: {values} in {answer['seconds']} s")
            return
        self.say(f"{cell.key}: {answer}")
        if "error" in answer:
            self.failures[cell.key] = self.failures.get(cell.key, 0) + 1
        if "error" not in answer or self.failures[cell.key] >= TRIES:
            self.left.add(cell.key)

    def _started(self, number: int) -> subprocess.Popen[str]:
        words = ["serve", str(self.options.records)]
        for name in ("model", "width", "epochs", "images", "jobs", "held_out", "device", "data", "state", "crash"):
            value = getattr(self.options, name)
            words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        command = [sys.executable, "-m", "varprop_lab.deep.small_batches", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        with self.lock:
            self.processes.append(process)
        return process

    def say(self, line: str) -> None:
        """With the seconds since the beginning."""
        print(f"[{self.options.max_seconds - (self.until - time.time()):.0f}] {line}", flush=True)


def _interpolated(times: dict[int, float | None]) -> dict[int, float]:
    """Times for all batch sizes from those of every second one; empty if one is missing."""
    if any(value is None for value in times.values()):
        return {}
    found = {batch: float(value) for batch, value in times.items() if value is not None}
    return {**found, 4: math.sqrt(found[2] * found[8]), 16: math.sqrt(found[8] * found[32])}


def read(file: Path) -> dict[str, Any]:
    """The records of a file by cell; a line that was cut off is none."""
    records = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[record["cell"]] = record
    return records


def check(records: Iterable[dict[str, Any]], options: argparse.Namespace) -> None:
    """Records of another network or of other epochs are not gone on with.

    Raises:
        VarpropError: If there are such.
    """
    names = ("model", "width", "epochs", "images")
    for record in records:
        different = [name for name in names if name in record and record[name] != getattr(options, name)]
        if different and record["kind"] != COST:
            said = ", ".join(f"{name} {record[name]}" for name in different)
            raise vp.VarpropError(f"{options.records} has records with {said}: give the same, or another file.")


# ---------------------------------------------------------------------------------------------------- each alone


def cost(options: argparse.Namespace) -> None:
    """Record ms a step and MiB of one network at a time, clipped, as a CUDA graph."""
    records = read(options.records)
    for method in METHODS:
        norm = norm_of(method, records) or METHODS[method][0]
        for batch in BATCHES:
            cell = GridCell(COST, norm, batch, (Member(1e-4, clip_of(batch), 0),))
            if cell.key not in records:
                command = [sys.executable, "-m", "varprop_lab.deep.small_batches", "alone", str(options.records)]
                command += ["--norm", norm, "--batch", str(batch), "--device", options.device]
                command += ["--model", options.model, "--width", str(options.width)]
                done = subprocess.run(command, capture_output=True, text=True)
                last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]
                print(f"{cell.key}: {last}", flush=True)
                if done.returncode == 0:
                    with options.records.open("a") as file:
                        file.write(last + "\n")


def alone(options: argparse.Namespace) -> None:
    """Print the record of one network's cost."""
    options.images, options.data = 1024, None
    worker = Worker(options)
    cell = GridCell(COST, options.norm, options.batch, (Member(1e-4, clip_of(options.batch), 0),))
    trainer = worker._trainer(cell, worker._data(options.held_out))
    milliseconds = min(trainer.milliseconds(0.5) for _ in range(2))
    memory = torch.cuda.max_memory_allocated() / 2**20 if options.device == "cuda" else 0.0
    print(json.dumps({**worker._about(cell), "ms": round(milliseconds, 3), "MiB": round(memory)}))


# ---------------------------------------------------------------------------------------------------- what is shown


def shown(records: dict[str, Any]) -> str:
    """The table: accuracies on the test images, the settings that were chosen, and what a step costs."""
    lines = []
    for batch in BATCHES:
        for method in METHODS:
            norm = norm_of(method, records)
            search, test, price = (records.get(f"{kind} {norm} {batch}") for kind in (SEARCH, TEST, COST))
            best = best_of(search) if search else None
            if best is None:
                continue
            values = [run["accuracy"] for run in test["runs"] if run["accuracy"] is not None] if test else []
            middle = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else ""
            seeds = f"{len(values)} of {len(test['runs'])}" if test else ""
            multiple = best["rate"] / rate_of(batch, 1.0)
            at_edge = multiple < RATES[0] * 1.01 or multiple > RATES[-1] * 0.99
            rate = f"{best['rate']:g}{' (at the edge)' if at_edge else ''}"
            costs = [f"{price['ms']:.2f}", str(price["MiB"])] if price else ["", ""]
            lines.append([str(batch), f"{method}, {norm}", rate, f"{best['clip'] or 'none'}", middle, seeds, *costs])
    accuracy = "test accuracy, mean (lowest to highest)"
    columns = ["batch", "method", "rate", "clip", accuracy, "seeds", "ms a step", "MiB"]
    return Table("", columns, lines, left=("method",)).markdown()


def figure(records: dict[str, Any]) -> Figure:
    """Test accuracy over the batch size; bands from the lowest to the highest seed."""
    series = []
    colours = {
        "batch norm": ("#0064a8", "#4aa3ff", "o", "solid"),
        "batch renorm": ("#009e73", "#2bd4a4", "^", "dashed"),
        "group norm": ("#603000", "#cc183c", "X", "dashdot"),
        "group norm + WS": ("#d16aa8", "#cc66aa", "P", "dotted"),
        "analytic": ("#d55e00", "#ff8c42", "D", "solid"),
    }
    for rank, method in enumerate(METHODS):
        norm, points = norm_of(method, records), []
        for batch in BATCHES:
            runs = records.get(f"{TEST} {norm} {batch}", {"runs": []})["runs"]
            values = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
            if values:
                points.append((float(batch), statistics.mean(values), min(values), max(values)))
        if points:
            x, y, low, high = zip(*points, strict=True)
            colour, dark, marker, dash = colours[method]
            style = method, colour, dark, dash, marker
            series.append(PlottedSeries(*style, x, y, low, high, seeds=len(SEEDS), rank=rank))
    caption = (
        "Every method at its best rate and clipping on held-out images; bands from the lowest to the highest seed."
    )
    labels = "batch size", "test accuracy (%)"
    return Figure("small-batches", "CIFAR-10 by batch size", caption, (Panel("", tuple(series)),), *labels, True, False)


def show(options: argparse.Namespace) -> None:
    """Print the table, and draw the figure if there is anything to draw and matplotlib is installed."""
    records = read(options.records)
    print(shown(records))
    drawn = figure(records)
    if drawn.panels[0].series and importlib.util.find_spec("matplotlib"):
        draw(drawn, options.records.with_suffix(""))


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "probe", "cost", "show", "serve", "alone"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--width", type=int, default=32, help="of the first stage")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=0, help="train on the first so many only")
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10; without it, noise")
    parser.add_argument("--state", type=Path, help="where stopped cells are saved")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--norm", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--crash", help=argparse.SUPPRESS)  # a cell that ends its process, for tests
    options = parser.parse_args(arguments)
    options.records.parent.mkdir(parents=True, exist_ok=True)
    if options.state:
        options.state.mkdir(parents=True, exist_ok=True)
    if options.action == "run":
        Grid(options).run()
    elif options.action == "probe":
        Grid(options).probe()
    else:
        {"cost": cost, "show": show, "serve": serve, "alone": alone}[options.action](options)


if __name__ == "__main__":
    main()
