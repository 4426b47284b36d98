"""GELU of many Gaussians: the closed form beside the quadrature that serves for few."""

from __future__ import annotations

import torch

from varprop.gaussian import activations
from varprop.rules import gelu


def grid(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and stds of all sizes, zero among them."""
    mean = torch.linspace(-12, 12, 160, dtype=dtype)
    std = torch.cat([torch.zeros(1), torch.logspace(-3, 1.3, 63)]).to(dtype)
    mean, std = torch.meshgrid(mean, std, indexing="ij")
    return mean.contiguous(), std.contiguous()


def test_the_closed_form_agrees_with_quadrature() -> None:
    mean, std = grid(torch.float64)
    assert mean.numel() >= gelu._MANY
    m, v = gelu.gelu(mean, std)
    expected, spread = activations.gelu(mean, std)
    torch.testing.assert_close(m, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(v, spread, rtol=1e-9, atol=0.0)


def test_precision_is_that_of_the_input_and_derivatives_exist() -> None:
    mean, std = grid(torch.float32)
    assert gelu.gelu(mean, std)[1].dtype == torch.float32
    mean.requires_grad_()
    m, _ = gelu.gelu(mean, std)
    assert m.requires_grad
