"""Normalizations in a byte-level GPT: `examples/train_gpt.py` for every row of a table, some side by side.

python benchmarks/gpt.py TABLE [--out docs/results/gpt.json] [--seeds 1] [--jobs 2] [--max-seconds 500] [--test]
                         [-- further options of the example, such as --steps 100]

Runs that the file has already are not made again, so that a table can be made in several sittings; rows stand in the
order of their promise. Without `--test` the numbers are losses on held-out files, for choosing; with it, on others,
for the record. A run that diverged is kept with loss null.
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

RATES = ("1e-3", "2e-3")
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
LARGE = ["--weights", "0.06"]  # three times the usual: a step turns rows a third as far, as at a third of the rate
FAST = ["--scale-rate", "10"]
CANDIDATES = {  # what may bring the analytic normalization closer to layer norm: options, and rates if not the usual
    "fast scales": (FAST, RATES),
    "large weights, fast scales": ([*LARGE, *FAST], RATES),
    "large weights": (LARGE, ("3e-3", "1e-3", "6e-3")),
    "fast scales, QK norm": ([*FAST, "--qk-norm"], RATES),
    "fast scales, tanh before branches": ([*FAST, "--squash", "--residual", "0.29"], RATES),
    "QK norm": (["--qk-norm"], RATES),
    "tanh before branches": (["--squash"], RATES),
    "fast scales, QK norm, tanh": ([*FAST, "--qk-norm", "--squash", "--residual", "0.29"], RATES),
    "first logits 0.3": (["--logits", "0.3"], RATES),
    "branches from 0.29": (["--residual", "0.29"], RATES),
    "fast scales, branches from 0.29": ([*FAST, "--residual", "0.29"], RATES),
    "clip 0.3": (["--clip", "0.3"], RATES),
    "decay 0.5": (["--decay", "0.5"], RATES),
    "paper's form": (["--form", "paper"], RATES),
}


def table_rows(table: str) -> Iterator[tuple[str, list[str]]]:
    """The rows of a table: a name, and the options of the example that make it."""
    if table == "norms":
        yield from _at_rates("layer norm", ["--norm", "layer"], "1e-3", "3e-3", "6e-3")
        yield from _at_rates("RMS norm", ["--norm", "rms"], "3e-3")
        yield from _at_rates("DyT", ["--norm", "dyt"], "1e-3", "3e-3")
        yield from _at_rates("none", ["--norm", "none"], "1e-3", "3e-4")
        yield from _at_rates("analytic", ["--norm", "analytic"], "1e-3", "2e-3", "3e-3")
    else:
        for name, (options, rates) in CANDIDATES.items():
            yield from _at_rates(f"analytic, {name}", ["--norm", "analytic", *options], *rates)


def _at_rates(name: str, options: list[str], *rates: str) -> Iterator[tuple[str, list[str]]]:
    for rate in rates:
        yield f"{name}, lr {rate}", [*options, "--lr", rate]


def key_of(name: str, seed: int, arguments: argparse.Namespace) -> str:
    """Under which a run is kept."""
    return " | ".join([judged(arguments), name, f"seed {seed}", *arguments.further])


def judged(arguments: argparse.Namespace) -> str:
    """What the loss is called in a result."""
    return "test" if arguments.test else "validation"


def trained(options: list[str], seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of the example in a process of its own; what it says if it fails."""
    command = [sys.executable, str(EXAMPLE), "--seed", str(seed), *options, *arguments.further]
    done = subprocess.run(command + ["--test"] * arguments.test, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"status {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """All runs of the table that are missing, as far as the time goes; every one is written when it is there."""
    kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"runs": {}}
    deadline = time.monotonic() + arguments.max_seconds
    rows = [row for row in table_rows(arguments.table) if not arguments.rows or row[0] in arguments.rows]
    wanted = [(name, options, seed) for seed in range(arguments.seeds) for name, options in rows]

    def run(job: tuple[str, list[str], int]) -> None:
        name, options, seed = job
        key = key_of(name, seed, arguments)
        if key in kept["runs"] or time.monotonic() > deadline:
            return
        kept["runs"][key] = trained(options, seed, arguments)
        arguments.out.write_text(json.dumps({**about(), **kept}, indent=1) + "\n")
        shown = {n: v for n, v in kept["runs"][key].items() if n in (judged(arguments), "seconds", "error")}
        print(key, shown, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(run, wanted))
    runs: dict[str, Any] = kept["runs"]
    return runs


def about() -> dict[str, Any]:
    """Where the numbers come from."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {"varprop": vp.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"command": "python benchmarks/gpt.py TABLE", "hardware": device, "versions": versions}


def shown(runs: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Mean and range over the seeds, the last training loss, and milliseconds a step."""
    rows = []
    for name, _ in table_rows(arguments.table):
        found = [runs.get(key_of(name, seed, arguments), {}) for seed in range(arguments.seeds)]
        ended = [one for one in found if one.get(judged(arguments)) is not None]
        diverged = sum(one.get(judged(arguments), 0.0) is None for one in found)
        if ended or diverged:
            rows.append([name, str(len(ended)), str(diverged), *_numbers(ended, judged(arguments))])
    columns = ["normalization", "seeds", "diverged", "loss", "lowest", "highest", "training loss", "ms/step"]
    return Table("", columns, rows, left=("normalization",)).markdown()


def _numbers(ended: list[dict[str, Any]], what: str) -> list[str]:
    if not ended:
        return [""] * 5
    losses = [one[what] for one in ended]
    last = statistics.mean(one["history"][-1]["loss"] for one in ended)
    seconds = statistics.median(one["seconds"] for one in ended)
    numbers = (statistics.mean(losses), min(losses), max(losses), last)
    return [*(f"{value:.4f}" for value in numbers), f"{1000 * seconds:.1f}"]


def main() -> None:
    """Make a table and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["norms", "candidates"])
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpt.json"))
    parser.add_argument("--rows", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="begin no run after that")
    parser.add_argument("--test", action="store_true")
    arguments, further = parser.parse_known_args()
    arguments.further = [one for one in further if one != "--"]
    print(shown(make(arguments), arguments))


if __name__ == "__main__":
    main()
