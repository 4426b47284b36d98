"""Maxima: Clark's pair, order statistics, and k independent entries of any scale."""

import itertools
import math

import pytest
import torch
from scipy import integrate, special
from torch import Tensor

from varprop.gaussian import maximum

TABLE = {  # mathematics.md, section 7
    2: (0.5641895835, 0.6816901138),
    3: (0.8462843753, 0.5594672038),
    4: (1.0293753730, 0.4917152369),
    6: (1.2672063606, 0.4159271090),
    9: (1.4850131622, 0.3573533264),
    16: (1.7659913931, 0.2950098090),
    25: (1.9653146098, 0.2585107775),
}


@pytest.mark.parametrize("k", TABLE)
def test_order_statistics(k: int) -> None:
    e, v = maximum.order_statistic(k)
    assert abs(e - TABLE[k][0]) < 1e-9 and abs(v - TABLE[k][1]) < 1e-9
    mean, std = torch.tensor([1.0, -2.0]).double(), torch.tensor([0.5, 3.0]).double()
    m, w = maximum.iid(mean, std, k)
    torch.testing.assert_close((m, w), (mean + e * std, v * std**2))
    m, w = maximum.independent(mean.expand(k, 2), std.expand(k, 2), 0)
    torch.testing.assert_close(m, mean + e * std, rtol=1e-8, atol=0)
    torch.testing.assert_close(w, v * std**2, rtol=1e-7, atol=0)


def test_one_and_a_million() -> None:
    assert maximum.order_statistic(1) == pytest.approx((0.0, 1.0), abs=1e-15)
    assert maximum.order_statistic(10**6) == pytest.approx((4.8628974862, 0.0615062714), abs=1e-9)


def _truth(mean: list[float], std: list[float]) -> tuple[float, float]:
    """E M and Var M from P(M > t), by adaptive quadrature between all quantiles."""
    low = max(m - 9 * s for m, s in zip(mean, std, strict=True))
    high = max(m + 9.5 * s for m, s in zip(mean, std, strict=True))
    cuts = {m + q / 2 * s for m, s in zip(mean, std, strict=True) for q in range(-18, 20)}
    cuts = sorted({low, high} | {c for c in cuts if low < c < high})

    def above(t: float) -> float:
        logs = (
            special.log_ndtr((t - m) / s) if s else (0.0 if t > m else -math.inf)
            for m, s in zip(mean, std, strict=True)
        )
        return -math.expm1(sum(logs))

    one = two = 0.0
    for a, b in itertools.pairwise(cuts):
        one += integrate.fixed_quad(lambda x: [above(t) for t in x], a, b, n=10)[0]
        two += integrate.fixed_quad(lambda x: [2 * (t - low) * above(t) for t in x], a, b, n=10)[0]
    return low + one, two - one**2


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("constant", [False, True])
def test_independent(spread: float, constant: bool) -> None:
    """Entries of equal and of very different scales, with and without a constant among them."""
    generator = torch.Generator().manual_seed(3)
    mean = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    std = torch.exp(spread * torch.randn(4, 5, generator=generator, dtype=torch.float64))
    if constant:
        std[:, 0] = 0
    m, v = maximum.independent(mean, std, -1)
    for i in range(4):
        tm, tv = _truth(mean[i].tolist(), std[i].tolist())
        assert abs(m[i] - tm) < 1e-7 * math.sqrt(tv)
        assert abs(v[i] / tv - 1) < 1e-6


def test_nearly_constant_entries() -> None:
    """Std 1e-3 ... 1e-12 beside a wide entry: the limit of a constant, Clark's formula throughout."""
    for s in (1e-3, 1e-5, 1e-6, 1e-7, 1e-9, 1e-12):
        mean, std = torch.tensor([0.1, 0.0]).double(), torch.tensor([s, 2.0]).double()
        m, v = maximum.independent(mean, std, 0)
        em, ev = maximum.pair(mean[0], std[0] ** 2, mean[1], std[1] ** 2)
        assert abs(m - em) < 1e-7 and abs(v / ev - 1) < 1e-7


@pytest.mark.parametrize("std", [0.0, 1e-30, 1e-10, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes(std: float, dtype: torch.dtype) -> None:
    rows = [[0.0, 0.0, 1.0], [1e6, 1e6, -1e6], [-1.0, -math.inf, 3.0], [5.0, 5.0, 5.0]]
    mean = torch.tensor(rows, dtype=dtype, requires_grad=True)
    sd = torch.full_like(mean, std).requires_grad_()
    m, v = maximum.independent(mean, sd, -1)
    if std < 1e-5:
        torch.testing.assert_close(m, mean.amax(-1), rtol=1e-9 if dtype == torch.float64 else 1e-6, atol=1e-9)
    assert v.isfinite().all() and (v >= 0).all()
    grads = torch.autograd.grad((m + v).sum(), (mean, sd))
    assert all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(grads[0].sum(-1), torch.ones(4, dtype=dtype))


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    u, w = ((torch.rand(6, generator=generator).double() + 0.2).requires_grad_() for _ in range(2))
    c = torch.linspace(-0.15, 0.15, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(maximum.pair, (a, u, b, w, c))

    def stacked(*x: Tensor) -> tuple[Tensor, Tensor]:
        return maximum.independent(torch.stack(x[:2]), torch.stack(x[2:]), 0)

    assert torch.autograd.gradcheck(stacked, (a, b, u, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pair_of_equals(dtype: torch.dtype) -> None:
    """Perfect correlation, zero variance, ties: X itself, and finite derivatives."""
    mean = torch.tensor([0.0, 1e6, -3.0, 0.0], dtype=dtype, requires_grad=True)
    var = torch.tensor([0.0, 1e-20, 2.0, 1e-30], dtype=dtype, requires_grad=True)
    m, v = maximum.pair(mean, var, mean, var, var.detach())
    torch.testing.assert_close((m, v), (mean, var), rtol=1e-6, atol=1e-9)
    for grad in torch.autograd.grad((m + v).sum(), (mean, var)):
        assert grad.isfinite().all()
    other = torch.full_like(mean, -1e6).requires_grad_()
    torch.testing.assert_close(maximum.pair(mean.detach().clamp(max=10), var, other, var)[1], var)


@pytest.mark.slow
def test_compiles_as_one_graph() -> None:
    def loss(mean: Tensor, std: Tensor) -> Tensor:
        return sum(maximum.independent(mean, std, -1)).sum() + sum(maximum.iid(mean, std, 9)).sum()

    inputs = torch.randn(3, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs)
    )


@pytest.mark.parametrize("count", [2, 3, 9, 25, 100, 256])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0])
def test_entries_of_similar_scales_need_few_nodes(count: int, spread: float) -> None:
    """Fewer nodes give what many give, some entries being absent as at the border of an image."""
    generator = torch.Generator().manual_seed(count)
    mean = spread * torch.randn(40, count, generator=generator, dtype=torch.float64)
    std = 1 + spread / 6 * torch.rand(40, count, generator=generator, dtype=torch.float64)
    mean[:10, count // 2 + 1 :] = -1e100
    std[:5, count // 2 + 1 :] = 0.0
    few = maximum.of_similar_scales(mean, std)
    many = maximum._of_any_scale(mean, std)
    assert few is not None
    assert ((few[0] - many[0]).abs() < 2e-8 * many[1].sqrt()).all()
    assert ((few[1] / many[1] - 1).abs() < 2e-7).all()


def test_entries_of_equal_scales_to_nine_digits() -> None:
    for count in (2, 5, 9, 16, 49, 256):
        e, v = maximum.order_statistic(count)
        m, w = maximum.of_similar_scales(torch.zeros(1, count).double(), torch.ones(1, count).double()) or (None, None)
        assert m is not None and abs(m - e) < 1e-9 and abs(w / v - 1) < 1e-8


def test_scales_that_differ_too_much_are_left_to_the_general_rule() -> None:
    mean = torch.zeros(3, 4).double()
    std = torch.tensor([1.0, 1.0, 1.0, 0.01]).double().expand(3, 4)
    assert maximum.of_similar_scales(mean, std) is None
    assert maximum.of_similar_scales(mean, torch.zeros_like(mean)) is None
    assert maximum.of_similar_scales(mean[:, :1], std[:, :1]) is None


def test_gradients_of_similar_scales() -> None:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    std = (torch.rand(2, 3, generator=generator).double() + 0.7).requires_grad_()
    assert maximum.of_similar_scales(mean, std) is not None
    assert torch.autograd.gradcheck(lambda *x: maximum.independent(*x, -1), (mean, std))
    assert torch.autograd.gradgradcheck(lambda *x: maximum.independent(*x, -1), (mean, std))
