"""GELU of many Gaussians: the closed forms beside the quadrature that serves for few."""

from __future__ import annotations

import pytest
import torch

from varprop.gaussian import activations, gelu


def grid(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and stds of all sizes, zero among them."""
    mean = torch.linspace(-12, 12, 160, dtype=dtype)
    std = torch.cat([torch.zeros(1), torch.logspace(-3, 1.3, 63)]).to(dtype)
    mean, std = torch.meshgrid(mean, std, indexing="ij")
    return mean.contiguous(), std.contiguous()


def test_the_closed_forms_agree_with_quadrature() -> None:
    mean, std = grid(torch.float64)
    assert mean.numel() >= gelu._MANY
    m, v = gelu.gelu_of_many(mean, std)
    expected, spread = activations.gelu(mean, std)
    torch.testing.assert_close(m, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(v, spread, rtol=1e-9, atol=0.0)


def test_precision_is_that_of_the_input_and_derivatives_exist() -> None:
    mean, std = grid(torch.float32)
    assert gelu.gelu_of_many(mean, std)[1].dtype == torch.float32
    mean.requires_grad_()
    m, _ = gelu.gelu_of_many(mean, std)
    assert m.requires_grad


@pytest.mark.parametrize("least, most", [(0.01, 0.3), (0.3, 1.2), (1.2, 4.0), (4.0, 50.0)])
def test_single_precision_loses_little(least: float, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    std = least + (most - least) * torch.rand(gelu._MANY, generator=generator)
    mean = (12 * torch.rand(gelu._MANY, generator=generator) - 6) * (1 + std.square()).sqrt()
    m, v = gelu.gelu_of_many(mean, std)
    expected, var = activations.gelu(mean.double(), std.double())
    assert ((m - expected).abs() <= 1e-6 * var.sqrt() + 2e-5 * expected.abs()).all()
    torch.testing.assert_close(v.double(), var, rtol=1e-4, atol=0.0)


def test_no_variance_gives_the_function_itself() -> None:
    mean = torch.linspace(-20, 20, gelu._MANY)
    m, v = gelu.gelu_of_many(mean, torch.zeros_like(mean))
    expected = torch.nn.functional.gelu(mean.double())
    torch.testing.assert_close(m.double(), expected, rtol=1e-5, atol=1e-12)
    assert (v == 0).all()
