"""Take a batch-norm ResNet that knows one half of CIFAR-10's classes, and train it on the other half in small batches.

    python examples/train_cifar.py --norm batch --classes 0 4 --checkpoint half.pt --data DIR
    python examples/finetune_cifar.py half.pt --how analytic --batch 8 --epochs 3 --lr 0.01 --data DIR

`--how live` goes on with batch norm, `frozen` with its statistics of the first half, `analytic` with the same function,
normalized without batches. All other options are those of `train_cifar.py`, as is the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from train_cifar import Run, parser, resnet

import varprop as vp


class FrozenBatchNorm(nn.BatchNorm2d):
    """Stays in evaluation mode."""

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        super().train(False)
        return self


def imported(options: argparse.Namespace, moments: vp.Moments) -> nn.Module:
    """The network of the file with a new last layer, and the batch norms made what was asked for."""
    saved = torch.load(options.start, map_location="cpu", weights_only=True)["model"]
    model = resnet(options.model, "batch", options.width, classes=5)
    model.load_state_dict(saved)
    torch.manual_seed(options.seed)
    head = model[-1]
    assert isinstance(head, nn.Linear)
    head.reset_parameters()
    if options.how == "analytic":
        return vp.normalize(model.eval(), moments, init="preserve").train()
    if options.how == "frozen":
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.__class__ = FrozenBatchNorm
    return model.train()


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser()
    options.add_argument("start", type=Path, help="a checkpoint of train_cifar.py, with batch norm")
    options.add_argument("--how", choices=["live", "frozen", "analytic"], default="analytic")
    options.set_defaults(classes=[5, 9], norm="batch")
    return options.parse_args(arguments)


if __name__ == "__main__":
    chosen = options_of()
    print(json.dumps({"how": chosen.how, **Run(chosen, imported).train()}))
