"""Normalizations in deep networks on CIFAR-10: `examples/train_cifar.py` for every row of a table, seeds side by side.

python benchmarks/deep.py TABLE [--data DIR] [--out docs/results/deep.json] [--seeds 4] [--jobs 4] [--max-seconds 500]
                          [--test] [-- further options of the example, such as --epochs 1 --images 1000]

Runs that the file has already are not made again, so that a table can be made in several sittings. Without `--test` the
numbers are accuracies on held-out training images, for choosing; with it, on the test images, for the record.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import varprop as vp
from varprop.text_table import Table

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_cifar.py"
METHODS = {  # what is compared everywhere
    "batch norm": ["--norm", "batch"],
    "analytic, deep form": ["--norm", "analytic"],
    "analytic, paper's form": ["--norm", "analytic", "--form", "paper"],
    "group norm": ["--norm", "group"],
    "none": ["--norm", "none", "--clip", "2"],
}


def rates(method: str) -> list[float]:
    """The peaks that are tried for a method."""
    return [0.2, 0.1, 0.4] if method != "none" else [0.05, 0.02, 0.1]


def table_rows(table: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of a table: a name, and the options of the example that make it."""
    if table in ("resnet18", "resnet34"):
        for method, options in METHODS.items():
            for rate in rates(method):
                yield f"{method}, lr {rate}", ["--model", table, "--lr", str(rate), *options]
    elif table == "batches":
        for method in ("batch norm", "analytic, deep form", "group norm"):
            for batch in (2, 4, 8, 32, 256):
                rate = 0.2 * batch / 256
                yield f"{method}, batch {batch}", ["--batch", str(batch), "--lr", f"{rate:g}", *METHODS[method]]
    elif table == "long":
        for method in ("batch norm", "analytic, deep form"):
            yield f"{method}, 60 epochs", ["--epochs", "60", *METHODS[method]]


TABLES = ("resnet18", "resnet34", "batches", "long")


def key_of(name: str, seed: int, arguments: argparse.Namespace) -> str:
    """Under which a run is kept."""
    judged = "test" if arguments.test else "held out"
    return " | ".join([judged, arguments.table, name, f"seed {seed}", *arguments.further])


def trained(options: list[str], seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the example in a process of its own; what it says if it fails."""
    command = [sys.executable, str(EXAMPLE), "--seed", str(seed), *options, *arguments.further]
    command += ["--data", str(arguments.data)] if arguments.data else []
    command += ["--held-out", "0"] if arguments.test else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of the table that are missing, as far as the time goes; every one is written when it is there."""
    kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": {}}
    deadline = time.monotonic() + arguments.max_seconds
    wanted = [(name, options, seed) for seed in range(arguments.seeds) for name, options in table_rows(arguments.table)]

    def run(job: tuple[str, list[str], int]) -> None:
        name, options, seed = job
        key = key_of(name, seed, arguments)
        if key in kept["runs"] or time.monotonic() > deadline:
            return
        kept["runs"][key] = trained(options, seed, arguments)
        arguments.out.write_text(json.dumps({**about(), **kept}, indent=1) + "\n")
        print(key, {n: v for n, v in kept["runs"][key].items() if n in ("held out", "test", "error")}, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, wanted))
    runs: dict[str, Any] = kept["runs"]
    return runs


def about() -> dict[str, Any]:
    """Where the numbers come from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {"varprop": vp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"command": "python benchmarks/deep.py TABLE", "hardware": device, "versions": versions}


def shown(runs: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Mean and range over the seeds, the last training loss, and seconds an epoch."""
    what = "test" if arguments.test else "held out"
    rows = []
    for name, _ in table_rows(arguments.table):
        found = [runs.get(key_of(name, seed, arguments), {}) for seed in range(arguments.seeds)]
        found = [one for one in found if what in one]
        if found:
            accuracies = [one[what] for one in found]
            last = statistics.mean(one["history"][-1]["loss"] for one in found)
            seconds = statistics.median(epoch["seconds"] for one in found for epoch in one["history"])
            numbers = (statistics.mean(accuracies), min(accuracies), max(accuracies), last)
            rows.append([name, str(len(found)), *(f"{value:.4f}" for value in numbers), f"{seconds:.1f}"])
    columns = ["normalization", "seeds", "accuracy", "lowest", "highest", "training loss", "s/epoch"]
    return Table("", columns, rows, left=("normalization",)).markdown()


def main() -> None:
    """Make a table and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/results/deep.json"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=4, help="runs at the same time")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--test", action="store_true")
    arguments, further = parser.parse_known_args()
    arguments.further = [one for one in further if one != "--"]
    print(shown(make(arguments), arguments))


if __name__ == "__main__":
    main()
