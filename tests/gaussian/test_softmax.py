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


# rows, logits, spread of the means, least and largest std: as in attention at the start, later on, and beyond it
ROWS = {
    "a vision transformer": (25, 197, 0.01, 0.12, 0.18),
    "nearly constant": (25, 197, 0.01, 0.011, 0.02),
    "later": (25, 197, 0.2, 1.1, 1.6),
    "trained": (40, 128, 2.5, 3.5, 5.0),
    "some constant": (70, 64, 1.0, 0.0, 2.0),
    "wide": (70, 64, 1.0, 7.0, 8.0),
    "few": (1100, 4, 1.0, 0.5, 1.0),
    "a vocabulary": (3, 2000, 2.0, 0.8, 1.2),
}


def _rows(name: str) -> tuple[Tensor, Tensor]:
    count, width, spread, low, high = ROWS[name]
    generator = torch.Generator().manual_seed(0)
    mean, share = (f(count, width, generator=generator, dtype=torch.float64) for f in (torch.randn, torch.rand))
    return 3.0 + spread * mean, low + (high - low) * share


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_many_logits_share_their_integrals(name: str) -> None:
    """What is promised of them, against the integrals one by one."""
    mean, std = _rows(name)
    assert mean.numel() > softmax.FEW
    assert softmax.shared_integrals(mean - mean.amax(-1, keepdim=True), std) is not None
    for f in FUNCTIONS:
        (m, v), (n, w) = (f(mean, std.square(), -1, fine=fine) for fine in (None, True))
        assert (m - n).abs().max() < 1e-7
        seen = w > 1e-14
        assert ((v / w).sqrt() - 1)[seen].abs().max() < 2e-3
    m, _ = softmax.softmax(mean, std.square(), -1)
    torch.testing.assert_close(m.sum(-1), torch.ones(len(mean), dtype=torch.float64))


def test_hidden_logits_among_many() -> None:
    """A causal mask, as attention writes it and with -inf; a row that is hidden altogether."""
    mean, std = (torch.cat([x[:, :65], x[:, -65:]])[:65] for x in _rows("trained"))
    hidden = torch.ones(65, 65, dtype=torch.bool).triu(1)
    for floor in (-1e4, -math.inf):
        hidden[5] = floor == -math.inf
        inputs = mean.masked_fill(hidden, floor), std.square().masked_fill(hidden, 0.0)
        (m, v), (n, w) = (softmax.softmax(*inputs, -1, fine=fine) for fine in (None, True))
        torch.testing.assert_close((m, v), (n, w), rtol=2e-3, atol=1e-7)
        assert not m[hidden].any()


def test_logits_too_different_to_share_fall_back() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = 2.0 * torch.randn(800, 2, generator=generator, dtype=torch.float64)
    var = (0.1 + 2.9 * torch.rand(800, 2, generator=generator, dtype=torch.float64)).square()
    assert softmax.shared_integrals(mean - mean.amax(-1, keepdim=True), var.sqrt()) is None
    torch.testing.assert_close(softmax.softmax(mean, var, -1), softmax.softmax(mean, var, -1, fine=True))


@pytest.mark.slow
def test_derivatives_of_shared_integrals() -> None:
    """First and second, against differences; and against those of the integrals one by one."""
    mean, std = (x[:2, :4] for x in _rows("later"))
    mean = mean - mean.amax(-1, keepdim=True) - torch.tensor([0.3, 0.1, 0.0, 0.2], dtype=torch.float64)
    inputs = (mean.clone().requires_grad_(), std.clone().requires_grad_())
    assert torch.autograd.gradcheck(softmax.shared_integrals, inputs, rtol=1e-4, atol=1e-6, fast_mode=True)
    assert torch.autograd.gradgradcheck(softmax.shared_integrals, inputs, rtol=1e-3, atol=1e-5, fast_mode=True)
    mean, std = _rows("trained")
    for f in FUNCTIONS:
        found = []
        for fine in (None, True):
            inputs = (mean.clone().requires_grad_(), std.square().requires_grad_())
            m, v = f(*inputs, -1, fine=fine)
            generator = torch.Generator().manual_seed(1)
            weight = torch.randn(m.shape, generator=generator, dtype=torch.float64)
            found.append(torch.autograd.grad((weight * (m + v)).sum(), inputs))
        for a, b in zip(*found, strict=True):
            assert (a - b).abs().max() < 1e-4 * b.abs().max()


def test_shared_integrals_are_not_asked_for_while_compiled_or_transformed() -> None:
    mean, std = _rows("later")
    whole = softmax.softmax(mean, std.square(), -1, fine=True)
    each = torch.func.vmap(lambda m, v: softmax.softmax(m, v, -1))(mean[None], std.square()[None])
    torch.testing.assert_close((each[0][0], each[1][0]), whole, rtol=1e-4, atol=1e-9)
