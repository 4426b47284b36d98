"""What is measured: networks with any normalization behind every linear layer but the last, sizes, modes, variants."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp

from .. import protocol

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
        modules = self.layers(kind, inputs, outputs, *settings, **more)
        return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def logistic(recipe: Recipe, inputs: int = 784, units: int = 20) -> nn.Module:
    """The paper's network for MNIST."""
    return protocol.logistic(inputs, hidden=6, units=units, layers=recipe.layers)


def convolutional(recipe: Recipe, width: int = 96) -> nn.Module:
    """The paper's network for CIFAR-10."""
    return protocol.convolutional(width, layers=recipe.layers)


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
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips[:-1]), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        scores: Tensor = self.head(x)
        return scores


def _twice(recipe: Recipe, inputs: int, outputs: int) -> nn.Module:
    first = recipe.layers(nn.Conv2d, inputs, outputs, 3, padding=1)
    second = recipe.layers(nn.Conv2d, outputs, outputs, 3, padding=1)
    return nn.Sequential(*first, nn.ReLU(), *second, nn.ReLU())


GROUPS = 32
_BATCH_NORMS = {nn.Linear: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.ConvTranspose2d: nn.BatchNorm2d}
VARIANTS: dict[str, tuple[str, Recipe]] = {
    "none": ("none", Recipe()),
    "none-no-bias": ("none, no bias", Recipe(bias=False)),
    "weight": ("weight norm", Recipe()),
    "batch": ("batch norm", Recipe(lambda kind, channels: _BATCH_NORMS[kind](channels), bias=False)),
    "group": ("group norm", Recipe(lambda _, channels: nn.GroupNorm(math.gcd(GROUPS, channels), channels), bias=False)),
    "layer": ("layer norm", Recipe(lambda _, channels: nn.GroupNorm(1, channels), bias=False)),
    "analytic": ("analytic norm", Recipe()),
}


def title(variant: str) -> str:
    """For tables."""
    return VARIANTS[variant][0]


def analytically_normalized(model: nn.Module, image: tuple[int, ...], device: torch.device) -> nn.Module:
    """Analytic norm for inputs of this shape with mean 0 and variance 1, in place."""
    mean = torch.zeros(1, image[0], *(1 for _ in image[1:]), device=device)  # per channel, or per entry of a vector
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on depth: what comes out is timed, not trained
        moments = vp.Moments(mean, torch.ones_like(mean))
        return vp.normalize(model, moments, example=torch.zeros(2, *image, device=device), inplace=True)


MODES = ("eager", "compiled", "captured")
FEW = ("none", "batch", "analytic")
STEP = (
    "A step: gradients set to None, forward pass with the mean cross entropy, backward pass, optimizer step; the batch "
    "lies on the device. eager: as written. compiled: forward and backward by torch.compile, the optimizer eager. "
    "captured: the compiled step, optimizer included, replayed as one CUDA graph. Times are medians over rounds in "
    "which all variants of a mode take turns; a ratio is the median over rounds of the ratio within a round. Memory "
    "is the peak of a step beyond the batch: parameters, gradients, optimizer state, activations, workspaces."
)


@dataclass(frozen=True)
class Case:
    """One network and its training step."""

    name: str  # as on the command line
    title: str  # for tables
    build: Callable[[Recipe], nn.Module]
    image: tuple[int, ...]  # shape of one input
    batch: int
    classes: int
    optimizer: str  # ``sgd`` (momentum 0.9) or ``adam``
    eager: str  # precision of the eager mode: ``float32``, ``tf32`` or ``bf16`` (autocast)
    compiled: str  # precision of the other modes
    channels_last: bool = False
    dense: bool = False  # whether every pixel has a label
    to_compile: tuple[str, ...] = FEW  # by default: compilation takes most of the time

    def precision(self, mode: str) -> str:
        """The precision of a mode."""
        return self.eager if mode == "eager" else self.compiled

    def data(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch of standard Gaussian inputs and random labels."""
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.batch, *self.image, generator=generator)
        shape = (self.batch, *self.image[1:]) if self.dense else (self.batch,)
        labels = torch.randint(self.classes, shape, generator=generator)
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return images.to(device), labels.to(device)

    def network(self, variant: str, device: torch.device) -> nn.Module:
        """The network with a normalization, in training mode; all variants draw the same weights."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.build(VARIANTS[variant][1])
        layout: dict[str, Any] = {"memory_format": torch.channels_last} if self.channels_last else {}
        model = model.to(device, **layout)
        if variant == "weight":
            return vp.reparametrize(model, "weight", inplace=True)
        return analytically_normalized(model, self.image, device) if variant == "analytic" else model


_GPU = (
    Case(
        "cifar",
        "CIFAR net",
        convolutional,
        (3, 32, 32),
        128,
        10,
        "sgd",
        "tf32",
        "bf16",
        channels_last=True,
        to_compile=tuple(VARIANTS),
    ),
    Case("mlp", "MLP 784-20x6-10", logistic, (784,), 128, 10, "adam", "tf32", "tf32"),
    Case("resnet50", "ResNet-50", ResNet50, (3, 224, 224), 256, 1000, "sgd", "bf16", "bf16", channels_last=True),
    Case("unet", "U-Net", UNet, (3, 128, 128), 32, 2, "sgd", "bf16", "bf16", channels_last=True, dense=True),
)
CASES = tuple(case.name for case in _GPU)
_CPU_BATCH = {"cifar": 32, "mlp": 128, "resnet50": 4, "unet": 2}
_TINY: dict[str, tuple[Callable[[Recipe], nn.Module], tuple[int, ...], int, int]] = {
    "cifar": (partial(convolutional, width=8), (3, 12, 12), 4, 10),
    "mlp": (partial(logistic, inputs=12, units=4), (12,), 8, 10),
    "resnet50": (partial(ResNet50, width=4, classes=10), (3, 32, 32), 2, 10),
    "unet": (partial(UNet, width=4), (3, 16, 16), 2, 2),
}


def cases(device: torch.device, tiny: bool = False) -> dict[str, Case]:
    """The cases by name, in sizes for the device; tiny ones for trying the benchmark itself."""
    chosen = {case.name: case for case in _GPU}
    if device.type == "cpu":
        chosen = {n: replace(c, batch=_CPU_BATCH[n], eager="float32", compiled="float32") for n, c in chosen.items()}
    return {name: _tiny(case) for name, case in chosen.items()} if tiny else chosen


def _tiny(case: Case) -> Case:
    build, image, batch, classes = _TINY[case.name]
    return replace(case, build=build, image=image, batch=batch, classes=classes)


def default_cases(device: torch.device) -> tuple[str, ...]:
    """All of them on a GPU, those that take a minute on a CPU."""
    return CASES if device.type == "cuda" else ("cifar", "mlp")


def default_modes(device: torch.device) -> tuple[str, ...]:
    """All of them on a GPU; a CPU has no captured mode, and compiles slowly."""
    return MODES if device.type == "cuda" else ("eager",)


def variants_of(case: Case, mode: str, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """The variants wanted; by default all in eager mode, and those of the case in the other modes."""
    if wanted is not None:
        return wanted
    return tuple(VARIANTS) if mode == "eager" else case.to_compile
