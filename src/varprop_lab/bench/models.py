"""The networks of the benchmark, each with any normalization after every linear layer but the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..protocol import models

_BLOCKS = (3, 4, 6, 3)


@dataclass(frozen=True)
class Recipe:
    """How every linear layer but the last is made."""

    norm: Callable[[type[nn.Module], int], nn.Module] | None = None  # of a layer's kind and number of outputs
    bias: bool = True

    def layers(self, kind: Any, inputs: int, outputs: int, *settings: int, **more: int) -> list[nn.Module]:
        """The layer and what follows it."""
        layer = kind(inputs, outputs, *settings, bias=self.bias, **more)
        return [layer] if self.norm is None else [layer, self.norm(kind, outputs)]

    def layer(self, kind: Any, inputs: int, outputs: int, *settings: int, **more: int) -> nn.Module:
        """Both as one module."""
        made = self.layers(kind, inputs, outputs, *settings, **more)
        return made[0] if len(made) == 1 else nn.Sequential(*made)


def logistic(recipe: Recipe, inputs: int = 784, units: int = 20) -> nn.Module:
    """The paper's network for MNIST."""
    return models.logistic(inputs, hidden=6, units=units, layers=recipe.layers)


def convolutional(recipe: Recipe, width: int = 96) -> nn.Module:
    """The paper's network for CIFAR-10."""
    return models.convolutional(width, layers=recipe.layers)


class Bottleneck(nn.Module):
    """The residual block of ResNet-50, with the stride in its 3 x 3 convolution."""

    def __init__(self, recipe: Recipe, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce = recipe.layer(nn.Conv2d, inputs, width, 1)
        self.middle = recipe.layer(nn.Conv2d, width, width, 3, stride, padding=1)
        self.expand = recipe.layer(nn.Conv2d, width, 4 * width, 1)
        changed = stride > 1 or inputs != 4 * width
        self.skip = recipe.layer(nn.Conv2d, inputs, 4 * width, 1, stride) if changed else None

    def forward(self, x: Tensor) -> Tensor:
        """Both branches and their sum."""
        skip = x if self.skip is None else self.skip(x)
        x = F.relu(self.middle(F.relu(self.reduce(x))))
        return F.relu(self.expand(x) + skip)


class ResNet50(nn.Module):
    """ResNet-50 at any width: 3, 4, 6 and 3 bottleneck blocks."""

    def __init__(self, recipe: Recipe, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = recipe.layer(nn.Conv2d, 3, width, 7, 2, padding=3)
        blocks: list[nn.Module] = []
        inputs = width
        for level, count in enumerate(_BLOCKS):
            for index in range(count):
                blocks.append(Bottleneck(recipe, inputs, width << level, 2 if level and not index else 1))
                inputs = 4 * (width << level)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores


class UNet(nn.Module):
    """Four levels with two convolutions each, skips by concatenation, transposed convolutions upwards."""

    def __init__(self, recipe: Recipe, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(_twice(recipe, a, b) for a, b in zip([3, *widths], widths, strict=False))
        pairs = [(2 * b, b) for b in reversed(widths[:-1])]
        self.up = nn.ModuleList(recipe.layer(nn.ConvTranspose2d, a, b, 2, 2) for a, b in pairs)
        self.merge = nn.ModuleList(_twice(recipe, a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes of every pixel."""
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        scores: Tensor = self.head(x)
        return scores


def _twice(recipe: Recipe, inputs: int, outputs: int) -> nn.Module:
    first = recipe.layers(nn.Conv2d, inputs, outputs, 3, padding=1)
    second = recipe.layers(nn.Conv2d, outputs, outputs, 3, padding=1)
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU())
