"""What every function must do whatever its formula: limits, derivatives, dtypes, transforms."""

import itertools

import pytest
import torch
from torch import Tensor

from varprop.gaussian.normal import BLOCK, safe_sqrt

from .cases import ALL, LOGNORMAL

MEANS = (0.0, 1e-10, -1e-10, 0.1, 0.5, -0.5, 1.0, -1.0, 3.0, -3.0, 9.0, 30.0, -30.0)
FAR = (1e3, -1e3, 1e6, -1e6)


def _extremes(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    means = MEANS if name in ("exp", "expm1", "fifth") else MEANS + FAR
    pairs = list(itertools.product(means, (0.0, 1e-30, 1e-10, 1e-3, 1.0, 3.0)))
    mean, std = torch.tensor(pairs, dtype=dtype).unbind(1)
    return mean.requires_grad_(), std.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ALL | LOGNORMAL)
def test_finite_everywhere(name: str, dtype: torch.dtype) -> None:
    mean, std = _extremes(name, dtype)
    if name in LOGNORMAL and dtype == torch.float32:
        mean = mean.detach().abs().clamp(min=1e-3).requires_grad_()  # 1/x itself overflows below
    m, v = (ALL | LOGNORMAL)[name](mean, std)
    assert m.isfinite().all() and v.isfinite().all() and (v >= 0).all()
    for output in (m, v):
        for grad in torch.autograd.grad(output.sum(), (mean, std), retain_graph=True, materialize_grads=True):
            assert grad.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_zero_variance_gives_the_function(name: str) -> None:
    """At std = 0 the variance vanishes and the mean is f(mean); the mean of a tiny std is close to it."""
    mean = torch.tensor([-2.3, -0.7, 0.3, 1.4, 4.6], dtype=torch.float64)
    m0, v0 = ALL[name](mean, torch.zeros_like(mean))
    m1, v1 = ALL[name](mean, torch.full_like(mean, 1e-9))
    assert (v0 == 0).all()
    torch.testing.assert_close(m0, m1, rtol=1e-9, atol=1e-14)
    slope = torch.func.vmap(torch.func.grad(lambda x: ALL[name](x, torch.zeros_like(x))[0]))(mean)
    torch.testing.assert_close(v1, 1e-18 * slope.square(), rtol=1e-6, atol=1e-27)


@pytest.mark.parametrize("name", ALL | LOGNORMAL)
def test_gradcheck(name: str) -> None:
    mean = torch.tensor([-2.3, 0.3, 1.4], dtype=torch.float64)
    mean = mean.abs() + 0.5 if name in LOGNORMAL else mean
    std = torch.tensor([0.6, 0.2, 2.1], dtype=torch.float64)
    inputs = (mean.requires_grad_(), std.requires_grad_())
    assert torch.autograd.gradcheck((ALL | LOGNORMAL)[name], inputs, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_second_and_forward_derivatives(name: str) -> None:
    """At mean zero, where every projected layer starts, beside it, and for a small std; all against differences."""
    mean = torch.tensor([0.0, 0.0, 0.0, -1.0, 0.7, -0.1], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([1.0, 2.0, 0.05, 0.4, 1.3, 0.1], dtype=torch.float64, requires_grad=True)
    quick = {"fast_mode": True, "check_undefined_grad": False}
    assert torch.autograd.gradcheck(ALL[name], (mean, std), atol=1e-6, rtol=1e-5, check_forward_ad=True, **quick)
    if not all(x.requires_grad for x in ALL[name](mean, std)):
        return  # a constant
    assert torch.autograd.gradgradcheck(ALL[name], (mean, std), atol=1e-5, rtol=1e-5, check_fwd_over_rev=True, **quick)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_way_to_the_hessian(name: str) -> None:
    """Forward and reverse in either order, as torch.func mixes them."""
    jacfwd, jacrev = torch.func.jacfwd, torch.func.jacrev

    def f(x: Tensor) -> Tensor:
        m, v = ALL[name](x[0], x[1])
        return m + 0.7 * v

    x = torch.tensor([0.0, 1.2], dtype=torch.float64)
    truth = jacrev(jacrev(f))(x)
    for hessian in (jacfwd(jacfwd(f)), jacfwd(jacrev(f)), jacrev(jacfwd(f))):
        torch.testing.assert_close(hessian(x), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["relu", "abs", "prelu_0.25", "relu6", "hardtanh", "step", "selu", "hardshrink"])
def test_second_derivatives_are_finite(name: str, dtype: torch.dtype) -> None:
    mean, std = _extremes(name, dtype)
    m, v = ALL[name](mean, std)
    for first in torch.autograd.grad((m + v).sum(), (mean, std), create_graph=True):
        for second in torch.autograd.grad(first.sum(), (mean, std), retain_graph=True, materialize_grads=True):
            assert second.isfinite().all()


@pytest.mark.parametrize("name", ["relu", "relu6", "sigmoid", "elu", "step", "cube"])
def test_shapes_and_dtypes(name: str) -> None:
    mean, std = torch.randn(3, 1), torch.rand(4)
    m, v = ALL[name](mean, std)
    assert m.shape == v.shape == (3, 4)
    half = ALL[name](mean.half(), std.half())
    assert half[0].dtype == half[1].dtype == torch.float16
    assert ALL[name](mean.double(), std)[0].dtype == torch.float64
    meta = ALL[name](mean.to("meta"), std.to("meta"))
    assert meta[0].shape == meta[1].shape == (3, 4)
    large = ALL[name](torch.zeros(3, BLOCK), torch.ones(3, BLOCK))
    torch.testing.assert_close(large, tuple(x.expand(3, BLOCK) for x in ALL[name](torch.zeros(1), torch.ones(1))))


COMPILED = dict.fromkeys(("relu", "clamp_-0.5_2", "step", "sigmoid", "elu", "cube", "sin"), "aot_eager")
COMPILED["hardshrink"] = "eager"  # all of its operations, backward too, are among those of the others


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_as_one_graph(name: str) -> None:
    function = ALL[name]

    def loss(mean: Tensor, std: Tensor) -> Tensor:
        m, v = function(mean, std)
        return (m + v).sum()

    inputs = torch.randn(5, requires_grad=True), torch.rand(5, requires_grad=True)
    compiled = torch.compile(loss, fullgraph=True, backend=COMPILED[name])
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs)
    )


@pytest.mark.parametrize("name", ["relu", "relu6", "sign", "tanh", "softsign", "threshold", "cube"])
def test_vmap_of_grad(name: str) -> None:
    mean, std = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.1
    whole = mean.clone().requires_grad_()
    expected = torch.autograd.grad(ALL[name](whole, std)[1].sum(), whole)[0]
    each = torch.func.vmap(torch.func.grad(lambda m, s: ALL[name](m, s)[1]))(mean, std)
    torch.testing.assert_close(each, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_safe_sqrt(dtype: torch.dtype) -> None:
    var = torch.tensor([0.0, 1e-6, 4.0, -1e-7], dtype=dtype, requires_grad=True)
    root = safe_sqrt(var)
    torch.testing.assert_close(root.detach(), var.detach().clamp(min=0).sqrt())
    (grad,) = torch.autograd.grad(root.sum(), var)
    assert grad.isfinite().all() and grad[2] == 0.25
    forward, tangent = torch.func.jvp(safe_sqrt, (var.detach(),), (torch.ones_like(var),))
    torch.testing.assert_close((forward, tangent), (root.detach(), grad))
