"""Covariances of functions of two Gaussian variables against values of high precision (mpmath, 30 digits)."""

from __future__ import annotations

import pytest
import torch

from varprop.gaussian.bivariate import Nonlinearity, covariance, hermite, rectifier

# mean and std of both variables, their correlation, and Cov(relu X, relu Y)
RELU = [
    (0.0, 1.0, 0.0, 1.0, 0.5, 0.14534394743021933),
    (1.0, 2.0, -1.0, 0.5, -0.8, -0.005912858365079659),
    (-2.0, 1.0, -1.5, 1.0, 0.6, 0.003072197494684741),
    (3.0, 1.0, 0.5, 2.0, 0.95, 1.1371320859138514),
    (0.3, 1.0, 0.2, 1.0, -0.2, -0.0686068236390999),
    (0.0, 1.0, 0.1, 1.0, 0.999, 0.35949707364803396),
]
# the same for tanh
TANH = [
    (0.3, 1.0, -0.5, 0.5, 0.4, 0.08326523003757172),
    (1.0, 0.7, 0.2, 1.5, -0.7, -0.15342766934353008),
]


def column(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def relu(mean: float, std: float, dtype: torch.dtype = torch.float64) -> Nonlinearity:
    return rectifier(*(column(value, dtype=dtype) for value in (mean, std, 0.0, 0.0, 1.0)))


@pytest.mark.parametrize(("m1", "s1", "m2", "s2", "rho", "expected"), RELU)
def test_two_rectifiers(m1: float, s1: float, m2: float, s2: float, rho: float, expected: float) -> None:
    for dtype, error in ((torch.float64, 1e-13 if abs(rho) < 0.99 else 1e-9), (torch.float32, 2e-6)):
        block = torch.full((1, 1), rho * s1 * s2, dtype=dtype)
        result = covariance(relu(m1, s1, dtype), relu(m2, s2, dtype), block)
        assert result.dtype == dtype
        assert abs(float(result) - expected) <= error * s1 * s2


@pytest.mark.parametrize(("m1", "s1", "m2", "s2", "rho", "expected"), TANH)
def test_series(m1: float, s1: float, m2: float, s2: float, rho: float, expected: float) -> None:
    def tanh(mean: float, std: float) -> Nonlinearity:
        first, *further = hermite(torch.tanh, column(mean), column(std))
        return Nonlinearity(column(std), first / std, further)

    result = covariance(tanh(m1, s1), tanh(m2, s2), torch.full((1, 1), rho * s1 * s2, dtype=torch.float64))
    assert abs(float(result) - expected) < 1e-3 * min(s1, 1.0) * min(s2, 1.0)


def test_coefficients_of_a_rectifier_are_those_of_quadrature() -> None:
    mean, std = column(-1.0, 0.0, 0.7), column(0.5, 1.0, 2.0)
    curve = rectifier(mean, std, torch.zeros_like(mean), torch.full_like(mean, 0.2), torch.ones_like(mean))
    first, *further = hermite(lambda x: torch.nn.functional.leaky_relu(x, 0.2), mean, std, breaks=[0.0])
    torch.testing.assert_close(curve.slope * std, first)
    for closed, integrated in zip(curve.coefficients, further, strict=True):
        torch.testing.assert_close(closed, integrated, atol=1e-12, rtol=1e-9)


def test_halves_of_a_symmetric_matrix_agree_with_all_of_it() -> None:
    torch.manual_seed(0)
    factor = torch.randn(300, 8, dtype=torch.float64)
    block, std = factor @ factor.mT, factor.square().sum(1).sqrt()
    curve = rectifier(torch.randn_like(std), std, *(torch.full_like(std, value) for value in (0.0, 0.1, 1.0)))
    twin = Nonlinearity(curve.std, curve.slope, curve.coefficients, curve.kink)
    torch.testing.assert_close(covariance(curve, curve, block), covariance(curve, twin, block))
