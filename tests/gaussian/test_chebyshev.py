"""Smooth functions at many places by polynomials, beside the quadrature at each."""

from __future__ import annotations

import torch
from torch import Tensor

from varprop.gaussian import activations, quadrature


def _places(low: float, high: float, least: float, most: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = low + (high - low) * torch.rand(3, 700, generator=generator, dtype=torch.float64)
    return mean, least + (most - least) * torch.rand(3, 700, generator=generator, dtype=torch.float64)


def test_polynomials_agree_with_quadrature() -> None:
    for ranges in ((-0.2, 0.3, 0.3, 0.6), (-3.0, 3.0, 0.2, 2.0)):
        mean, std = _places(*ranges)
        found = quadrature.at_many(activations.silu, mean, std)
        assert found is not None
        expected = activations.silu(mean, std)
        torch.testing.assert_close(found[0], expected[0], rtol=0.0, atol=1e-7)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=0.0)


def test_what_is_small_is_computed_one_by_one() -> None:
    mean, std = _places(0.0, 3.0, 0.5, 1.0)
    mean[0, :5], std[0, :5] = -12.0, 0.5
    found = quadrature.at_many(activations.gelu, mean, std)
    assert found is not None
    torch.testing.assert_close(found[1][0, :5], activations.gelu(mean[0, :5], std[0, :5])[1], rtol=1e-9, atol=0.0)


def test_a_corner_does_not_converge() -> None:
    mean, std = _places(-3.0, 3.0, 1e-3, 1e-2)
    assert quadrature.at_many(activations.relu, mean, std) is None
    mean[0, 0] = torch.nan
    assert quadrature.at_many(activations.gelu, mean, std) is None


def test_equal_places_are_no_interval() -> None:
    mean, std = torch.full((2, 3), 0.3, dtype=torch.float64), torch.full((2, 3), 0.7, dtype=torch.float64)
    found = quadrature.at_many(activations.gelu, mean, std)
    assert found is not None
    torch.testing.assert_close(torch.stack(found), torch.stack(activations.gelu(mean, std)), rtol=1e-8, atol=0.0)
