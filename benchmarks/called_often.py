"""A training step of normalized networks whose layers are called many times or read curves, by the plain step.

python -m benchmarks.called_often [--rounds 5] [--only NAME ...] [--json PATH] [--profile "KAN of 3 layers"]

Processor time of one thread, forward and backward with a sum of squares as the loss, without the optimizer, plain and
normalized in turns; the fastest of each counts. With how many layers are folded together and how many by operation.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table

BATCH = 64


class Kan(nn.Module):
    """Layers of splines: every input goes through bumps and SiLU before it is weighted, as in efficient-kan."""

    def __init__(self, sizes: tuple[int, ...] = (16, 32, 32, 4), grid: int = 5) -> None:
        super().__init__()
        self.step, self.grid = 4 / (grid + 2), [-2 + 4 * knot / (grid + 2) for knot in range(grid + 3)]
        pairs = list(itertools.pairwise(sizes))
        self.base = nn.ModuleList(nn.Linear(i, o) for i, o in pairs)
        self.spline = nn.ModuleList(nn.Linear(i * len(self.grid), o) for i, o in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for base, spline in zip(self.base, self.spline, strict=True):
            bumps = torch.stack([F.relu(1 - ((x - knot) / self.step).square()) for knot in self.grid], -1)
            x = base(F.silu(x)) + spline(bumps.flatten(-2))
        return x


class Unrolled(nn.Module):
    """A recurrent cell called step by step."""

    def __init__(self, cell: type[nn.Module], steps: int = 12, width: int = 32) -> None:
        super().__init__()
        self.cell, self.steps, self.head = cell(8, width), steps, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        state: Tensor | tuple[Tensor, Tensor] | None = None
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Gates(nn.Module):
    """A gated unit written with layers, called step by step."""

    def __init__(self, steps: int = 12, width: int = 32) -> None:
        super().__init__()
        self.gate, self.new, self.head = nn.Linear(8 + width, width), nn.Linear(8 + width, width), nn.Linear(width, 4)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width)
        for now in x.unbind(1):
            both = torch.cat([now, state], 1)
            gate = torch.sigmoid(self.gate(both))
            state = gate * state + (1 - gate) * torch.tanh(self.new(both))
        return self.head(state)


class Ode(nn.Module):
    """Steps of Euler with one network of two layers."""

    def __init__(self, steps: int = 20, width: int = 32) -> None:
        super().__init__()
        self.enter, self.a, self.b, self.leave = (
            nn.Linear(*s) for s in ((8, width), (width, width), (width, width), (width, 4))
        )
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(self.steps):
            x = x + self.b(torch.tanh(self.a(x))) / self.steps
        return self.leave(x)


class Shared(nn.Module):
    """One block called several times, as in ALBERT, with layer norms between."""

    def __init__(self, times: int = 6, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.times, self.head = nn.LayerNorm(width), times, nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.norm(x + self.down(F.gelu(self.up(x))))
        return self.head(x)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "KAN of 3 layers": (Kan, (16,)),
    "GRUCell, 12 steps": (lambda: Unrolled(nn.GRUCell), (12, 8)),
    "LSTMCell, 12 steps": (lambda: Unrolled(nn.LSTMCell), (12, 8)),
    "gated unit of layers, 12 steps": (Gates, (12, 8)),
    "neural ODE, 20 steps": (Ode, (8,)),
    "one block 6 times, layer norms": (Shared, (64,)),
}


def step_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """A forward and backward pass."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def seconds(step: Callable[[], None]) -> float:
    """Processor time of a step, over as many as take 50 ms."""
    count, spent = 0, 0.0
    start = time.process_time()
    while spent < 0.05:
        step()
        count += 1
        spent = time.process_time() - start
    return spent / count


def measured(name: str, rounds: int) -> dict[str, object]:
    """Milliseconds of a plain and of a normalized step, and how the layers are folded."""
    plain, normalized, x = both(name)
    steps = step_of(plain, x), step_of(normalized, x)
    for step in steps:
        step()
    times = [[seconds(step) for step in steps] for _ in range(rounds)]
    ours, theirs = (1000 * min(column) for column in reversed(list(zip(*times, strict=True))))
    ways = [layer.how for layer in vp.fold_report(normalized).layers]
    return {
        "network": name, "plain": round(theirs, 3), "normalized": round(ours, 3), "ratio": round(ours / theirs, 1),
        "together": ways.count("together"), "of": len(ways),
    }  # fmt: skip


def both(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network, its normalized copy, and a batch."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    plain, x = make(), torch.randn(BATCH, *shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        normalized = vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, *shape))
    return plain.train(), normalized.train(), x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(NETWORKS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", choices=list(NETWORKS), help="print where a normalized step's time goes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        _, normalized, x = both(options.profile)
        step = step_of(normalized, x)
        step()
        with cProfile.Profile() as profile:
            for _ in range(10):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    rows = [measured(name, options.rounds) for name in options.only]
    print(Table("", tuple(rows[0]), [[str(value) for value in row.values()] for row in rows], ("network",)).plain())
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "batch": BATCH, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
