"""What processes tell each other in a training step, on paper: ResNet-50 with SyncBatchNorm and normalized by varprop.

Counts come from the models themselves, and from torch/nn/modules/_functions.py: SyncBatchNorm gathers 2 C + 1 numbers
from every process in the forward pass and sums 2 C of them in the backward pass, layer by layer, and waits for each.
tests/norm/test_distributed.py counts the same on two processes. The time is a model: `--latency` seconds for each of
log2(n) rounds of a collective, and nothing for the bytes.

    python -m benchmarks.collectives
"""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

import torch
from torch import nn

from varprop_lab.bench.cases import Recipe, ResNet50

FLOAT, MB, BUCKET = 4, 1e6, 25 * 2**20
GPUS = (8, 32, 128, 512, 1024)


class Cost(NamedTuple):
    """Of one step in one process; bytes are those that it receives, by rings."""

    collectives: int
    waiting: int  # collectives that the pass cannot go on without
    gradient_bytes: float
    statistics_bytes: float


def batch_normalized() -> nn.Module:
    with torch.device("meta"):
        return ResNet50(Recipe(lambda _, outputs: nn.BatchNorm2d(outputs), bias=False))


def channels(model: nn.Module) -> list[int]:
    """Of every batch norm."""
    return [m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d)]


def synchronized(model: nn.Module, processes: int) -> Cost:
    gathered = sum((processes - 1) * (2 * c + 1) * FLOAT for c in channels(model))
    summed = sum(_all_reduce(2 * c * FLOAT, processes) for c in channels(model))
    statistics, gradients = 2 * len(channels(model)), parameters(model) * FLOAT
    return Cost(buckets(gradients) + statistics, statistics, _all_reduce(gradients, processes), gathered + summed)


def analytic(model: nn.Module, processes: int) -> Cost:
    """Scales and shifts are as many as a batch norm's; the head, which has none, gains a scale."""
    classes = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    gradients = (parameters(model) + sum(classes)) * FLOAT
    return Cost(buckets(gradients), 0, _all_reduce(gradients, processes), 0)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def buckets(gradients: float) -> int:
    """About, of DistributedDataParallel."""
    return math.ceil(gradients / BUCKET)


def _all_reduce(size: float, processes: int) -> float:
    return 2 * (processes - 1) / processes * size


def table(latency: float) -> str:
    model = batch_normalized()
    lines = [
        "| GPUs | gradients, MB | SyncBN: collectives | waited for | its MB | its ms "
        "| varprop: collectives | waited for |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for processes in GPUS:
        theirs, ours = synchronized(model, processes), analytic(model, processes)
        waiting = 1e3 * latency * math.log2(processes) * theirs.waiting
        lines.append(
            f"| {processes} | {ours.gradient_bytes / MB:.0f} | {theirs.collectives} | {theirs.waiting} | "
            f"{theirs.statistics_bytes / MB:.1f} | {waiting:.1f} | {ours.collectives} | {ours.waiting} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=5e-6, help="of one round of a collective, in seconds")
    print(table(parser.parse_args().latency))
