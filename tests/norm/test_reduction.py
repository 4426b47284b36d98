"""Where earlier methods apply, this one is the same."""

from __future__ import annotations

import math

import torch
from torch import nn

import varprop as vp
from tests.norm.networks import apart


def unit(width: int) -> vp.Moments:
    one = torch.ones(1, width, dtype=torch.float64)
    return vp.Moments(0 * one, one)


def test_without_scale_and_shift_it_is_normalization_propagation() -> None:
    """Arpit et al. 2016: y = (relu(w x / |w|) - 1/sqrt(2 pi)) / sqrt((1 - 1/pi) / 2), once per layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    x = torch.randn(64, 6, dtype=torch.float64)
    expected = x
    for layer in (model[0], model[2], model[4]):
        if layer is not model[0]:
            expected = (expected.relu() - 1 / math.sqrt(2 * math.pi)) / math.sqrt((1 - 1 / math.pi) / 2)
        expected = expected @ (layer.weight / layer.weight.norm(dim=1, keepdim=True)).T
    normalized = vp.normalize(model, unit(6), form="paper")
    assert apart(normalized(x), expected) <= 1e-5  # epsilon is 1e-6 of the variance
    assert apart(vp.fold(normalized)(x), expected) <= 1e-5


def test_at_the_fixed_point_of_selu_only_the_norms_of_weights_change() -> None:
    """Klambauer et al. 2017: mean 0 and variance 1 go over into themselves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.SELU(), nn.Linear(32, 16), nn.SELU(), nn.Linear(16, 4)).double()
    expected = [layer.weight / layer.weight.norm(dim=1, keepdim=True) for layer in (model[0], model[2], model[4])]
    vp.init_(model, unit(6), orthogonal=False)
    for layer, weight in zip((model[0], model[2], model[4]), expected, strict=True):
        assert apart(layer.weight, weight) <= 1e-5
        assert layer.bias.abs().max() <= 1e-5
