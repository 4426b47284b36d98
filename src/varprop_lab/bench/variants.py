"""The normalizations: the same network with none, and with each of them."""

from __future__ import annotations

import math
import warnings

import torch
from torch import nn

import varprop as vp

from .models import Recipe

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


def analytically_normalized(model: nn.Module, image: tuple[int, ...], device: torch.device) -> nn.Module:
    """Analytic norm for inputs of this shape with mean 0 and variance 1, in place."""
    mean = torch.zeros(1, image[0], *(1 for _ in image[1:]), device=device)  # per channel, or per entry of a vector
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on depth: what comes out is timed, not trained
        moments = vp.Moments(mean, torch.ones_like(mean))
        return vp.normalize(model, moments, example=torch.zeros(2, *image, device=device), inplace=True)
