"""Softmax of many logits by series, beside the integrals."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from varprop.gaussian import softmax


def _logits(rows: int, count: int, spread: float, std: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = spread * torch.randn(rows, count, generator=generator, dtype=torch.float64)
    return mean, (std * (0.7 + 0.6 * torch.rand(rows, count, generator=generator, dtype=torch.float64))) ** 2


def _integrals(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """The integrals that are shared by many logits, which are tested against those of each."""
    found = softmax.shared_integrals(mean - mean.amax(-1, keepdim=True), var.sqrt())
    assert found is not None
    return found[0], found[1] - found[0].square()


SIZES = [(16, 0.1, 0.15), (49, 0.3, 0.3), (128, 0.5, 0.5), (197, 0.5, 0.5), (197, 1.0, 0.4), (400, 1.0, 0.6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "spread", "std"), SIZES)
def test_the_series_is_close_where_it_says_so(count: int, spread: float, std: float, dtype: torch.dtype) -> None:
    mean, var = _logits(12, count, spread, std)
    found = softmax.softmax_series(mean.to(dtype), var.to(dtype))
    m, v = (x[found.close] for x in _integrals(mean, var))
    assert ((found.mean[found.close] - m).abs() < 1e-6).all()
    assert (((found.var[found.close] / v).sqrt() - 1).abs() < 2e-3).all()


@pytest.mark.parametrize(("count", "std"), [(64, 0.1), (197, 0.2), (400, 0.3)])
def test_first_order_is_enough_where_it_says_so(count: int, std: float) -> None:
    mean, var = _logits(12, count, 0.1, std)
    x = softmax._exponentials(mean, var)
    assert softmax._is_small(x)
    m, v = _integrals(mean, var)
    for dtype in (torch.float32, torch.float64):
        found = softmax.softmax_series(mean.to(dtype), var.to(dtype))
        assert found.close.all() and ((found.mean - m).abs() < 2e-7).all()
        assert (((found.var / v).sqrt() - 1).abs() < 5e-4).all()
    assert not softmax._is_small(softmax._exponentials(*_logits(12, 16, 0.1, 0.3)))


def test_the_series_is_close_in_attention_at_its_start() -> None:
    assert softmax.softmax_series(*_logits(12, 197, 0.1, 0.2)).close.all()
    assert softmax.softmax_series(*_logits(12, 49, 0.1, 0.2)).close.all()


def test_the_series_says_where_it_is_not_close() -> None:
    for count, spread, std in ((4, 0.1, 0.3), (197, 0.0, 1.5), (64, 4.0, 0.5)):
        assert not softmax.softmax_series(*_logits(12, count, spread, std)).close.any()


def test_small_variances_keep_their_digits_in_single_precision() -> None:
    mean, var = _logits(12, 197, 0.1, 1e-3)
    s = torch.softmax(mean, -1)
    linear = s.square() * ((1 - 2 * s) * var + (s.square() * var).sum(-1, keepdim=True))
    torch.testing.assert_close(
        softmax.softmax_series(mean.float(), var.float()).var.double(), linear, rtol=1e-4, atol=0.0
    )


def test_rows_of_both_kinds_in_one_call() -> None:
    mean, var = _logits(40, 128, 0.1, 0.2)
    var[::2] = 4.0
    mean[5, 3:] = -math.inf  # one with few logits
    mean[7, 60:] = -math.inf
    assert mean.numel() > softmax.FEW
    m, v = softmax.softmax(mean, var, -1)
    some = torch.tensor([1, 2, 5, 7])
    m_fine, v_fine = softmax.softmax(mean[some], var[some], -1, fine=True)
    torch.testing.assert_close(m[some], m_fine, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(v[some].sqrt(), v_fine.sqrt(), rtol=2e-3, atol=1e-9)
    torch.testing.assert_close(softmax.softmax(mean.T, var.T, 0)[1], v.T)


def test_derivatives_of_the_series() -> None:
    mean, var = (x.requires_grad_() for x in _logits(2, 7, 0.2, 0.1))
    assert torch.autograd.gradcheck(lambda m, v: softmax.softmax_series(m, v)[:2], (mean, var))


def test_hidden_rows_have_finite_derivatives() -> None:
    mean, var = _logits(40, 128, 0.1, 0.2)
    mean[3] = -math.inf
    mean.requires_grad_()
    m, v = softmax.softmax(mean, var, -1)
    assert (m[3] == 0).all()
    (slope,) = torch.autograd.grad((m.square() + v).sum(), mean)
    assert slope.isfinite().all()
