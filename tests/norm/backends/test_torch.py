"""Small layers folded weight by weight, against the same layers as matrices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.norm import Normalized
from varprop.norm.backends import torch as by_torch
from varprop.norm.backends.torch import FlatBlock, MatrixBlock, TorchRows


def _small() -> nn.Sequential:
    convolutions = [nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1, groups=2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(16, 7), nn.ReLU(), nn.Linear(7, 3)).double()


def _normalized(form: str, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    moments = vp.Moments(torch.full((1, 4, 1, 1), 0.3).double(), torch.full((1, 4, 1, 1), 2.0).double())
    model = vp.normalize(_small(), moments, example=torch.zeros(2, 4, 2, 2).double(), form=form)
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, Normalized)):
            layer.weight.mul_(scale)
            layer.scale.uniform_(0.5, 2.0)
            layer.shift.normal_()
    return model


def _network(model: nn.Module):
    layer = next(module for module in model.modules() if isinstance(module, Normalized))
    return layer.networks[True][0]


def _blocks(model: nn.Module) -> list[type]:
    network = _network(model)
    weights = [layer.weight for layer in network.layers]
    return [type(block) for block in TorchRows(network.layout, weights, torch.float64).blocks]


@pytest.mark.parametrize("form", ["paper", "deep"])
@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e170])  # beyond the range of squares rows are divided by their sizes
def test_weight_by_weight_is_as_by_matrices(form, scale, monkeypatch):
    flat_model, x = _normalized(form, scale), torch.randn(5, 4, 2, 2, dtype=torch.float64)
    with_matrices = copy.deepcopy(flat_model)
    assert _blocks(flat_model) == [FlatBlock]
    results = []
    for model, limit in ((flat_model, by_torch.SMALL), (with_matrices, 0)):
        monkeypatch.setattr(by_torch, "SMALL", limit)
        output = model(x)
        output.square().mean().backward()
        results.append([output, *(parameter.grad for parameter in model.parameters())])
    assert _blocks(with_matrices) == [MatrixBlock] * 4
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=float(other.detach().abs().max()) * 1e-13)


def test_large_layers_and_those_with_taps_are_matrices():
    layers = [nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, 3), nn.ReLU(), nn.Linear(3, 6000))
    moments = vp.Moments(torch.zeros(1, 4, 1, 1), torch.ones(1, 4, 1, 1))
    normalized = vp.normalize(model, moments, example=torch.zeros(2, 4, 2, 2), form="paper")
    assert _blocks(normalized) == [FlatBlock, MatrixBlock, FlatBlock, MatrixBlock]
