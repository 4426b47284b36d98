"""What is measured: the cases with their sizes, the modes, and which variants are compiled by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

from .models import Recipe, ResNet50, UNet, convolutional, logistic
from .variants import VARIANTS, analytically_normalized

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
        """That of a mode."""
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
    """Those that were asked for; by default all in eager mode and those of the case in the others."""
    if wanted is not None:
        return wanted
    return tuple(VARIANTS) if mode == "eager" else case.to_compile
