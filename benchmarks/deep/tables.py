"""Normalizations in ResNets, a GPT and a ViT: tables of runs of the examples, each in a process of its own.

    python -m benchmarks.deep.tables [--only resnet18,gpt] [--data DIR] [--jobs 4] [--compile] --out docs/results

Every rate is tried on held-out data, then every method with its best rate on the test data. Runs that the file has
already are not made again, so that a table can be made in several sittings.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

import varprop as vp
from varprop.text_table import Table
from varprop_lab.environment import git_state, versions, write_atomically
from varprop_lab.figures import Figure, Panel, PlottedSeries, draw, line_style, over_seeds

Tried = dict[str, tuple[list[str], tuple[float, ...]]]  # options and rates of every method
CIFAR, FINETUNE, VIT, GPT = "train_cifar.py", "finetune_cifar.py", "train_vit.py", "train_gpt.py"
METHODS = {
    "batch norm": ["--norm", "batch"],
    "batch norm, clipped": ["--norm", "batch", "--clip", "2"],
    "analytic, deep form": ["--norm", "analytic"],
    "analytic, paper's form": ["--norm", "analytic", "--form", "paper"],
    "group norm": ["--norm", "group"],
    "layer norm": ["--norm", "layer"],
    "weight norm": ["--norm", "weight"],
    "none": ["--norm", "none"],
}
RATES = {"weight norm": (0.2, 0.05, 0.1), "none": (0.05, 0.02, 0.1)}  # peaks that are tried
USUAL_RATES = (0.2, 0.1, 0.4)
TWO = ("batch norm", "analytic, deep form")
SIZES = (2, 4, 8, 32, 256)
SHORT = ["--epochs", "5"]  # batches of 2 take a hundred times as many steps
CLIPPED, UNSCALED = "analytic, deep form, clip scaled", ["--clip", "2"]
START = ["--norm", "batch", "--classes", "0", "4"]  # of fine-tuning, by the first example

FINETUNING: Tried = {
    "batch norm": (["--how", "live"], (0.006, 0.002, 0.02)),
    "frozen batch norm": (["--how", "frozen"], (0.006, 0.002, 0.02)),
    "analytic, preserved": (["--how", "analytic"], (0.006, 0.002, 0.02)),
}
FAST = ["--scale-rate", "10"]  # scales and shifts learn ten times as fast as weights
ALPHAS = ("0.25", "0.5", "1", "2")  # first values that are tried
PATCHES, LARGE = "torch's patches", ["--patches", "torch"]
TRANSFORMERS: Tried = {
    "layer norm": (["--norm", "layer"], (1e-3, 3e-3, 6e-3)),
    "layer norm, QK norm": (["--norm", "layer", "--qk-norm"], (1e-3, 2e-3, 3e-3)),
    "RMS norm": (["--norm", "rms"], (1e-3, 3e-3)),
    "DyT": (["--norm", "dyt"], (1e-3, 3e-3)),
    "none": (["--norm", "none"], (1e-3, 3e-4)),
    "analytic, fast scales, QK norm": (["--norm", "analytic", *FAST, "--qk-norm"], (2e-3, 1e-3, 3e-3)),
    "analytic": (["--norm", "analytic"], (1e-3, 2e-3)),
    "layer norm, fast scales": (["--norm", "layer", *FAST], (1e-3, 2e-3, 3e-3)),
    "layer norm, fast scales, QK norm": (["--norm", "layer", *FAST, "--qk-norm"], (1e-3, 2e-3, 3e-3)),
    **{f"DyT, alpha {a}": (["--norm", "dyt", "--alpha", a], (1e-3, 3e-3, 6e-3)) for a in ALPHAS if a != "1"},
    "Derf": (["--norm", "derf"], (1e-3, 3e-3, 6e-3)),
}
VISION: Tried = {
    "layer norm": (["--norm", "layer"], (1e-3, 2e-3, 5e-4)),
    "RMS norm": (["--norm", "rms"], (1e-3, 2e-3, 5e-4, 2.5e-4)),
    "DyT": (["--norm", "dyt"], (1e-3, 2e-3, 5e-4)),
    "none": (["--norm", "none"], (1e-3, 2e-3, 5e-4)),
    "analytic": (["--norm", "analytic"], (1e-3, 2e-3, 5e-4, 2.5e-4)),
    "analytic, fast scales": (["--norm", "analytic", *FAST], (1e-3, 2e-3, 5e-4)),
    "layer norm, QK norm": (["--norm", "layer", "--qk-norm"], (1e-3, 2e-3, 5e-4)),
    "analytic, fast scales, QK norm": (["--norm", "analytic", *FAST, "--qk-norm"], (1e-3, 2e-3, 5e-4, 2.5e-4)),
    "layer norm, fast scales": (["--norm", "layer", *FAST], (1e-3, 2e-3, 5e-4)),
    "layer norm, fast scales, QK norm": (["--norm", "layer", *FAST, "--qk-norm"], (1e-3, 2e-3, 5e-4)),
    **{f"DyT, alpha {a}, {PATCHES}": (["--norm", "dyt", "--alpha", a, *LARGE], (1e-3, 2e-3, 5e-4)) for a in ALPHAS},
    f"Derf, {PATCHES}": (["--norm", "derf", *LARGE], (1e-3, 2e-3, 5e-4)),
    f"none, {PATCHES}": (["--norm", "none", *LARGE], (1e-3, 2e-3, 5e-4)),
    f"layer norm, {PATCHES}": (["--norm", "layer", *LARGE], (1e-3, 2e-3, 5e-4)),
    f"analytic, fast scales, QK norm, {PATCHES}": (
        ["--norm", "analytic", *FAST, "--qk-norm", *LARGE],
        (1e-3, 2e-3, 5e-4),
    ),
}
CANDIDATES: Tried = {  # what may bring the analytic normalization closer to layer norm
    "fast scales": (FAST, (1e-3, 2e-3)),
    "large weights, fast scales": (["--weights", "0.06", *FAST], (2e-3, 1e-3)),
    "fast scales, QK norm": ([*FAST, "--qk-norm"], (2e-3, 1e-3)),
    "fast scales, tanh before branches": ([*FAST, "--squash", "--residual", "0.29"], (1e-3, 2e-3)),
    "QK norm": (["--qk-norm"], (1e-3, 2e-3)),
    "branches from 0.29": (["--residual", "0.29"], (1e-3, 2e-3)),
    "paper's form": (["--form", "paper"], (1e-3, 2e-3)),
}


class Row(NamedTuple):
    """A method at one of the rates that are tried for it, and the example with its options that trains it."""

    name: str
    rate: float
    script: str
    options: list[str]

    @property
    def judged_by(self) -> str:
        """The number by which runs of the example are judged."""
        return "loss" if self.script == GPT else "accuracy"


def _rows(script: str, methods: Tried, *options: str) -> list[Row]:
    return [Row(name, rate, script, [*options, *own]) for name, (own, rates) in methods.items() for rate in rates]


def _resnets(model: str, *rates: float) -> list[Row]:
    methods = {name: (own, rates or RATES.get(name, USUAL_RATES)) for name, own in METHODS.items()}
    return _rows(CIFAR, methods, "--model", model)


def _two(*options: str, rates: tuple[float, ...]) -> list[Row]:
    return _rows(CIFAR, {name: (METHODS[name], rates) for name in TWO}, *options)


def _of_batches(size: int, *methods: str) -> list[Row]:
    """The rate grows with the batch; the bound of the gradient is the same for all, or falls with the batch's root."""
    deep = METHODS["analytic, deep form"]
    own = METHODS | {"analytic, deep form": [*deep, *UNSCALED], CLIPPED: deep}
    tried: Tried = {f"{name}, batch {size}": (own[name], (0.2 * size / 256,)) for name in methods}
    return _rows(CIFAR, tried, "--batch", str(size), *SHORT)


_COMPARED: Tried = {name: (TRANSFORMERS[name][0], TRANSFORMERS[name][1][:1]) for name in ("layer norm", "DyT")}
_CANDIDATES: Tried = {
    f"analytic, {name}": (["--norm", "analytic", *own], rates) for name, (own, rates) in CANDIDATES.items()
}
TABLES: dict[str, list[Row]] = {
    "resnet18": _resnets("resnet18"),
    "resnet34": _resnets("resnet34", 0.2, 0.1, 0.05),
    "resnet102": _two("--model", "resnet102", "--width", "32", rates=(0.1,)),
    "plain50": _two("--model", "plain50", "--width", "32", rates=(0.1, 0.05, 0.02, 0.01, 0.2)),
    "batches": [row for size in SIZES for row in _of_batches(size, *TWO, *[CLIPPED] * (size != 256))],
    "clip": _of_batches(8, "analytic, deep form", CLIPPED),
    "long": _two("--epochs", "60", rates=(0.2,)),
    "finetuning": _rows(FINETUNE, FINETUNING, "--batch", "8", "--epochs", "3", "--clip", "2"),
    "vit": _rows(VIT, VISION),
    "gpt": _rows(GPT, TRANSFORMERS),
    "gpt-candidates": _rows(GPT, {**_COMPARED, "analytic": TRANSFORMERS["analytic"], **_CANDIDATES}, "--steps", "1000"),
}
ONLY_HELD_OUT = ("gpt-candidates", "clip")  # to choose from: nothing for the test data


HELD_OUT, TEST = "held out", "test"
EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass
class Study:
    """The runs of one table in a file, and how more of them are made."""

    table: str  # its name
    file: Path  # where all runs are kept, of other tables too
    seeds: int = 4  # of the runs on the test data; rates are tried with one
    jobs: int = 1  # runs at the same time
    deadline: float = float("inf")  # by `time.monotonic`; no run begins after it
    data: Path | None = None  # folder of CIFAR-10, if it is not where varprop looks for data
    compiled: bool = False  # whether networks are compiled
    say: Callable[[str], None] = print
    runs: dict[str, Any] = field(init=False)
    rows: list[Row] = field(init=False)  # what is compared

    def __post_init__(self) -> None:
        self.runs = json.loads(self.file.read_text())["runs"] if self.file.exists() else {}
        self.rows = TABLES[self.table]
        self.writing = threading.Lock()

    def make(self) -> None:
        """Try the rates of every method that has several, then look at the test data with the best ones."""
        if any(row.script == FINETUNE for row in self.rows):
            self._make_start()
        only_held_out = self.table in ONLY_HELD_OUT
        self._run_all(HELD_OUT, [(row, 0) for row in self.rows if only_held_out or not self._has_one_rate(row)])
        if not only_held_out:
            self._run_all(TEST, [(row, seed) for seed in range(self.seeds) for row in self.best()])

    def key(self, row: Row, seed: int, judged: str) -> str:
        """Under which a run is kept."""
        return " | ".join([judged, self.table, row.name, f"lr {row.rate:g}", f"seed {seed}"])

    def best(self) -> list[Row]:
        """Every method at its best rate on held-out data, if it has run there; at its only one if it has no other."""
        found: dict[str, tuple[float, Row]] = {}
        for row in self.rows:
            value = 0.0 if self._has_one_rate(row) else self.runs.get(self.key(row, 0, HELD_OUT), {}).get(HELD_OUT)
            if value is not None:
                score = value if row.judged_by == "accuracy" else -value
                found[row.name] = max(found.get(row.name, (score, row)), (score, row), key=lambda pair: pair[0])
        return [row for _, row in found.values()]

    def _has_one_rate(self, row: Row) -> bool:
        return sum(other.name == row.name for other in self.rows) == 1

    def _run_all(self, judged: str, wanted: list[tuple[Row, int]]) -> None:
        def run(job: tuple[Row, int]) -> None:
            key = self.key(*job, judged)
            if key not in self.runs and time.monotonic() < self.deadline:
                self._keep(key, judged, self._trained(*job, judged))

        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(run, wanted))

    def _keep(self, key: str, judged: str, found: dict[str, Any]) -> None:
        """Write a run when it is there; one that failed is told, and made again next time."""
        with self.writing:
            self.say(f"{key}: {found.get(judged, found.get('error', 'diverged'))}")
            if "error" not in found:
                self.runs[key] = found
                write_atomically(self.file, written({**about(), "runs": self.runs}).encode())

    def _trained(self, row: Row, seed: int, judged: str) -> dict[str, Any]:
        """One run of the example; the last line of what it says if it fails."""
        options = ["--seed", str(seed), "--lr", f"{row.rate:g}", *row.options]
        if row.script == FINETUNE:
            options += [str(self._start)]
        if judged == TEST:
            options += ["--test"] if row.script == GPT else ["--held-out", "0"]
        return self._run(row.script, [*options, *self._place(row.script)])

    @property
    def _start(self) -> Path:
        """A network to fine-tune."""
        return self.file.with_name("start.pt")

    def _make_start(self) -> None:
        """Train it, if it is not there."""
        if not self._start.exists():
            found = self._run(CIFAR, [*START, *self._place(CIFAR), "--checkpoint", str(self._start)])
            if "error" in found:
                raise vp.VarpropError(f"The network to fine-tune could not be trained: {found['error']}")

    def _place(self, script: str) -> list[str]:
        """Where the images are, and how to train on this machine."""
        images = ["--data", str(self.data)] if self.data and script != GPT else []
        return images + ["--graph"] * torch.cuda.is_available() + ["--compile"] * self.compiled

    def _run(self, script: str, options: list[str]) -> dict[str, Any]:
        command = [sys.executable, str(EXAMPLES / script), *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def has(self, judged: str) -> bool:
        """True if there is a run of the table on these data."""
        return any(key.startswith(f"{judged} | {self.table} | ") for key in self.runs)

    def found(self, row: Row, judged: str) -> list[dict[str, Any]]:
        """The runs of a row that did not diverge, one for each seed."""
        kept = [self.runs.get(self.key(row, seed, judged), {}) for seed in range(self.seeds)]
        return [one for one in kept if one.get(judged) is not None and math.isfinite(one["history"][-1]["loss"])]

    def shown(self, judged: str) -> str:
        """Mean and range over the seeds, the last training loss and memory."""
        lines = []
        for row in self.rows if judged == HELD_OUT else self.best():
            found = self.found(row, judged)
            if found:
                made = sum(self.key(row, seed, judged) in self.runs for seed in range(self.seeds))
                seeds = f"{len(found)}" if len(found) == made else f"{len(found)} of {made}"  # others diverged
                lines.append([row.name, f"{row.rate:g}", seeds, *_numbers(found, judged)])
        columns = ["method", "rate", "seeds", self.rows[0].judged_by, "lowest", "highest", "training loss", "MiB"]
        return Table("", columns, lines, left=("method",)).markdown()


def _numbers(found: list[dict[str, Any]], judged: str) -> list[str]:
    values = [one[judged] for one in found]
    last = statistics.mean(one["history"][-1]["loss"] for one in found)
    numbers = [f"{value:.4f}" for value in (statistics.mean(values), min(values), max(values), last)]
    return [*numbers, str(found[0]["peak MiB"])]


def written(record: dict[str, Any]) -> str:
    """The runs as JSON with a line for every run."""
    runs = ",\n".join(f"  {json.dumps(key)}: {json.dumps(run)}" for key, run in record["runs"].items())
    return json.dumps({**record, "runs": {}}, indent=1).replace('"runs": {}', f'"runs": {{\n{runs}\n }}') + "\n"


def about() -> dict[str, Any]:
    """Where the newest runs come from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "command": "python -m benchmarks.deep.tables",
        "hardware": device,
        "git": git_state(),
        "versions": versions(),
    }


# --- figure ---

CAPTION = "Mean loss of each epoch, in training mode; bands reach from the lowest to the highest seed."


def draw_losses(studies: Iterable[Study], stem: Path) -> bool:
    """The runs that the test data judged, to ``<stem>.png`` and ``<stem>.svg``; whether there are any."""
    panels = tuple(Panel(study.table, tuple(_lines(study))) for study in studies if study.has(TEST))
    if panels:
        draw(Figure("deep", "Training loss on CIFAR-10", CAPTION, panels, "epochs", "training loss"), stem)
    return bool(panels)


def _lines(study: Study) -> Iterable[PlottedSeries]:
    for row in study.best():
        runs = study.found(row, TEST)
        if runs:
            columns = list(zip(*([epoch["loss"] for epoch in run["history"]] for run in runs), strict=False))
            kind = row.options[row.options.index("--norm") + 1]
            dashed = "--clip" in row.options or "--form" in row.options
            yield PlottedSeries(
                row.name,
                **line_style(kind, evaluation=dashed),
                x=tuple(float(epoch) for epoch in range(1, len(columns) + 1)),
                **over_seeds(columns, statistics.mean),
                seeds=len(runs),
            )


def main() -> None:
    """Make the runs that are missing, print the tables of all, and draw the losses of ResNets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(TABLES), metavar="TABLES")
    parser.add_argument("--data", type=Path, help="Folder of CIFAR-10, if it is not where varprop looks for data.")
    parser.add_argument("--seeds", type=int, default=4, help="Of the runs on the test data; rates are tried with one.")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at the same time.")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="No run begins after this time.")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="Folder of deep.json and the figure.")
    options = parser.parse_args()
    if unknown := set(options.only) - TABLES.keys():
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    file, deadline = options.out / "deep.json", time.monotonic() + options.max_seconds
    for table in options.only:
        study = Study(table, file, options.seeds, options.jobs, deadline, options.data, options.compile)
        study.make()
        for judged in (HELD_OUT, TEST):
            if study.has(judged):
                print(f"\n{table}, {judged}\n{study.shown(judged)}")
    resnets = [Study(table, file, options.seeds) for table in options.only if table.startswith(("resnet", "plain"))]
    if importlib.util.find_spec("matplotlib"):  # a bare machine only makes runs
        draw_losses(resnets, options.out / "deep")


if __name__ == "__main__":
    main()
