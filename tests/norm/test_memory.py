"""Memory stays flat: nothing of a call or of a step outlives it."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import varprop as vp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc"),
]
CALLS = 1_000
MEASURED = 3  # after warm-up, in equal parts: a leak grows from one to the next


def used() -> int:
    """Bytes of the process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def tensors() -> int:
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def growth(work: object, parts: int = MEASURED) -> tuple[list[int], list[int]]:
    """Live tensors and memory after every part of the work."""
    counts, sizes = [], []
    for _ in range(parts):
        work()  # type: ignore[operator]
        gc.collect()
        counts.append(tensors())
        sizes.append(used())
    return counts, sizes


def is_flat(counts: list[int], sizes: list[int], per_part: int) -> None:
    """No tensor more, and less than one float a call or step in the process, but for a megabyte of its allocator."""
    assert counts[0] == counts[-1], f"live tensors: {counts}"
    grown = sizes[-1] - sizes[0]
    assert grown < 4 * per_part * (len(sizes) - 1) + (1 << 20), f"the process grew by {grown} bytes: {sizes}"
    print(f"{counts[-1]} live tensors, {grown / 2**10:.0f} KiB in {per_part * (len(sizes) - 1)}, pid {os.getpid()}")


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), *between, nn.Flatten(), nn.Linear(16, 3))


def given() -> vp.Moments:
    return vp.Moments(torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1))


@pytest.mark.parametrize(
    ("between", "count"), (((nn.ReLU(),), 10_000), ((nn.GroupNorm(2, 4), nn.GELU()), 1_000)), ids=("together", "walked")
)
def test_training_steps_leave_nothing(between: tuple[nn.Module, ...], count: int) -> None:
    x, y = torch.randn(4, 2, 6, 6), torch.tensor([0, 1, 2, 0])
    model = vp.normalize(network(*between), given(), example=x)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    steps(count // 10)
    part = (count - count // 10) // MEASURED
    is_flat(*growth(lambda: steps(part)), part)


def test_propagations_leave_nothing() -> None:
    model, example = network(nn.GELU()).eval(), torch.zeros(1, 2, 6, 6)
    program = vp.capture(model, example)

    def calls(count: int) -> None:
        for _ in range(count):
            vp.propagate(program, given())

    calls(100)
    part = (CALLS - 100) // MEASURED
    is_flat(*growth(lambda: calls(part)), part)


def test_captures_leave_nothing() -> None:
    """Of a propagation that captures the model each time: torch keeps some of its own, which is bounded."""
    model, example = network(nn.GELU()).eval(), torch.zeros(1, 2, 6, 6)

    def calls() -> None:
        for _ in range(5):
            vp.propagate(model, given(), example)

    calls()
    counts, sizes = growth(calls)
    assert counts[0] == counts[-1], f"live tensors: {counts}"
    assert sizes[-1] - sizes[0] < 8 << 20, f"the process grew by {sizes[-1] - sizes[0]} bytes"
