"""Memory stays flat: nothing of a call or of a step outlives it."""

from __future__ import annotations

import gc
import itertools
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
MEASURED = 4  # after warm-up, in equal parts: a leak grows from one to the next


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
    """No tensor more; and some part in which the process grew by less than a float a step and a page.

    In parts of 700 steps and more that is less than the 16 bytes of the smallest object a step, rounded down to pages.

    A leak grows in every part. Torch's allocator may take more memory once, in one of them; and what earlier tests
    left behind may go in one.
    """
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    print(f"{counts[-1]} live tensors; grown in parts of {per_part}, in KiB: {[size >> 10 for size in grown]}")
    assert counts == sorted(counts, reverse=True), f"live tensors: {counts}"
    assert min(grown) < 4 * per_part + resource.getpagesize(), f"the process grows, by {grown} bytes"


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), *between, nn.Flatten(), nn.Linear(16, 3))


def given() -> vp.Moments:
    return vp.Moments(torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1))


@pytest.mark.parametrize(
    ("between", "count"), (((nn.ReLU(),), 3_200), ((nn.GroupNorm(2, 4), nn.GELU()), 1_000)), ids=("together", "walked")
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
    """Of propagations that capture the model each time: no tensor, though torch.export keeps records of its own."""
    model, example = network(nn.GELU()).eval(), torch.zeros(1, 2, 6, 6)

    def calls() -> None:
        for _ in range(5):
            vp.propagate(model, given(), example)

    calls()
    counts, sizes = growth(calls)
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert counts == sorted(counts, reverse=True), f"live tensors: {counts}"
    assert min(grown) < 2 << 20, f"the process grows, by {grown} bytes"
