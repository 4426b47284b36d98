"""Parameters of the piecewise linear functions, and the scaled partial moments beneath them."""

import math

import mpmath
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from varprop.gaussian import normal, rectifier

PHI = 1.0 / math.sqrt(2.0 * math.pi)


@pytest.mark.parametrize("x", [0.0, 0.3, 1.0, 2.5, 3.999, 4.0, 4.001, 7.0, 15.0, 38.0])
def test_mills(x: float) -> None:
    with mpmath.workdps(40):
        z = mpmath.mpf(x)
        density = mpmath.npdf(z)
        h0 = mpmath.ncdf(-z) / density
        truth = [h0, 1 - z * h0, (1 + z * z) * h0 - z]
        ours = normal.mills(torch.tensor(x, dtype=torch.float64))
        assert all(abs(float(h) / t - 1) < 5e-14 for h, t in zip(ours, truth, strict=True))


def test_slopes_of_every_sign() -> None:
    """Tensor slopes broadcast, have derivatives, and equal slopes give the line."""
    mean = torch.linspace(-3, 3, 5, dtype=torch.float64).unsqueeze(1).requires_grad_()
    std = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
    s = torch.tensor([1.0, -0.5, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([-1.0, -2.0, 2.0, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rectifier.two_slopes, (mean, std, s, t))
    m, v = rectifier.two_slopes(mean, std, s, t)
    torch.testing.assert_close(m[:, 2], 2 * mean[:, 0])
    torch.testing.assert_close(v[:, 2], (4 * std[2] ** 2).expand(5))


def test_derivatives_of_the_derivatives() -> None:
    """The hand-written backward passes are differentiable themselves."""
    mean = torch.tensor([-1.2, 0.4, 2.0], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda m, s: rectifier.two_slopes(m, s, 1.0, 0.1), (mean, std))
    assert torch.autograd.gradgradcheck(rectifier.step, (mean, std))


def test_second_derivatives_at_zero() -> None:
    """In closed form at mean zero: m has phi(0)/std, v the Hessian of E relu^2 - m^2 (mathematics.md, 2.7)."""
    mean, std = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (0.0, 1.7))
    for output, truth in zip(
        rectifier.two_slopes(mean, std, 1.0, 0.0),
        ([[PHI / 1.7, 0.0], [0.0, 0.0]], [[0.5 - 1.0 / math.pi, PHI], [PHI, 1.0 - 1.0 / math.pi]]),
        strict=True,
    ):
        grads = torch.autograd.grad(output, (mean, std), create_graph=True)
        rows = [
            torch.cat(torch.autograd.grad(g, (mean, std), retain_graph=True, materialize_grads=True)) for g in grads
        ]
        torch.testing.assert_close(torch.stack(rows), torch.tensor(truth, dtype=torch.float64))


@pytest.mark.parametrize("width", [1e-9, 0.1, 1.0, 5.0, 50.0])
def test_clamp_bounds(width: float) -> None:
    mean = torch.linspace(-3, 3, 5, dtype=torch.float64).requires_grad_()
    std = torch.tensor([0.3, 1.0, 2.0, 0.7, 0.4], dtype=torch.float64, requires_grad=True)
    low = torch.tensor([-1.0, 0.0, 0.5, -2.0, 1.0], dtype=torch.float64, requires_grad=True)
    high = (low + width).detach().requires_grad_()
    inputs = (mean, std, low, high)
    if width > 1e-6:
        assert torch.autograd.gradcheck(rectifier.clamp, inputs)
    m, v = rectifier.clamp(*inputs)
    assert ((m >= low) & (m <= high) & (v <= width**2 / 4 * (1 + 1e-12))).all()


@pytest.mark.parametrize("far", [1e16, 1e38, 1.7e308])
@pytest.mark.parametrize("ends", [(-1, 1), (-1, None), (None, 1), (-1, 0), (0, 1)])
def test_a_bound_that_nothing_reaches_takes_no_digits(ends: tuple[int | None, int | None], far: float) -> None:
    mean, std = torch.tensor([-2.0, 0.1, 3.0]).double(), torch.tensor([0.5, 1.0, 0.2]).double()
    bounds = [end if end is None else float(end * far) for end in ends]
    without = [None if bound is None or bound else bound for bound in bounds]
    for found, expected in zip(rectifier.clamp(mean, std, *bounds), rectifier.clamp(mean, std, *without), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)


def test_clamp_joins_its_two_branches() -> None:
    """At a width of two std the rectifiers give way to the integrals: no step to be seen."""
    mean = torch.linspace(-9, 9, 37, dtype=torch.float64)
    (m1, v1), (m2, v2) = (rectifier.clamp(mean, torch.full_like(mean, s), -1.0, 1.0) for s in (1.0, 1.0 + 1e-13))
    torch.testing.assert_close(m1, m2, rtol=0, atol=1e-12)
    held = v1 > 1e-24
    torch.testing.assert_close(v1[held], v2[held], rtol=1e-9, atol=0)


def test_clamp_of_crossed_bounds_is_the_upper_one() -> None:
    m, v = rectifier.clamp(torch.zeros(1), torch.ones(1), 2.0, 1.0)
    assert m == 1 and v == 0


def test_step_and_sign_of_a_constant() -> None:
    mean, zero = torch.tensor([-1.0, 0.0, 1e-20, 2.0]), torch.zeros(4)
    assert rectifier.step(mean, zero)[0].tolist() == [0, 0, 1, 1]
    assert rectifier.sign(mean, zero)[0].tolist() == [-1, 0, 1, 1]
    assert not rectifier.sign(mean, zero)[1].any()


def test_mills_of_near_values_does_not_depend_on_what_is_beside_them() -> None:
    x = torch.linspace(0, 3.99, 50, dtype=torch.float64)
    alone, beside = normal.mills(x), normal.mills(torch.cat([x, torch.tensor([4.0, 50.0], dtype=torch.float64)]))
    assert all(torch.equal(one, other[:-2]) for one, other in zip(alone, beside, strict=True))


def test_mills_written_down_for_near_values_holds_for_far_ones() -> None:
    near, far = torch.tensor([0.5], dtype=torch.float64), torch.tensor([9.0], dtype=torch.float64)
    graph = make_fx(normal.mills)(near)
    assert all(torch.equal(one, other) for one, other in zip(graph(far), normal.mills(far), strict=True))


@pytest.mark.parametrize("slopes", [(1.0, 0.0), (1.0, 0.03), (0.0, 1.0), (1.0, -1.0), (2.0, 0.5), (-1.0, 0.0)])
@pytest.mark.parametrize("furthest", [0.0, 2.999, 3.001, 60.0])
def test_what_is_written_out_near_the_bend_is_the_same(slopes: tuple[float, float], furthest: float) -> None:
    std = torch.logspace(-6, 3, 40).double()
    mean = furthest * std * torch.linspace(-1, 1, 41).double()[:, None]
    x = mean.flatten(), std.square().expand_as(mean).flatten()
    moments, [derivatives] = rectifier.two_slopes_by_variance(x, *slopes)
    expected, [slopes_expected] = rectifier.two_slopes_with_slopes(x, *slopes)
    torch.testing.assert_close(moments, expected, rtol=2e-12, atol=1e-300)
    unit, root = torch.ones_like(x[1]), x[1].sqrt()
    sizes = torch.stack([unit, 1 / root, root, unit])
    torch.testing.assert_close(derivatives / sizes, slopes_expected / sizes, rtol=2e-12, atol=1e-15)


def test_no_std_and_no_elements() -> None:
    zero, none = torch.zeros(3).double(), torch.zeros(0).double()
    moments, [derivatives] = rectifier.two_slopes_by_variance((torch.tensor([-1.0, 0.0, 2.0]).double(), zero), 1.0, 0.0)
    assert moments.tolist() == [[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]] and bool(derivatives.isfinite().all())
    assert rectifier.two_slopes_by_variance((none, none), 1.0, 0.0)[0].shape == (2, 0)
