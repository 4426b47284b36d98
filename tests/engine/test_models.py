"""Whole models beside Monte Carlo, layer by layer, with stated tolerances.

Given for each model is what was measured: the largest median over a layer's units of |std analytic / std Monte Carlo -
1|, and of the error of the mean in standard deviations; more than a seventh beyond it fails. (The LSTM's
mean, at the noise of the draws, and torchvision's models are given rounder bounds.) The rules state no error of whole
models: these hold at initialization, where units are nearly uncorrelated, and stem from operands that share an
ancestor and from values that are far from Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import varprop as vp
from tests.models import GPT, LSTMClassifier, ResNet, UNet, ViT, trained_looking
from tests.monte_carlo import gaussian, module_statistics

# On uniform axes the differences between positions (the border of padded convolutions) count as noise, which a global
# average then takes for independent: behind one, the std is overestimated (by 3.8 here).
BEHIND_THE_AVERAGE = ("avgpool", "fc", "")


def standard(*shape: int) -> vp.Moments:
    return vp.Moments(torch.zeros(shape), torch.ones(shape))


def worst_layers(
    model: nn.Module,
    result: vp.Result,
    draw: Callable[[int], Any],
    count: int,
    pool: tuple[int, ...] = (),
    skip: tuple[str, ...] = (),
) -> tuple[tuple[float, str], tuple[float, str]]:
    """The largest median errors over layers: of the std (relative), and of the mean (in std)."""
    std_error, mean_error = (0.0, ""), (0.0, "")
    for path, (mean, std) in module_statistics(model, draw, count, pool=pool).items():
        if path not in result or len(result.calls[path]) > 1 or path in skip:
            continue
        moments = result[path].dense() if not pool else result[path]
        own_mean, own_std = (t[0].double().detach() for t in (moments.mean, moments.std))
        if pool:
            own_mean, own_std = own_mean.flatten(), own_std.flatten()
        moving = std > 1e-6
        std_error = max(std_error, ((own_std / std - 1).abs()[moving].median().item(), path))
        mean_error = max(mean_error, (((own_mean - mean).abs() / std)[moving].median().item(), path))
    return std_error, mean_error


MARGIN = 1.15


def check(errors: tuple[tuple[float, str], tuple[float, str]], std: float, mean: float) -> None:
    (std_error, std_path), (mean_error, mean_path) = errors
    assert std_error <= MARGIN * std, f"std of '{std_path}' is off by {std_error:.3f} in the median"
    assert mean_error <= MARGIN * mean, f"mean of '{mean_path}' is off by {mean_error:.3f} std in the median"


@pytest.mark.slow
def test_resnet_at_full_resolution() -> None:
    torch.manual_seed(0)
    model = trained_looking(ResNet(width=24)).eval()
    moments = standard(1, 3, 32, 32)
    result = vp.propagate(model, moments)
    check(worst_layers(model, result, lambda n: gaussian(moments, (n, 3, 32, 32), n), 2048), std=0.166, mean=0.054)


@pytest.mark.slow
def test_resnet_with_uniform_axes() -> None:
    torch.manual_seed(0)
    model = trained_looking(ResNet(width=16)).eval()
    moments = standard(1, 3, 1, 1)
    result = vp.propagate(model, moments, torch.zeros(1, 3, 128, 128))
    assert result["layers.0.0.conv1"].shape == (1, 16, 1, 1)
    draw = lambda n: gaussian(moments, (n, 3, 128, 128), n)  # noqa: E731
    check(worst_layers(model, result, draw, 128, (2, 3), BEHIND_THE_AVERAGE), std=0.233, mean=0.2)


@pytest.mark.slow
def test_vision_transformer() -> None:
    torch.manual_seed(0)
    model = ViT().eval()
    moments = standard(1, 3, 32, 32)
    result = vp.propagate(model, moments)
    check(worst_layers(model, result, lambda n: gaussian(moments, (n, 3, 32, 32), n), 4096), std=0.172, mean=0.085)


@pytest.mark.slow
def test_unet_with_skip_concatenation() -> None:
    torch.manual_seed(0)
    model = UNet().eval()
    moments = standard(1, 3, 16, 16)
    result = vp.propagate(model, moments)
    check(worst_layers(model, result, lambda n: gaussian(moments, (n, 3, 16, 16), n), 4096), std=0.074, mean=0.041)


def test_lstm_classifier() -> None:
    torch.manual_seed(0)
    model = LSTMClassifier().eval()
    moments = standard(1, 6, 8)
    result = vp.propagate(model, moments)
    check(worst_layers(model, result, lambda n: gaussian(moments, (n, 6, 8), n), 8192), std=0.08, mean=0.02)


@pytest.mark.slow
def test_gpt_over_random_tokens() -> None:
    torch.manual_seed(0)
    model = GPT().eval()
    result = vp.propagate(model, vp.Tokens.uniform(50), torch.zeros(1, 12, dtype=torch.long))
    check(worst_layers(model, result, lambda n: torch.randint(50, (n, 12)), 4096), std=0.105, mean=0.044)


@pytest.mark.zoo
def test_torchvision_resnet18() -> None:
    from tests.torchvision_on_cpu import torchvision

    torch.manual_seed(0)
    model = trained_looking(torchvision.models.resnet18()).eval()
    moments = standard(1, 3, 1, 1)
    result = vp.propagate(model, moments, torch.zeros(1, 3, 224, 224))
    draw = lambda n: gaussian(moments, (n, 3, 224, 224), n)  # noqa: E731
    check(worst_layers(model, result, draw, 32, (2, 3), BEHIND_THE_AVERAGE), std=0.3, mean=0.22)


@pytest.mark.zoo
def test_torchvision_vit() -> None:
    from tests.torchvision_on_cpu import torchvision

    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 3, 4, 48, 96).eval()
    nn.init.normal_(model.heads.head.weight, std=0.02)  # torchvision starts it at zero
    moments = standard(1, 3, 32, 32)
    result = vp.propagate(model, moments)
    check(worst_layers(model, result, lambda n: gaussian(moments, (n, 3, 32, 32), n), 4096), std=0.174, mean=0.22)
