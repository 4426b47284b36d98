"""The architectures the normalization has to handle, small, with inputs of non-zero mean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from tests.convert.networks import NETWORKS as SHARED
from tests.convert.networks import numbers
from tests.models import trained_looking
from varprop.norm import Normalized
from varprop.norm.statistics import Statistics


class IdentitySkip(nn.Module):
    """A residual network without projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 4)
        self.body = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU(), nn.Conv2d(6, 6, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.gelu(x + self.body(x)).mean((2, 3)))


class TwoInTwoOut(nn.Module):
    """An image and a vector in, a map and a vector out."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.vector = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(5, 4)
        self.map, self.summary = nn.Conv2d(4, 3, 1), nn.Linear(8, 2)

    def forward(self, image: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        image, vector = torch.relu(self.image(image)), torch.tanh(self.vector(vector))
        return self.map(image + vector[:, :, None, None]), self.summary(torch.cat([image.mean((2, 3)), vector], 1))


class Branches(nn.Module):
    """Two ways that part, differ and meet again, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 5, padding=2, bias=False)
        self.pooled, self.head = nn.Conv2d(3, 2, 1), nn.Conv2d(10, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        ways = [F.silu(self.narrow(x)), torch.sigmoid(self.wide(x)), self.pooled(F.avg_pool2d(x, 3, 1, 1))]
        return self.head(torch.cat(ways, 1))


class Recalled(nn.Module):
    """One layer called on two different inputs, neither of which is its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 6), nn.Linear(5, 6)
        self.shared, self.head = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        both = self.shared(torch.relu(self.left(x))) - self.shared(torch.sigmoid(self.right(x)))
        return self.head(torch.relu(both))


class NamedParts(nn.Module):
    """Features and a classifier, as the models of torchvision name them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def dropout() -> nn.Module:
    front = [nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*front, nn.Linear(16, 3))


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def pools() -> nn.Module:
    front = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*front, nn.AvgPool2d(2), nn.Conv2d(6, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def own_norms() -> nn.Module:
    front = [nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.LayerNorm([8, 4, 4]), nn.ReLU()]
    return nn.Sequential(*front, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def without_bias() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False))


def dense_batch_norm() -> nn.Module:
    layers = [nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)]
    return trained_looking(nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3)))


def bare_batch_norm() -> nn.Module:
    """Batch norm without parameters of its own."""
    bare = nn.BatchNorm2d(6, affine=False)
    bare.running_mean, bare.running_var = 0.3 * torch.randn(6), 0.5 + torch.rand(6)
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), bare, nn.ReLU(), nn.Conv2d(6, 2, 1))


OWN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "identity skip": (IdentitySkip, numbers(4, 3, 6, 6)),
    "two in two out": (TwoInTwoOut, (numbers(4, 2, 5, 5), 1 - numbers(4, 5))),
    "branches": (Branches, numbers(4, 3, 6, 6)),
    "recalled": (Recalled, numbers(8, 5)),
    "dropout": (dropout, numbers(8, 5)),
    "frozen": (frozen, numbers(8, 5)),
    "pools, one input channel": (pools, numbers(4, 1, 8, 8)),
    "own norms": (own_norms, numbers(4, 3, 8, 8)),
    "without bias": (without_bias, numbers(8, 5)),
    "dense batch norm": (dense_batch_norm, numbers(8, 5)),
    "bare batch norm": (bare_batch_norm, numbers(4, 3, 6, 6)),
    "unbatched": (frozen, numbers(5)),
    "named parts": (NamedParts, numbers(4, 3, 7, 7)),
}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {**SHARED, **OWN}
GAIN_A_BIAS = ("mlp", "conv", "residual", "grouped", "other ranks", "branches", "without bias")
COME_APART = ("tied", "language")  # two layers with one weight and different scales


@dataclass
class Case:
    """A plain model in evaluation mode, an input for it, and the input's moments."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    moments: Any

    def normalized(self, **settings: Any) -> nn.Module:
        return vp.normalize(self.model, self.moments, example=self.inputs, **settings)

    def run(self, model: nn.Module) -> Tensor:
        """All outputs of a model on the input, in one row."""
        outputs = model(*self.inputs)
        return torch.cat([o.flatten() for o in (outputs if isinstance(outputs, tuple) else (outputs,))])


def case(name: str, dtype: torch.dtype = torch.float64) -> Case:
    build, given = NETWORKS[name]
    torch.manual_seed(1)
    model = build().to(dtype).eval()
    inputs = tuple(
        t.to(dtype) if t.is_floating_point() else t for t in (given if isinstance(given, tuple) else (given,))
    )
    moments = tuple(moments_of(t) for t in inputs)
    return Case(model, inputs, moments if len(moments) > 1 else moments[0])


def moments_of(x: Tensor) -> vp.Moments | vp.Tokens:
    """Mean and variance per channel; how often each index comes for whole numbers."""
    if x.ndim == 1:
        return vp.Moments(x, 1 + x.square())
    if not x.is_floating_point():
        return vp.Tokens(x.flatten().bincount(minlength=11) / x.numel())
    axes = [axis for axis in range(x.ndim) if axis != 1]
    return vp.Moments(x.mean(axes, keepdim=True), x.var(axes, keepdim=True))


@functools.cache
def _kept(name: str, init: str, form: str) -> tuple[Case, nn.Module]:
    found = case(name)
    return found, found.normalized(init=init, form=form)


def kept(name: str, init: str = "preserve", form: str = "paper") -> tuple[Case, nn.Module]:
    """A float64 case and its normalized model: made once, for tests that change neither."""
    return _kept(name, "project" if form == "deep" else init, form)


both_forms = pytest.mark.parametrize("form", ("paper", "deep"))


def sites(model: nn.Module) -> dict[str, Normalized]:
    return {path: m for path, m in model.named_modules() if isinstance(m, Normalized)}


def alone_(model: nn.Module) -> nn.Module:
    """The same model, every layer folding by itself."""
    for site in sites(model).values():
        for mode, (network, place) in site.networks.items():
            spec, nodes = network.specs[place], network.joint.nodes_by_name()
            calls = [call for call in spec.calls for _ in range(round(call.share * spec.times))]
            site.uses[mode] = [call.use for call in calls]
            site.statistics[mode] = Statistics(network.joint.graph, [nodes[call.target] for call in calls])
        site.networks = {}
    return model


@torch.no_grad()
def train_a_little(model: nn.Module, seed: int = 3) -> nn.Module:
    """Scales of both signs, one of them zero, shifts and weights as training might leave them."""
    generator = torch.Generator().manual_seed(seed)
    for site in sites(model).values():
        for name, parameter in site.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.add_(noise if name != "weight" else 0.3 * noise * parameter.std())
        site.scale[0] = 0
    return model


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert a.shape == b.shape
    return float(((a - b).abs().max() / b.abs().max()).detach())
