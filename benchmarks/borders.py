"""How much the zeros around images change AP2's statistics: the paper's network for CIFAR-10 before any training.

python -m benchmarks.borders [--data DIR] [--json docs/results/borders.json]

For every convolution, on the same weights: sigma with positions pooled, zeros included, as varprop has it, over sigma
by sums of whole kernels, as the paper writes it (lowest, mean and highest channel); and the standard deviation measured
on augmented training images, root mean square over channels, where each of the two is 1 by its own account.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab.datasets import load
from varprop_lab.environment import provenance
from varprop_lab.paper.experiments import EXPERIMENTS
from varprop_lab.protocol import build
from varprop_lab.starts import without_borders
from varprop_lab.training import Task

IMAGES = 64


def normalized(task: Task) -> dict[str, nn.Module]:
    """The network by both statistics, plain again; all scales are 1, so that weights are divided by sigma."""
    model, moments = build("cifar10", 0), task.moments(0)
    make = functools.partial(vp.normalize, example=(1, 3, 32, 32), form="paper")
    return {"pooled": vp.fold(make(model, moments)), "plain": vp.fold(without_borders(make, model, moments))}


def convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]


@torch.no_grad()
def measured(model: nn.Module, images: Tensor) -> list[tuple[int, float]]:
    """Side of the output and standard deviation of every convolution."""
    found: list[tuple[int, float]] = []

    def note(_: nn.Module, __: Any, output: Tensor) -> None:
        found.append((output.shape[-1], float(output.double().var((0, 2, 3)).mean().sqrt())))

    for layer in convolutions(model):
        layer.register_forward_hook(note)
    model.eval()(images)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    experiment = EXPERIMENTS["noisy-cifar10"]
    task = Task(experiment, load("cifar10", chosen.data), experiment.model)
    models, images = normalized(task), task.batches(0, IMAGES).first_batch()
    stds = {name: measured(model, images) for name, model in models.items()}
    rows = []
    for index, layers in enumerate(zip(*map(convolutions, models.values()), strict=True)):
        pooled, plain = (layer.weight.detach().flatten(1).norm(dim=1) for layer in layers)
        ratio = plain / pooled  # of row lengths: the inverse of that of the sigmas
        numbers = [float(value) for value in (ratio.min(), ratio.mean(), ratio.max())]
        rows.append([index + 1, stds["pooled"][index][0], *numbers, *(stds[name][index][1] for name in models)])
    columns = ["layer", "side", "lowest", "mean", "highest", "measured, pooled", "measured, plain"]
    print(
        Table("", columns, [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]).markdown()
    )
    if chosen.json:
        about = provenance(torch.device("cpu"))
        chosen.json.write_text(json.dumps({**about, "columns": columns, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
