"""Normalizations in deep networks on CIFAR-10: `examples/train_cifar.py` for every row of a table, seeds side by side.

python benchmarks/deep.py TABLE [--data DIR] [--out docs/results/deep.json] [--seeds 4] [--jobs 4] [--max-seconds 500]
                          [--test] [-- further options of the example, such as --epochs 1 --images 1000]

Without `--test` every rate is tried, and judged on held-out training images. With it every method trains on all images
with the rate that was best on the held-out ones, and is judged on the test images. Runs that the file has already are
not made again, so that a table can be made in several sittings.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import varprop as vp
from varprop.text_table import Table

EXAMPLES = Path(__file__).parents[1] / "examples"
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
SMALL_DATA = ["--images", "10000", "--epochs", "10"]  # batches of 2 take a hundred times as many steps


class Row(NamedTuple):
    """What makes a row of a table, at one of the rates that are tried for it."""

    name: str
    rate: float
    options: list[str]


def rows_of(table: str) -> Iterator[Row]:
    """All rows of a table at all their rates."""
    if table in ("resnet18", "resnet34"):
        for method, options in METHODS.items():
            for rate in RATES.get(method, USUAL_RATES):
                yield Row(method, rate, ["--model", table, *options])
    elif table in ("resnet102", "plain50"):
        for method in TWO:
            for rate in (0.2, 0.1, 0.05):
                yield Row(method, rate, ["--model", table, "--width", "32", *METHODS[method]])
    elif table == "batches":
        for size in SIZES:
            for method in (*TWO, "group norm"):
                options = ["--batch", str(size), *SMALL_DATA, *METHODS[method]]
                yield Row(f"{method}, batch {size}", 0.2 * size / 256, options)
    elif table == "cost":
        for model in ("resnet18", "resnet34"):
            for method, options in METHODS.items():
                short = ["--model", model, "--epochs", "3", "--images", "12800", "--compile"]
                yield Row(f"{model}, {method}", 1e-3, [*short, *options])
    elif table == "long":
        for method in TWO:
            yield Row(method, 0.2, ["--epochs", "60", *METHODS[method]])


TABLES = ("resnet18", "resnet34", "resnet102", "plain50", "batches", "cost", "long")


def key_of(row: Row, seed: int, arguments: argparse.Namespace, judged: str = "") -> str:
    """Under which a run is kept."""
    judged = judged or ("test" if arguments.test else "held out")
    return " | ".join([judged, arguments.table, row.name, f"lr {row.rate:g}", f"seed {seed}", *arguments.further])


def wanted_rows(runs: dict[str, Any], arguments: argparse.Namespace) -> list[Row]:
    """All rows, and for the test images those with the best rate on the held-out ones."""
    rows = [
        row
        for row in rows_of(arguments.table)
        if (not arguments.rows or row.name in arguments.rows) and (not arguments.rates or row.rate in arguments.rates)
    ]
    if not arguments.test:
        return rows
    best: dict[str, tuple[float, Row]] = {}
    for row in rows:
        seeds = range(arguments.seeds)
        found = [runs.get(key_of(row, seed, arguments, "held out"), {}).get("held out", 0.0) for seed in seeds]
        best[row.name] = max(best.get(row.name, (-1.0, row)), (max(found), row), key=lambda pair: pair[0])
    return [row for _, row in best.values()]


def trained(row: Row, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the example in a process of its own; what it says if it fails."""
    command = [sys.executable, str(EXAMPLES / "train_cifar.py"), "--seed", str(seed), "--lr", f"{row.rate:g}"]
    command += [*row.options, *arguments.further, *(["--data", str(arguments.data)] if arguments.data else [])]
    command += ["--held-out", "0"] if arguments.test else []
    command += ["--graph"] if torch.cuda.is_available() else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of the table that are missing, as far as the time goes; every one is written when it is there."""
    kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": {}}
    deadline = time.monotonic() + arguments.max_seconds
    rows = wanted_rows(kept["runs"], arguments)
    writing = threading.Lock()

    def run(job: tuple[Row, int]) -> None:
        key = key_of(*job, arguments)
        if key in kept["runs"] or time.monotonic() > deadline:
            return
        found = trained(*job, arguments)
        with writing:
            if "error" not in found:
                kept["runs"][key] = found
                arguments.out.write_text(json.dumps({**kept, **about()}, indent=1) + "\n")
        print(key, {n: v for n, v in found.items() if n in ("held out", "test", "error")}, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, [(row, seed) for seed in range(arguments.seeds) for row in rows]))
    runs: dict[str, Any] = kept["runs"]
    return runs


def about() -> dict[str, Any]:
    """Where the numbers come from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {"varprop": vp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"command": "python benchmarks/deep.py TABLE", "hardware": device, "versions": versions}


def shown(runs: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Mean and range over the seeds, the last training loss and memory; milliseconds a step of runs made alone."""
    what, alone = "test" if arguments.test else "held out", arguments.table == "cost"
    lines = []
    for row in wanted_rows(runs, arguments):
        found = [runs.get(key_of(row, seed, arguments), {}) for seed in range(arguments.seeds)]
        found = [one for one in found if what in one]
        if found:
            accuracies = [one[what] for one in found]
            last = statistics.mean(one["history"][-1]["loss"] for one in found)
            step = min(epoch["seconds"] / one["steps an epoch"] for one in found for epoch in one["history"])
            numbers = (statistics.mean(accuracies), min(accuracies), max(accuracies), last)
            values = [*(f"{value:.4f}" for value in numbers), str(found[0]["peak MiB"])]
            lines.append([row.name, f"{row.rate:g}", str(len(found)), *values, *[f"{1000 * step:.2f}"] * alone])
    columns = ["normalization", "rate", "seeds", "accuracy", "lowest", "highest", "training loss", "MiB"]
    return Table("", columns + ["ms a step"] * alone, lines, left=("normalization",)).markdown()


def main() -> None:
    """Make a table and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/deep.json"))
    parser.add_argument("--rows", nargs="+", help="only these methods")
    parser.add_argument("--rates", nargs="+", type=float, help="only these")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--test", action="store_true")
    arguments, further = parser.parse_known_args()
    arguments.further = [one for one in further if one != "--"]
    arguments.jobs = 1 if arguments.table == "cost" else arguments.jobs
    print(shown(make(arguments), arguments))


if __name__ == "__main__":
    main()
