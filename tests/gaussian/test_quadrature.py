"""The general integral: jumps, kinks, parameters inside the function, growth, and shifted forms."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from varprop.gaussian import activations, normal, quadrature, rectifier
from varprop.gaussian.quadrature import expectation


def _points(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    std = 4 * torch.rand(shape, generator=generator, dtype=torch.float64) + 0.01
    return mean.requires_grad_(), std.requires_grad_()


def _agree(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...], tol: float = 1e-10) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol)
        grads = (torch.autograd.grad(z.sum(), inputs, retain_graph=True) for z in (x, y))
        torch.testing.assert_close(*grads, rtol=tol, atol=tol)


def test_jump_carries_its_delta() -> None:
    """A step at zero by quadrature is the closed form, derivatives included."""
    inputs = _points(40)
    _agree(expectation(lambda x: (x > 0).double(), *inputs, jumps=(0.0,)), rectifier.step(*inputs), inputs)


def test_jump_of_small_std_is_held_like_step() -> None:
    inputs = (torch.zeros(2, dtype=torch.float64, requires_grad=True),)
    std = torch.tensor([1e-10, 1e-4], dtype=torch.float64)
    m, v = expectation(lambda x: (x > 0).double(), *inputs, std, jumps=(0.0,))
    expected = rectifier.step(*inputs, std)
    for a, b in zip((m, v), expected, strict=True):
        grads = (torch.autograd.grad(z.sum(), inputs, retain_graph=True) for z in (a, b))
        torch.testing.assert_close(*grads)


def test_moving_jump() -> None:
    """P(X > b) falls with b as fast as it rises with the mean."""
    mean, std = _points(10)
    at = torch.linspace(-1, 1, 10, dtype=torch.float64, requires_grad=True)
    m, _ = expectation(lambda x: (x > at).double(), mean, std, jumps=(at,))
    by_mean, by_at = torch.autograd.grad(m.sum(), (mean, at))
    torch.testing.assert_close(by_mean, -by_at)


def test_kinks_that_vary_over_the_elements() -> None:
    inputs = _points(4, 6)
    low, high = torch.tensor([[-1.0], [0.0], [0.5], [-3.0]]).double(), torch.linspace(0.6, 4, 6).double()
    ours = expectation(lambda x: torch.minimum(torch.maximum(x, low), high), *inputs, breaks=(low, high))
    _agree(ours, rectifier.clamp(*inputs, low, high), inputs)


@pytest.mark.parametrize("size", [1, 700, pytest.param(15_000, marks=pytest.mark.slow)])
def test_parameters_inside_the_function(size: int) -> None:
    """Slopes of each channel, closed over, get their derivative; whatever the batches of nodes."""
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.randn(size, 1, generator=generator).double(), torch.rand(1, 3, generator=generator).double()
    slope = torch.tensor([0.1, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
    ours = expectation(lambda x: torch.where(x > 0, x, slope * x), *torch.broadcast_tensors(mean, std), breaks=(0.0,))
    _agree(ours, activations.leaky_relu(mean, std, slope), (slope,), 1e-9)


CURVES = [(torch.exp, activations.exp), (torch.sin, activations.sin), (torch.cos, activations.cos)]


@pytest.mark.parametrize(("f", "exact"), CURVES)
def test_smooth_functions(f: quadrature.Pointwise, exact: quadrature.Pointwise) -> None:
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(50, generator=generator, dtype=torch.float64, requires_grad=True)
    std = torch.rand(50, generator=generator, dtype=torch.float64, requires_grad=True)
    _agree(expectation(f, mean, std), exact(mean, std), (mean, std))


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5])
def test_small_std(size: float) -> None:
    """The scaled-down law below 2e-7 (1 + |mean|) joins the integral above it."""
    mean = torch.tensor([-20.0, -3.0, 0.0, 0.7, 6.0], dtype=torch.float64)
    std = torch.full_like(mean, size)
    (m, v), (em, ev) = expectation(torch.exp, mean, std), activations.exp(mean, std)
    assert ((m - em).abs() <= 1e-12 * (em + ev.sqrt())).all()
    torch.testing.assert_close(v, ev, rtol=1e-9, atol=0)


def test_shifted_keeps_the_digits_of_a_saturated_unit() -> None:
    """Plain x -> 1 + e^x has no variance left at mean -30; its tail has."""
    mean, std = (torch.tensor([x], dtype=torch.float64) for x in (-30.0, 1.0))
    m, v = quadrature.shifted(lambda x: 1 + torch.exp(x), torch.exp, 1.0, mean < -1, mean, std)
    torch.testing.assert_close(v, activations.exp(mean, std)[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(m, 1 + activations.exp(mean, std)[0])


def test_gauss_legendre() -> None:
    nodes, weights = normal.gauss_legendre(24)
    for power in range(0, 48, 2):
        assert math.isclose(
            math.fsum(w * x**power for x, w in zip(nodes, weights, strict=True)), 2 / (power + 1), rel_tol=1e-13
        )


@pytest.mark.parametrize("mean", [-3.0, -1.5, 1.5, 3.0])
def test_the_limits_of_arctan_have_all_their_digits(mean: float) -> None:
    """Also where torch's default dtype is float32, in which pi/2 has eight."""
    m, _ = activations.atan(torch.tensor([mean], dtype=torch.float64), torch.tensor([1e-9], dtype=torch.float64))
    assert abs(m.item() - math.atan(mean)) < 1e-14


CROSSED = {
    "two": (lambda x: x * x - 1.0, (-1.0, 1.0)),
    "a bend": (lambda x: 1.0 - x.abs(), (-1.0, 1.0)),
    "a jump": (lambda x: torch.where(x > 0.375, 1.0, -1.0), (0.375,)),
    "flat": (lambda x: (x - 0.5) ** 3, (0.5,)),
    "steep": (lambda x: torch.expm1(40.0 * (x - 0.25)), (0.25,)),
    "none": (lambda x: x * x + 1.0, ()),
}


@pytest.mark.parametrize(("function", "zeros"), CROSSED.values(), ids=CROSSED)
def test_crossings_are_all_zeros_within_nine_standard_deviations(function: Any, zeros: tuple[float, ...]) -> None:
    mean, std = (x.detach() for x in _points(60))
    points = torch.stack(quadrature.crossings(function, mean, std, 4))
    rough = torch.stack(quadrature.crossings(function, mean, std, 4, precise=False))
    for zero in zeros:
        reached = (zero - mean).abs() < 8.9 * std
        distance, error = ((found - zero).abs().amin(0)[reached] for found in (points, rough))
        assert bool((distance <= 4e-15 * (std + mean.abs() + 9 * std)[reached]).all())
        assert bool((error <= 0.02 * std[reached]).all())
    nearest = torch.stack([(points - zero).abs() for zero in zeros]).amin(0) if zeros else torch.full_like(points, 1.0)
    assert bool(((nearest < 1e-12) | (points == mean)).all())
