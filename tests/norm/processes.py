"""Several processes that train one model between them, for tests: the model, its wrappers, and how they are started."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import varprop as vp
from varprop.norm import distributed

STEPS, BATCH, WORLD = 3, 8, 2
SPLITS = (slice(0, 5), slice(5, 8))  # of a batch over two processes: uneven


class Residual(nn.Module):
    """Convolutions and a skip: all of it is folded together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.b(torch.relu(self.a(x))))


class Mixer(nn.Module):
    """A layer norm before the layers: they need a walk, which reads its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks one after the other, and layers before and behind them."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 3)
        self.convolutional = nn.ModuleList([Residual(), Residual()])
        self.dense = nn.ModuleList([Mixer(), Mixer()])

    def blocks(self) -> list[nn.Module]:
        return [*self.convolutional, *self.dense]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        for block in self.convolutional:
            x = self._call(block, x)
        x = x.mean((2, 3))
        for block in self.dense:
            x = self._call(block, x)
        return self.head(x)

    def _call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)


def plain(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def normalized(dtype: torch.dtype = torch.float64, form: str = "paper") -> Any:
    return copy.deepcopy(_normalized(dtype, form))


@functools.cache
def _normalized(dtype: torch.dtype, form: Any) -> nn.Module:
    moments = vp.Moments(torch.zeros(1, 3, 1, 1, dtype=dtype), torch.ones(1, 3, 1, 1, dtype=dtype))
    model = vp.normalize(plain(dtype), moments, example=torch.zeros(2, 3, 6, 6, dtype=dtype), form=form)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # so that the scales and shifts of no two layers are alike
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=dtype))
    return model


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 6, 6, dtype=torch.float64, generator=numbers).to(dtype)


def train(
    model: nn.Module,
    *parts: slice,
    processes: int = 1,
    dtype: torch.dtype = torch.float64,
    autocast: bool = False,
) -> None:
    """A few steps on parts of every batch, one after the other; gradients are averaged over processes."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(batch(step, dtype)[part])
            (output.to(dtype).square().sum() * processes / BATCH).backward()
        optimizer.step()


def full(parameter: Any) -> Tensor:
    found: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().clone()


@contextlib.contextmanager
def parts_of(bytes: int) -> Iterator[None]:
    before, distributed.LIMIT = distributed.LIMIT, bytes
    try:
        yield
    finally:
        distributed.LIMIT = before


def run(work: Callable[[int], Any], folder: Path, world: int = WORLD) -> Any:
    """What the first of some processes returns."""
    mp.spawn(_process, args=(work, str(folder), world), nprocs=world)
    return torch.load(folder / "result.pt", weights_only=False)


def _process(rank: int, work: Callable[[int], Any], folder: str, world: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meeting = f"file://{os.path.join(folder, 'meeting')}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    result = work(rank)
    if rank == 0:
        torch.save(result, os.path.join(folder, "result.pt"))
    dist.barrier()
    dist.destroy_process_group()
