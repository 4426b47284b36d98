"""Softmax, log-softmax and log-sum-exp: against sampling, limits, masks, and the coarse setting."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from varprop.gaussian import softmax

FUNCTIONS = [softmax.softmax, softmax.log_softmax, softmax.logsumexp]


def _logits(*shape: int, std: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=generator, dtype=torch.float64)
    return mean, (std * (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64))) ** 2


@pytest.mark.parametrize("std", [0.1, 1.0, 4.0])
def test_against_sampling(std: float) -> None:
    mean, var = _logits(6, std=std)
    generator = torch.Generator().manual_seed(1)
    x = mean + var.sqrt() * torch.randn(100_000, 6, generator=generator, dtype=torch.float64)
    samples = [torch.softmax(x, -1), torch.log_softmax(x, -1), torch.logsumexp(x, -1)]
    for f, sample in zip(FUNCTIONS, samples, strict=True):
        m, v = f(mean, var, -1)
        assert ((m - sample.mean(0)).abs() < 5 * (v / 100_000).sqrt()).all()
        fourth = (sample - m).pow(4).mean(0)
        assert ((v - sample.var(0)).abs() < 5 * (fourth / 100_000).sqrt()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_variance(dtype: torch.dtype) -> None:
    mean = torch.tensor([[1.0, -2.0, 0.5], [30.0, -30.0, 0.0], [1e6, 1e6, -1e6]], dtype=dtype, requires_grad=True)
    var = torch.zeros_like(mean).requires_grad_()
    for f, exact in zip(FUNCTIONS, (torch.softmax, torch.log_softmax, torch.logsumexp), strict=True):
        m, v = f(mean, var, 1)
        torch.testing.assert_close(m, exact(mean, 1), rtol=1e-6, atol=1e-7)
        assert (v == 0).all()
        assert all(g.isfinite().all() for g in torch.autograd.grad((m + v).sum(), (mean, var)))


def test_small_variance_is_linear() -> None:
    mean, var = _logits(3, 5, std=1e-3)
    s = torch.softmax(mean, -1)
    jacobian = torch.diag_embed(s) - s.unsqueeze(-1) * s.unsqueeze(-2)
    _, v = softmax.softmax(mean, var, -1)
    torch.testing.assert_close(v, (jacobian.square() @ var.unsqueeze(-1)).squeeze(-1), rtol=1e-4, atol=0)
    # The integral takes over above std 0.005: the two meet there.
    for f in FUNCTIONS:
        below, above = (f(mean, torch.full_like(var, s**2), -1)[1] for s in (0.005 - 1e-9, 0.005 + 1e-9))
        torch.testing.assert_close(below, above, rtol=1e-3, atol=1e-10)


def test_masked_logits_change_nothing() -> None:
    mean, var = _logits(4, 6)
    wide = torch.cat([mean, torch.full((4, 2), -math.inf)], -1)
    for f in FUNCTIONS:
        m, v = f(mean, var, -1)
        n, w = f(wide, torch.cat([var, torch.ones(4, 2)], -1), -1)
        if f is not softmax.logsumexp:
            assert (n[:, 6:] == (0 if f is softmax.softmax else -math.inf)).all()
            n, w = n[:, :6], w[:, :6]
        torch.testing.assert_close((m, v), (n, w), rtol=1e-8, atol=1e-9)
    blocked = wide.clone().requires_grad_()
    m, v = softmax.softmax(blocked, torch.ones_like(blocked), -1)
    (grad,) = torch.autograd.grad(m.square().sum() + v.sum(), blocked)
    assert grad.isfinite().all() and not grad[:, 6:].any()
    assert all(x.isfinite().all() for x in softmax.softmax(torch.full((1, 3), -math.inf), torch.zeros(1, 3), -1))


@pytest.mark.parametrize("f", FUNCTIONS)
def test_gradcheck(f: Callable) -> None:
    mean, var = _logits(3, 2)
    inputs = (mean.requires_grad_(), var.requires_grad_())
    assert torch.autograd.gradcheck(lambda m, v: f(m, v, 0), inputs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("std", [0.03, 0.1, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("count", [2, 10, 100])
def test_coarse(count: int, std: float) -> None:
    """What the docstring promises of the coarse setting."""
    mean, var = _logits(5, count, std=std)
    (m, v), (n, w) = (softmax.softmax(2 * mean, var, -1, fine=fine) for fine in (True, False))
    assert (m - n).abs().max() < 1e-4 and (v - w).abs().max() < 5e-4
    assert ((w / v).sqrt() - 1).abs().median() < 0.02
    torch.testing.assert_close(n.sum(-1), torch.ones(5, dtype=torch.float64))


def test_blocks_and_axes() -> None:
    mean, var = _logits(3, 7, 900)
    whole = softmax.softmax(mean, var, 1, fine=False)
    part = softmax.softmax(mean[:, :, 5], var[:, :, 5], 1, fine=False)
    torch.testing.assert_close((whole[0][:, :, 5], whole[1][:, :, 5]), part)
    assert softmax.logsumexp(mean.float(), var.float(), 1, fine=False)[0].dtype == torch.float32


def test_one_logit() -> None:
    m, v = softmax.softmax(torch.tensor([[2.0]]), torch.tensor([[3.0]]), -1)
    assert m == 1 and v < 1e-7
    m, v = softmax.logsumexp(torch.tensor([2.0]), torch.tensor([3.0]), -1)
    torch.testing.assert_close((m, v), (torch.tensor(2.0), torch.tensor(3.0)))
