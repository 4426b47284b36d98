"""When the gradients of a normalized model leave the backward pass under DistributedDataParallel.

Two gloo processes train an MLP of 100 MB: plain, normalized in one autograd node, and in parts of 25 MB; then the same
compiled. For every bucket the moment is noted at which its exchange is started, as a share of the backward pass.

    python -m benchmarks.bench_distributed
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import varprop as vp
from varprop.norm import distributed

WIDTH, DEPTH, BATCH, STEPS = 1448, 12, 64, 4
LIMITS = {"plain": None, "one node": 2**60, "parts": distributed.LIMIT}


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    plain = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    if kind == "plain":
        return plain
    return vp.normalize(plain, vp.Moments(torch.zeros(1, WIDTH), torch.ones(1, WIDTH)))


class Clock:
    """Notes when buckets are sent, and lets DistributedDataParallel's own exchange go on."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, int]] = []

    def send(self, _state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as strings
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        self.sent.append((time.perf_counter(), bucket.buffer().nbytes))
        return allreduce_hook(dist.group.WORLD, bucket)


def measure(kind: str, compiled: bool) -> tuple[float, list[tuple[float, float]]]:
    """Median seconds of a step, and of the last step for every bucket: share of the backward pass, and megabytes."""
    distributed.LIMIT = LIMITS[kind] or distributed.LIMIT
    wrapped, clock = nn.parallel.DistributedDataParallel(model(kind)), Clock()
    wrapped.register_comm_hook(None, clock.send)
    called = torch.compile(wrapped) if compiled else wrapped
    images, seconds, sent = torch.randn(BATCH, WIDTH), [], []
    for _ in range(STEPS):
        wrapped.zero_grad()
        dist.barrier()
        clock.sent.clear()
        start = time.perf_counter()
        loss = called(images).square().mean()
        begun = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        seconds.append(end - start)
        sent = [((at - begun) / (end - begun), size / 2**20) for at, size in clock.sent]
    return statistics.median(seconds[1:]), sent


def worker(rank: int, meeting: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    for kind, compiled in ((kind, compiled) for compiled in (False, True) for kind in LIMITS):
        torch.compiler.reset()
        seconds, sent = measure(kind, compiled)
        if rank == 0:
            kind = f"{kind}, compiled" if compiled else kind
            buckets = ", ".join(f"{share:.0%} ({size:.0f} MB)" for share, size in sent)
            print(f"{kind:18} {seconds:6.2f} s a step; buckets sent at {buckets} of the backward pass", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(os.path.join(folder, "meeting"),), nprocs=2)
