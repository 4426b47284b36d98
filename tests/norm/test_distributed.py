"""Two processes on PyTorch's own engines give what one process with the whole batch gives, to rounding."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import varprop as vp

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, BATCH = 3, 8


class Net(nn.Module):
    """Convolutions, a skip, a layer norm: what is folded together and what needs a walk."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = (nn.Conv2d(c, 6, 3, padding=1) for c in (3, 6, 6))
        self.norm, self.hidden, self.head = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.b(torch.relu(self.a(x)))).mean((2, 3))
        return self.head(torch.nn.functional.gelu(self.hidden(self.norm(x))))


def normalized() -> nn.Module:
    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 3, 1, 1).double(), torch.ones(1, 3, 1, 1).double())
    return vp.normalize(Net().double(), moments, example=torch.zeros(2, 3, 6, 6).double())


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, part: slice) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step)[part]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


def full(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def worker(rank: int, port: int, kind: str, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = wrapped(kind, normalized())
    train(model, slice(rank * BATCH // 2, (rank + 1) * BATCH // 2))
    found = [full(p).detach().clone() for p in model.parameters()]
    if rank == 0:
        torch.save(found, path)
    torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.compatibility("DDP")
@pytest.mark.compatibility("FSDP")
@pytest.mark.parametrize("kind", ("ddp", "fully_shard"))
def test_two_processes_train_like_one(kind: str, tmp_path: Any) -> None:
    path = str(tmp_path / "parameters.pt")
    mp.spawn(worker, args=(free_port(), kind, path), nprocs=2)
    alone = normalized()
    train(alone, slice(None))
    for ours, theirs in zip(torch.load(path), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
