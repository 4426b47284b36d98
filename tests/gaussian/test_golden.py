"""Every activation against mpmath: mean, variance and their four derivatives."""

import pytest
import torch

from .cases import GOLDEN, golden, numbers


def _table(name: str, points: str) -> tuple:
    data = golden()
    return numbers(data[points]["mu"]), numbers(data[points]["sigma"]), data["values"][name]


@pytest.mark.parametrize("name", GOLDEN)
def test_float64(name: str) -> None:
    mu, sigma, values = _table(name, "points")
    mean, var = numbers(values["mean"]), numbers(values["var"])
    m, v = GOLDEN[name](mu, sigma)
    held = mean.isfinite() & var.isfinite()  # exp overflows at some points
    assert m.dtype == v.dtype == torch.float64
    assert ((m - mean).abs() <= 1e-12 * (mean.abs() + var.sqrt()))[held].all()
    assert ((v - var).abs() <= 1e-9 * var)[held & (var > 1e-24)].all()
    assert (v >= 0).all()


@pytest.mark.parametrize("name", GOLDEN)
def test_float32(name: str) -> None:
    mu, sigma, values = _table(name, "points")
    mean, var = numbers(values["mean"]), numbers(values["var"])
    m, v = GOLDEN[name](mu.float(), sigma.float())
    largest = torch.finfo(torch.float32).max
    held = (mean.abs() < largest) & (var < largest)
    assert m.dtype == v.dtype == torch.float32
    assert ((m - mean).abs() <= 1e-6 * (1 + mean.abs() + var.sqrt()))[held].all()
    assert ((v - var).abs() <= 3e-4 * var)[held & (var > 1e-6 * sigma.square().clamp(max=1))].all()


@pytest.mark.parametrize("name", GOLDEN)
def test_derivatives(name: str) -> None:
    mu, sigma, values = _table(name, "gradient_points")
    mu.requires_grad_()
    sigma.requires_grad_()
    for output, key in zip(GOLDEN[name](mu, sigma), ("dm", "dv"), strict=True):
        grads = torch.autograd.grad(output.sum(), (mu, sigma), retain_graph=True)
        for grad, by in zip(grads, ("dmu", "dsigma"), strict=True):
            truth = numbers(values[f"{key}_{by}"])
            assert ((grad - truth).abs() <= 1e-9 * truth.abs().clamp(min=1)).all(), (key, by)
