"""The normalizations: the same network with none, and with each of them."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import varprop as vp

from .models import Recipe

if TYPE_CHECKING:
    from .plan import Case

SEED = 0
GROUPS = 32


def _batch(kind: type[nn.Module], channels: int) -> nn.Module:
    return nn.BatchNorm1d(channels) if kind is nn.Linear else nn.BatchNorm2d(channels)


def _group(_kind: type[nn.Module], channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


def _layer(_kind: type[nn.Module], channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels)


VARIANTS: dict[str, tuple[str, Recipe]] = {
    "none": ("none", Recipe()),
    "none-no-bias": ("none, no bias", Recipe(bias=False)),
    "weight": ("weight norm", Recipe()),
    "batch": ("batch norm", Recipe(_batch, bias=False)),
    "group": ("group norm", Recipe(_group, bias=False)),
    "layer": ("layer norm", Recipe(_layer, bias=False)),
    "analytic": ("analytic norm", Recipe()),
}


def title(variant: str) -> str:
    """For tables."""
    return VARIANTS[variant][0]


def build(case: Case, variant: str, device: torch.device) -> nn.Module:
    """The network of a case with a normalization, in training mode; all variants draw the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = case.build(VARIANTS[variant][1])
    layout: dict[str, Any] = {"memory_format": torch.channels_last} if case.channels_last else {}
    model = model.to(device, **layout)
    if variant == "weight":
        return _weight_normalized(model)
    return _analytic(model, case, device) if variant == "analytic" else model


def _weight_normalized(model: nn.Module) -> nn.Module:
    for layer in list(model.modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            weight_norm(layer)
        elif isinstance(layer, nn.ConvTranspose2d):
            weight_norm(layer, dim=1)
    return model


def _analytic(model: nn.Module, case: Case, device: torch.device) -> nn.Module:
    example = torch.zeros(2, *case.image, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on depth: what comes out is timed, not trained
        return vp.normalize(model, input_moments(case.image, device), example=example, inplace=True)


def input_moments(image: tuple[int, ...], device: torch.device) -> vp.Moments:
    """Mean 0 and variance 1, per channel of an image and per entry of a vector."""
    mean: Tensor = torch.zeros(1, image[0], *(1 for _ in image[1:]), device=device)
    return vp.Moments(mean, torch.ones_like(mean))
