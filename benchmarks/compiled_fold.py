"""What compiling the fold alone would buy small networks on a CPU: processor time of a step, side by side.

python -m benchmarks.compiled_fold [--width 64] [--json docs/results/compiled_fold.json]

Networks of two hidden layers, batches of 64, forward and backward pass without an optimizer: the plain network, the
normalized one, both compiled as a whole; and the fold of the normalized one by the reference (`norm/fold/reference.py`)
with its backward pass, as it is and compiled. What the fold costs today is the difference of the first two. All are
measured in turn in one process, and the least time of all rounds counts.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varprop as vp
from varprop.norm.fold.reference import fold_parts
from varprop.norm.layers import normalized_layers
from varprop_lab.environment import provenance

ROUNDS, CALLS, BATCH, INPUTS = 12, 25, 64, 8
ACTIVATIONS: dict[str, type[nn.Module]] = {"ReLU": nn.ReLU, "tanh": nn.Tanh}


def network(activation: type[nn.Module], width: int) -> nn.Module:
    """A small policy."""
    torch.manual_seed(0)
    hidden = [nn.Linear(INPUTS, width), activation(), nn.Linear(width, width), activation()]
    return nn.Sequential(*hidden, nn.Linear(width, 2))


def step(model: Any, x: torch.Tensor) -> Callable[[], Any]:
    """A forward and a backward pass."""
    return lambda: model(x).square().mean().backward()


def by_reference(model: nn.Module, compiled: bool) -> Callable[[], Any]:
    """The fold of a normalized model alone, with its backward pass."""
    joined, _ = next(iter(normalized_layers(model).values())).networks[True]
    parameters, external = joined.parameters(), joined.external_moments()

    def parts(parameters: Any) -> Any:
        return fold_parts(joined.layout, external, parameters)

    fold = torch.compile(parts, fullgraph=True) if compiled else parts

    def call() -> None:
        folded = fold(parameters)
        torch.autograd.backward(folded, [torch.ones_like(tensor) for tensor in folded])

    return call


def measured(activation: type[nn.Module], width: int) -> dict[str, float]:
    """Microseconds of processor time a call, and the seconds that compiling the fold takes."""
    plain, x = network(activation, width), torch.randn(BATCH, INPUTS)
    model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, INPUTS))
    calls = {
        "plain": step(plain, x),
        "normalized": step(model, x),
        "plain, compiled": step(torch.compile(copy.deepcopy(plain)), x),
        "normalized, compiled": step(torch.compile(copy.deepcopy(model)), x),
        "fold by the reference": by_reference(model, False),
        "fold by the reference, compiled": by_reference(model, True),
    }
    first = {}
    for name, call in calls.items():
        start = time.process_time()
        call()
        first[name] = time.process_time() - start
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.process_time()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.process_time() - start) / CALLS)
    compiling = {"seconds to compile the fold": round(first["fold by the reference, compiled"], 1)}
    return {name: round(1e6 * seconds) for name, seconds in least.items()} | compiling


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # that the fold is slow is what is measured
    torch.set_num_threads(1)
    results = {name: measured(activation, options.width) for name, activation in ACTIVATIONS.items()}
    print(json.dumps(results, indent=1))
    if options.json is not None:
        command = f"python -m benchmarks.compiled_fold {' '.join(sys.argv[1:])}".strip()
        record = {
            **provenance(torch.device("cpu")),
            "command": command,
            "width": options.width,
            "microseconds": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
