"""Normalized models folded by the kernels, with a function that has none, against the same models folded by torch."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

import varprop as vp
from varprop.norm import Normalized
from varprop.norm.backends import triton as kernels
from varprop.norm.fold import dispatch

from .reference import error

pytestmark = pytest.mark.kernels


class SquaredReLU(nn.Module):
    def forward(self, x):
        return torch.relu(x).square()


def model_with(activation, device):
    torch.manual_seed(0)
    front = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), activation, nn.Conv2d(5, 5, 1), nn.ReLU()]
    plain = nn.Sequential(*front, nn.Flatten(), nn.Linear(20, 3))
    data = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    model = vp.normalize(plain, data, example=torch.zeros(2, 3, 4, 4))
    with torch.no_grad():
        for layer in (module for module in model.modules() if isinstance(module, Normalized)):
            layer.scale.uniform_(0.5, 1.5), layer.shift.normal_(0, 0.3)
    return model.to(device)


def trained(model, call, device, steps=2):
    """Losses, parameters and gradients of some steps."""
    optimizer, results = torch.optim.SGD(model.parameters(), 0.01), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = call(torch.linspace(-1, 1 + step, 96, device=device).view(2, 3, 4, 4)).square().mean()
        loss.backward()
        results += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*results, *(p.detach() for p in model.parameters())]


def network_of(model):
    return next(module for module in model.modules() if isinstance(module, Normalized)).networks[True][0]


def passes_of(model):
    network = network_of(model)
    backend = network.executor.backend([layer.weight for layer in network.layers])
    return type(backend.moments).__name__, type(backend.rows).__name__


@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("moments", ("TritonMoments", "TorchMoments"))
@pytest.mark.parametrize("activation", (nn.Softsign, nn.LogSigmoid, SquaredReLU))
def test_a_function_without_a_kernel_leaves_rows_to_the_kernels(activation, moments, compiled, monkeypatch, device):
    model = model_with(activation(), device)
    by_torch = copy.deepcopy(model)
    monkeypatch.setattr(dispatch, "_takes_kernels", lambda *_: (False, False))
    expected = trained(by_torch, by_torch, device)
    assert passes_of(by_torch) == ("TorchMoments", "TorchRows")
    monkeypatch.setattr(dispatch, "_takes_kernels", lambda *_: (moments == "TritonMoments", True))
    network_of(model).executor.backends.clear()
    torch.compiler.reset()
    found = trained(model, torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model, device)
    assert passes_of(model) == (moments, "TritonRows")
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs.cpu()) < 1e-4


def test_such_a_network_takes_the_kernels_on_cuda(monkeypatch):
    """Of the choice alone, which asks for the type of the device."""
    model = model_with(nn.Softsign(), "cpu")
    network = network_of(model)
    weights = [layer.weight for layer in network.layers]
    assert kernels.supports(network.layout) and kernels.fits(network.layout, weights)

    class OnCuda:
        device = torch.device("cuda")

    monkeypatch.setattr(kernels, "fits", lambda *_: True)
    monkeypatch.setattr(dispatch, "triton_works", lambda: True)
    assert dispatch._takes_kernels(network.layout, [OnCuda()], torch.float32) == (True, True)
    monkeypatch.setattr(kernels, "supports", lambda *_: False)
    assert dispatch._takes_kernels(network.layout, [OnCuda()], torch.float32) == (False, True)
    assert dispatch._takes_kernels(network.layout, [OnCuda()], torch.float64) == (False, False)
