"""Time and memory of a training step on CIFAR-10 by normalization, compiled, each measured alone.

python -m benchmarks.cost_of_steps [--models resnet18 resnet34] [--json FILE] [options of examples/train_cifar.py]

Every normalization has a process of its own. All of them compile and warm up at the same time; then each is measured
while the others wait.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from train_cifar import Run, parser

from varprop.text_table import Table

from .deep.tables import METHODS, about

SHORT = ["--images", "12800", "--lr", "0.001"]  # 50 steps of 256
READY = "ready"
REPEATS = 4
LEFT = ("network", "normalization")


def measure_when_told(options: argparse.Namespace) -> dict[str, Any]:
    """Warm up, wait for a line, and take the fastest epoch's time of a step in milliseconds."""
    run = Run(options)
    run.epoch(0)
    print(READY, flush=True)
    sys.stdin.readline()
    steps = []
    for number in range(REPEATS):
        start = time.perf_counter()
        run.epoch(number)  # reads the loss at its end, so it waits for the device
        steps.append(1000 * (time.perf_counter() - start) / run.steps)
    return {"parameters": count_of(run.model), "ms": round(min(steps), 3), "MiB": run.cost()["peak MiB"]}


def count_of(model: torch.nn.Module) -> int:
    """Numbers that are trained."""
    return sum(parameter.numel() for parameter in model.parameters())


def started(model: str, options: list[str], further: list[str]) -> subprocess.Popen[str]:
    """A process that warms up and waits."""
    graph = ["--compile", "--graph"] if torch.cuda.is_available() else []
    worker = [sys.executable, "-m", "benchmarks.cost_of_steps", "--one"]
    command = [*worker, "--model", model, *SHORT, *graph, *options, *further]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen[str]) -> None:
    """Until it says that it is ready.

    Raises:
        RuntimeError: If it ends instead; its own message is above.
    """
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == READY:
            return
    raise RuntimeError("A process ended before it was ready.")


def compared(models: list[str], methods: list[str], further: list[str]) -> dict[str, dict[str, Any]]:
    """Every model with every normalization, and its step as a multiple of batch norm's."""
    found: dict[str, dict[str, Any]] = {}
    for model in models:
        processes = {method: started(model, METHODS[method], further) for method in methods}
        for process in processes.values():
            wait_for(process)
        found[model] = {}
        for method, process in processes.items():
            answer, _ = process.communicate("go\n")
            found[model][method] = json.loads(answer.splitlines()[-1])
        for values in found[model].values():
            values["of batch norm"] = round(values["ms"] / found[model]["batch norm"]["ms"], 3)
    return found


def shown(results: dict[str, dict[str, Any]]) -> str:
    """A row for every model and normalization."""
    rows = [
        [model, method, f"{cost['ms']:.2f}", f"{cost['of batch norm']:.2f}", str(cost["MiB"])]
        for model, methods in results.items()
        for method, cost in methods.items()
    ]
    return Table("", ["network", "normalization", "ms a step", "of batch norm", "MiB"], rows, left=LEFT).markdown()


def main() -> None:
    """Measure all, write and print."""
    options = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --model is the example's, not short for --models
    )
    options.add_argument("--models", nargs="+", default=["resnet18", "resnet34"])
    options.add_argument("--methods", nargs="+", default=list(METHODS))
    options.add_argument("--json", type=Path)
    options.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    chosen, further = options.parse_known_args()
    if chosen.one:
        print(json.dumps(measure_when_told(parser().parse_args(further))))
        return
    results = compared(chosen.models, chosen.methods, further)
    if chosen.json:
        command = {"command": "python -m benchmarks.cost_of_steps"}
        chosen.json.write_text(json.dumps({**about(), **command, "steps": results}, indent=1) + "\n")
    print(shown(results))


if __name__ == "__main__":
    main()
