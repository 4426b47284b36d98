"""Train a normalized network on several processes, with checkpoints that any number of processes can go on from.

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py --engine fsdp --steps 20

Nothing in it is special to the normalization: it adds no collective, and DistributedDataParallel and fully_shard are
used as for any model. Every process normalizes the same model from the same seed. A killed worker is started again by
`torchrun --max-restarts 3`, and goes on from the last complete checkpoint, as does a run with more or fewer processes.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

import varprop as vp

BATCH, CLASSES, CHANNELS = 16, 4, 8  # the batch of all processes together


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def normalized_model() -> nn.Sequential:
    torch.manual_seed(0)
    stem, head = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Linear(CHANNELS, CLASSES)
    plain = nn.Sequential(stem, nn.ReLU(), Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).double()
    moments = vp.Moments(torch.zeros(1, 3, 1, 1).double(), torch.ones(1, 3, 1, 1).double())
    return vp.normalize(plain, moments, example=torch.zeros(2, 3, 8, 8).double())


def distributed(model: nn.Sequential, engine: str) -> nn.Module:
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in model:
        if isinstance(block, Block):
            fully_shard(block)
    return fully_shard(model)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This process's share of a step's batch: the same numbers, however many processes there are."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 8, 8, dtype=torch.float64, generator=generator)
    labels = images.mean((1, 2, 3)).argsort().argsort() * CLASSES // BATCH
    own = slice(dist.get_rank(), None, dist.get_world_size())
    return images[own], labels[own]


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"{step:08}")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the last complete checkpoint (its metadata are written last); how many steps it has."""
    found = max((path.parent for path in folder.glob("*/.metadata")), default=None)
    if found is None:
        return 0
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=found)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(found.name)


def train(model: nn.Module, settings: argparse.Namespace) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    loss = torch.zeros(())
    for step in range(resume(settings.checkpoints, model, optimizer), settings.steps):
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if step == settings.kill_at and first_start and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            save(settings.checkpoints, step + 1, model, optimizer)
    return loss


def join() -> None:
    """Meet the other processes; apart from those of an earlier start, whose addresses torchrun's store still has."""
    store, rank, processes = next(iter(rendezvous("env://")))
    start = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("gloo", store=start, rank=rank, world_size=processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--kill-at", type=int, default=-1, help="kill the last process at this step, once, to try it")
    settings = parser.parse_args()
    join()
    loss = train(distributed(normalized_model(), settings.engine), settings)
    print(f"process {dist.get_rank()} of {dist.get_world_size()}: loss {loss.item():.4f} after {settings.steps} steps")
    dist.barrier()  # a process that ends while others still exchange may take them along
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
