"""Train a small vision transformer on CIFAR-10 with layer norm, RMS norm, DyT, Derf, analytic normalization or none.

    python examples/train_vit.py --norm analytic --data DIR                # judged on 5000 of the training images
    python examples/train_vit.py --norm analytic --data DIR --held-out 0   # all training images, then the test images

Patches of 4 x 4 pixels, whose rows and columns attention knows by rotation; the mean over patches is classified. AdamW,
one-cycle rate, weight decay on matrices, clipped gradients, and all else as in `train_cifar.py`, as is the result.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import Tensor, nn
from train_cifar import Run, parser
from train_gpt import NORMS, Block, norm_of, set_first_weights_

import varprop as vp

PATCH, SIDE = 4, 8  # pixels; patches beside each other
SETTINGS = ("depth", "heads", "qk_norm", "scale_rate", "alpha", "patches")


class ViT(nn.Module):
    """All patches are alike until attention tells their places."""

    turns: Tensor

    def __init__(self, options: argparse.Namespace, norm: Any) -> None:
        super().__init__()
        width = options.width
        self.register_buffer("turns", turns_of(width // options.heads // 2), persistent=False)
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        blocks = (Block(width, options.heads, norm, options.qk_norm, causal=False) for _ in range(options.depth))
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = norm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2).float()  # the stream keeps its digits in mixed precision
        for block in self.blocks:
            x = block(x, self.turns)
        return self.head(self.norm(x).mean(1))


def turns_of(half: int) -> Tensor:
    """Rotary positions of the patches: one half of the points turn from row to row, the other from column to column."""
    speeds = 100 ** (-torch.arange(half // 2) / (half // 2))
    rows, columns = torch.arange(SIDE**2) // SIDE, torch.arange(SIDE**2) % SIDE
    angles = torch.cat([rows[:, None] * speeds, columns[:, None] * speeds], 1)
    return torch.stack([angles.cos(), angles.sin()])


def make_model(options: argparse.Namespace, moments: vp.Moments) -> nn.Module:
    torch.manual_seed(options.seed)
    model = ViT(options, norm_of(options, dyt=0.5))  # as published for vision
    set_first_weights_(model, options.depth)
    if options.patches == "torch":
        model.patches.reset_parameters()
    return vp.normalize(model, moments, form=options.form) if options.norm == "analytic" else model


class ViTRun(Run):
    """A training run with AdamW, in which scales and shifts have a rate of their own."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        rate = self.options.lr * self.options.scale_rate
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": rate}]
        return torch.optim.AdamW(groups, self.options.lr, betas=(0.9, 0.95), weight_decay=self.options.weight_decay)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    options = parser([*NORMS, "analytic", "none"], ["vit"])
    options.add_argument("--depth", type=int, default=6, help="blocks")
    options.add_argument("--heads", type=int, default=4)
    options.add_argument("--qk-norm", action="store_true", help="RMS norm of queries and keys, with any --norm")
    options.add_argument("--scale-rate", type=float, default=1.0, help="of scales and shifts, times --lr")
    options.add_argument("--alpha", type=float, help="first value of DyT's or Derf's (default: as published)")
    options.add_argument(
        "--patches",
        choices=["small", "torch"],
        default="small",
        help="first weights of the patches: 0.02 as all others, or torch's, with which the stream does not start small",
    )
    options.set_defaults(model="vit", width=256, lr=1e-3, weight_decay=0.1, clip=1.0)
    return options.parse_args(arguments)


if __name__ == "__main__":
    chosen = parse()
    print(json.dumps({name: getattr(chosen, name) for name in SETTINGS} | ViTRun(chosen, make_model).train()))
