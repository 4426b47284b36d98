"""Functions written out by hand are one function of one variable."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import varprop as vp
from varprop.engine import clusters
from varprop.gaussian import activations, quadrature, rectifier

Pair = tuple[Tensor, Tensor]


class Pointwise(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def grid(dtype: torch.dtype = torch.float64) -> vp.Moments:
    mean, std = torch.meshgrid(
        torch.tensor([-4.0, -1.0, 0.0, 0.3, 2.0, 5.0], dtype=dtype),
        torch.tensor([1e-3, 0.1, 0.7, 1.0, 3.0, 10.0], dtype=dtype),
        indexing="ij",
    )
    return vp.Moments(mean.reshape(1, -1), std.square().reshape(1, -1))


BY_HAND: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Pair]]] = {
    "the paper's rectifier": (lambda x: F.relu(x) + 0.03 * x, lambda m, s: rectifier.two_slopes(m, s, 1.03, 0.03)),
    "silu": (lambda x: x * torch.sigmoid(x), activations.silu),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), activations.gelu),
    "tanh gelu": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
        activations.gelu_tanh,
    ),
    "mish": (lambda x: x * torch.tanh(F.softplus(x)), activations.mish),
    "maximum": (lambda x: torch.maximum(x, 0.1 * x), lambda m, s: rectifier.two_slopes(m, s, 1.0, 0.1)),
    "where": (lambda x: torch.where(x > 0, x, 0.2 * x), lambda m, s: rectifier.two_slopes(m, s, 1.0, 0.2)),
    "masked": (lambda x: x * (x > 0), activations.relu),
    "clamped": (lambda x: x.clamp(min=0), activations.relu),
    "sigmoid": (lambda x: 1 / (1 + torch.exp(-x)), activations.sigmoid),
    "softsign": (lambda x: x / (1 + x.abs()), activations.softsign),
    "softplus": (lambda x: torch.log(1 + torch.exp(x)), activations.softplus),
    "hardswish": (lambda x: x * F.relu6(x + 3) / 6, activations.hardswish),
    "tanhshrink": (
        F.tanhshrink,
        lambda m, s: quadrature.expectation(F.tanhshrink, m, s, knots=activations.KNOTS["tanh"]),
    ),
    "softsign module": (F.softsign, activations.softsign),
    "shifted relu": (lambda x: F.relu(2 * x - 1) * 3 + 1, lambda m, s: _affine(activations.relu(2 * m - 1, 2 * s))),
    "clamped logit": (
        lambda x: torch.logit(x, eps=0.2),
        lambda m, s: quadrature.expectation(lambda x: torch.logit(x.clamp(0.2, 0.8)), m, s, breaks=(0.2, 0.8)),
    ),
    "nested": (lambda x: F.relu(F.relu(x) - 0.5), lambda m, s: activations.relu(m - 0.5, s)),
    "band": (
        lambda x: x * ((x > -0.5) & (x < 1.5)) + x * ~((x > -0.5) & (x < 1.5)) * 0.0,
        lambda m, s: _band(m, s, lambda x: x, outside=0.0),
    ),
    "outside": (lambda x: ((x < -0.5) | (x > 1.5)).double(), lambda m, s: _band(m, s, torch.zeros_like, outside=1.0)),
    "stairs": (
        lambda x: (x > -0.5).double() + (x > 1.5).to(x) - (x < -0.5).int(),
        lambda m, s: _expected(lambda x: (x > -0.5) * 2.0 + (x > 1.5) * 1.0 - 1, m, s, jumps=(-0.5, 1.5)),
    ),
    "curved kink": (lambda x: F.relu(torch.tanh(x)) + F.relu(-torch.tanh(x)), lambda m, s: _abs_tanh(m, s)),
}


def test_an_arctangent_keeps_its_digits_near_its_limits() -> None:
    """There its slope is 1 / x^2: the std is 1e-18 where the value is 1.57."""
    x = vp.Moments(torch.full((1, 1), 1e9, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    found = vp.propagate(Pointwise(torch.atan), x).output
    assert found.var.item() == pytest.approx(1e-36, rel=1e-9, abs=0.0)


@pytest.mark.parametrize("sharpness", [3.0, 10.0, 40.0])
def test_a_bump_much_narrower_than_its_argument_is_found(sharpness: float) -> None:
    """As a radial basis function is: E exp(-k (x - c)^2) is known in closed form."""
    mean = torch.linspace(-2, 2, 9, dtype=torch.float64).view(1, -1)

    def expected(k: float) -> Tensor:
        return (-k * (mean - 0.2).square() / (1 + 2 * k)).exp() / math.sqrt(1 + 2 * k)

    bump = Pointwise(lambda x: torch.exp(-(sharpness**2) * (x - 0.2).square()))
    found = vp.propagate(bump, vp.Moments(mean, torch.ones_like(mean))).output
    m, second = expected(sharpness**2), expected(2 * sharpness**2)
    torch.testing.assert_close(found.mean, m, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.var, second - m.square(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("sharpness", "many"), [(3.0, False), (10.0, False), (40.0, False), (10.0, True)])
def test_a_peak_of_a_quotient_is_found(sharpness: float, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "PANELS_OF_ALL", 0 if many else clusters.PANELS_OF_ALL)
    mean = torch.linspace(-2, 2, 9, dtype=torch.float64)
    peak = Pointwise(lambda x: 1 / (1 + (sharpness * (x - 0.2)).square()))
    found = vp.propagate(peak, vp.Moments(mean, torch.ones_like(mean))).output
    x = torch.linspace(-12, 12, 200_001, dtype=torch.float64).view(-1, 1)
    weight = torch.exp(-0.5 * (x - mean).square()) * (x[1] - x[0]) / math.sqrt(2 * math.pi)
    m = (weight * peak(x)).sum(0)
    std = (weight * (peak(x) - m).square()).sum(0).sqrt()
    assert ((found.mean - m) / std).abs().max() < 1e-3 and (found.std / std - 1).abs().max() < 1e-3


@pytest.mark.parametrize("exponent", [0.5, -0.5, -1, 1.5])
def test_a_power_inside_a_function_is_that_of_a_positive_variable(exponent: float) -> None:
    """sin(x ** 0.5) as sin(x.sqrt()): the base, not the whole expression, must be positive."""
    x = vp.Moments(torch.full((1, 2), 2.0, dtype=torch.float64), torch.tensor([[0.04, 0.25]], dtype=torch.float64))
    found = vp.propagate(Pointwise(lambda x: torch.sin(x**exponent)), x).output
    torch.manual_seed(0)
    log = (0.5 * torch.log1p(x.var / 4), torch.log1p(x.var / 4).sqrt())
    drawn = torch.sin((2.0 * torch.exp(log[1] * torch.randn(400_000, 2, dtype=torch.float64) - log[0])) ** exponent)
    errors = 5 * found.std / 400_000**0.5
    assert ((found.mean - drawn.mean(0)).abs() < errors).all()
    assert ((found.std - drawn.std(0)).abs() < 2 * errors).all()
    if exponent == 0.5:
        root = vp.propagate(Pointwise(lambda x: torch.sin(x.sqrt())), x).output
        torch.testing.assert_close((found.mean, found.var), (root.mean, root.var))


@pytest.mark.parametrize("function", [lambda x: 2**x, lambda x: 2.0**x, lambda x: torch.tensor([0.5, 3.0]) ** x])
def test_a_random_exponent_is_exact(function: Callable[[Tensor], Tensor]) -> None:
    """b^x = exp(x log b), a closed form; nothing is taken as log-normal."""
    mean, var = torch.tensor([[2.0, -1.0]], dtype=torch.float64), torch.tensor([[0.04, 1.0]], dtype=torch.float64)
    result = vp.propagate(Pointwise(function), vp.Moments(mean, var))
    rate = function(torch.ones(1, 2, dtype=torch.float64)).log()
    m, v = activations.exp(rate * mean, rate.abs() * var.sqrt())
    torch.testing.assert_close((result.output.mean, result.output.var), (m, v))
    assert all(entry.status == "exact" for entry in result.entries)
    assert all(entry.status == "exact" for entry in vp.coverage(Pointwise(function), mean).entries)


def _affine(pair: Pair) -> Pair:
    return 3 * pair[0] + 1, 9 * pair[1]


def _band(mean: Tensor, std: Tensor, inside: Callable[[Tensor], Tensor], outside: float) -> Pair:
    from varprop.gaussian.quadrature import expectation

    return expectation(lambda x: torch.where((x > -0.5) & (x < 1.5), inside(x), outside), mean, std, jumps=(-0.5, 1.5))


def _expected(function: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor, jumps: tuple[float, ...]) -> Pair:
    return quadrature.expectation(function, mean, std, jumps=jumps)


def _abs_tanh(mean: Tensor, std: Tensor) -> Pair:
    from varprop.gaussian.quadrature import expectation

    return expectation(lambda x: torch.tanh(x).abs(), mean, std, breaks=(0.0,), knots=(-4.5, 4.5, -20.0, 20.0))


@pytest.mark.parametrize("name", BY_HAND)
def test_written_by_hand_equals_the_closed_form(name: str) -> None:
    function, closed = BY_HAND[name]
    x = grid()
    output = vp.propagate(Pointwise(function), x).output
    mean, var = closed(x.mean, x.std)
    scale = mean.abs() + var.sqrt()
    assert ((output.mean - mean).abs() <= 1e-9 * scale + 1e-12).all()
    assert ((output.var - var).abs() <= 1e-7 * var + 1e-14).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_of_hand_written_functions(name: str) -> None:
    program = vp.capture(Pointwise(BY_HAND[name][0]), torch.zeros(1, 4, dtype=torch.float64))

    def moments(mean: Tensor, var: Tensor) -> Pair:
        output = vp.propagate(program, vp.Moments(mean, var)).output
        return output.mean, output.var

    mean = torch.tensor([[-1.2, 0.1, 0.4, 2.0]], dtype=torch.float64, requires_grad=True)
    var = torch.tensor([[0.5, 1.0, 0.04, 2.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(moments, (mean, var))


@pytest.mark.parametrize(
    "function",
    [torch.minimum, torch.fmax, torch.logaddexp, lambda x, bound: torch.where(x > bound, x, bound * x)],
    ids=["minimum", "fmax", "logaddexp", "where"],
)
def test_one_value_may_be_held_against_many_points(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Uniform axes are stored once, but the constants along them differ."""
    model = Pointwise(lambda x: function(x, torch.linspace(-1, 1, 5, dtype=x.dtype)))
    mean = torch.tensor([0.3, -0.2], dtype=torch.float64).view(1, 2, 1)
    once = vp.propagate(model, vp.Moments(mean, 0.7), torch.zeros(1, 2, 5, dtype=torch.float64)).output
    written_out = vp.propagate(model, vp.Moments(mean.expand(1, 2, 5).contiguous(), 0.7)).output
    torch.testing.assert_close((once.mean, once.var), (written_out.mean, written_out.var))


def test_a_cast_to_truth_values_asks_for_zero() -> None:
    x = grid()
    certain = vp.propagate(Pointwise(lambda x: x.bool().double()), x).output
    torch.testing.assert_close((certain.mean, certain.var), (torch.ones_like(x.mean), torch.zeros_like(x.var)))
    result = vp.propagate(Pointwise(lambda x: F.relu(x).bool().double()), x)
    positive = torch.special.ndtr(x.mean / x.std)
    torch.testing.assert_close(result.output.mean, positive, rtol=0, atol=1e-9)
    torch.testing.assert_close(result.output.var, positive * (1 - positive), rtol=0, atol=1e-9)
    assert not result.approximations


def test_residual_sum_of_one_variable_is_not_a_sum_of_independent_ones() -> None:
    output = vp.propagate(Pointwise(lambda x: x + x + x), grid()).output
    torch.testing.assert_close(output.var, 9 * grid().var)


def test_different_elements_are_different_variables() -> None:
    result = vp.propagate(Pointwise(lambda x: x[:, :3] * x[:, 3:]), vp.Moments(torch.zeros(1, 6), torch.ones(1, 6)))
    torch.testing.assert_close(result.output.var, torch.ones(1, 3))
    assert any("assumes independence" in reason for entry in result.approximations for reason in entry.reasons)


def test_parameters_inside_a_cluster_get_gradients() -> None:
    class Swish(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.beta = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64).view(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(self.beta * x)

    model = Swish()
    moments = vp.Moments(*(torch.ones(1, 2, 3, dtype=torch.float64) for _ in range(2)))
    output = vp.propagate(model, moments, gradients=True).output
    output.var.sum().backward()
    assert model.beta.grad is not None and (model.beta.grad != 0).all()


STEPS: list[Callable[[Tensor], Tensor]] = [
    F.relu, torch.tanh, torch.sigmoid, F.gelu, torch.abs, F.softplus,
    lambda x: 1.5 * x - 0.3, lambda x: x * torch.sigmoid(x), lambda x: x.clamp(-1, 2),
    lambda x: torch.maximum(x, -x / 2),
    lambda x: torch.where(x > 0.2, x, 0.1 * x), lambda x: x * x / 4,
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(range(len(STEPS))), min_size=1, max_size=4), st.floats(-2, 2), st.floats(0.2, 2))
def test_any_chain_agrees_with_the_integral(chain: list[int], mean: float, std: float) -> None:
    def function(x: Tensor) -> Tensor:
        for index in chain:
            x = STEPS[index](x)
        return x

    moments = vp.Moments(torch.full((1, 1), mean, dtype=torch.float64), torch.full((1, 1), std**2, dtype=torch.float64))
    output = vp.propagate(Pointwise(function), moments).output
    z = torch.linspace(-9, 9, 400_001, dtype=torch.float64)  # a jump between two points costs 4e-6
    weights = torch.softmax(-z * z / 2, 0)
    values = function(mean + std * z)
    expected = weights @ values
    spread = weights @ (values - expected).square()
    assert abs(expected - output.mean.item()) <= 1e-5 * (1 + abs(expected))
    assert abs(spread - output.var.item()) <= 1e-5 * (1 + spread)


def test_many_elements_of_a_smooth_function_are_interpolated() -> None:
    """As exact as quadrature, which serves for few of them."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(1, 20_000, generator=generator)
    var = (0.2 + torch.rand(1, 20_000, generator=generator)).square()

    class Curve(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))

    found = vp.propagate(Curve(), vp.Moments(mean, var)).output
    some = slice(None, None, 200)
    m, v = activations.gelu_tanh(mean[:, some].double(), var[:, some].double().sqrt())
    torch.testing.assert_close(found.mean[:, some].double(), m, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.var[:, some].double(), v, rtol=1e-5, atol=0.0)


SWINGING = {
    "square of a sine": lambda x: x.sin().square(),
    "rectified sine": lambda x: x.sin().relu(),
    "sign of a cosine": lambda x: (x.cos() > 0).to(x.dtype),
    "sine of a square times a cosine": lambda x: (x.square() / 1e4).sin() * x.cos(),
}


@pytest.mark.parametrize(
    ("elements", "swings"),
    [
        (4, 0.5),
        (4, 5.0),
        (4, 100.0),
        (4_000, 0.5),
        *(pytest.param(20_000, swings, marks=pytest.mark.slow) for swings in (0.5, 5.0)),
    ],
)
@pytest.mark.parametrize("name", SWINGING)
def test_functions_that_swing_are_integrated_to_what_their_note_says(name, elements, swings):
    function = SWINGING[name]
    std = 2 * math.pi * swings
    moments = vp.Moments(torch.zeros(1, elements, dtype=torch.float64), std**2)
    program = vp.capture(Pointwise(function), moments.mean)
    found = vp.propagate(program, moments)
    reasons = [reason for entry in vp.coverage(program, moments.mean).approximate for reason in entry.reasons]
    assert any("a function that swings" in reason for reason in reasons)
    z = torch.linspace(-9, 9, 600_001, dtype=torch.float64)  # some 300 points in the shortest swing
    weight, values = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * 3e-5, function(std * z)
    mean = (weight * values).sum()
    expected = (weight * (values - mean).square()).sum().sqrt()
    assert (found.output.mean - mean).abs().max() < 0.02 * expected
    assert (found.output.std - expected).abs().max() < 0.02 * expected


A, B = torch.linspace(-1, 2, 36, dtype=torch.float64), torch.linspace(1, 3, 36, dtype=torch.float64)


@pytest.mark.parametrize(
    "line, slope",
    (
        (lambda x: A * x + B, A),
        (lambda x: torch.addcmul(B, A, x, value=2), 2 * A),
        (lambda x: torch.addcmul(x, A, x), 1 + A),
        (lambda x: torch.addcmul(x, A, B), 1),
        (lambda x: torch.addcdiv(A, x, B, value=0.5), 0.5 / B),
        (lambda x: torch.addcdiv(x, A, B), 1),
        (lambda x: torch.lerp(x, B, 0.25), 0.75),
    ),
)
def test_lines_are_not_integrated(line, slope, monkeypatch):
    monkeypatch.setattr(clusters, "expectation", None)
    moments = grid()
    found = vp.propagate(Pointwise(line), moments).output
    torch.testing.assert_close(found.mean, line(moments.mean), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(found.var, slope**2 * moments.var, rtol=1e-14, atol=1e-14)


def test_a_sine_of_a_line_stays_exact():
    found = vp.coverage(Pointwise(lambda x: (30 * x + 1).sin()), torch.zeros(1, 3))
    assert not found.approximate


@pytest.mark.parametrize("name", ["silu", "mish", "sigmoid", "tanh", "erf", "atan", "softplus", "logsigmoid"])
def test_named_functions_at_many_places_are_those_at_few(name):
    function = getattr(F, name, None) or getattr(torch, name)
    generator = torch.Generator().manual_seed(0)
    mean, spread = (torch.rand(4, 5000, dtype=torch.float64, generator=generator) for _ in range(2))
    many = vp.Moments(4 * mean - 2, (0.3 + spread).square())
    few = [vp.propagate(Pointwise(function), vp.Moments(many.mean[row], many.var[row])).output for row in range(4)]
    found = vp.propagate(Pointwise(function), many).output
    assert not torch.equal(found.mean, torch.stack([f.mean for f in few]))  # else nothing was interpolated
    torch.testing.assert_close(found.mean, torch.stack([f.mean for f in few]), rtol=0.0, atol=1e-7)
    torch.testing.assert_close(found.var, torch.stack([f.var for f in few]), rtol=1e-3, atol=1e-7)


MANY_KINKS = {
    "rectified cubic": lambda x: (x**3 - x).relu(),
    "sign of a quartic": lambda x: ((x**4 - 3 * x.square() + 1) > 0).to(x.dtype),
    "two bumps": lambda x: ((x.abs() - 1).abs() - 0.5).relu(),
    "clipped cubic": lambda x: F.hardtanh(x**3 - 2 * x),
}


@pytest.mark.parametrize("std", [0.7, 2.0])
@pytest.mark.parametrize("name", MANY_KINKS)
def test_all_kinks_of_a_curve_are_found(name, std):
    """Panels that end at most of them only are off by 1e-4 to 0.1 of the standard deviation."""
    function = MANY_KINKS[name]
    found = vp.propagate(Pointwise(function), vp.Moments(torch.full((1, 1), 0.1, dtype=torch.float64), std**2)).output
    z = torch.linspace(-9, 9, 2_000_001, dtype=torch.float64)
    weight, values = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * 9e-6, function(0.1 + std * z)
    mean = (weight * values).sum()
    expected = (weight * (values - mean).square()).sum().sqrt()
    assert abs(float((found.mean - mean) / expected)) < 2e-5 and abs(float(found.std / expected - 1)) < 2e-5


OF_TRUTH = {  # a function of a truth value, with its values of true and false
    "choice of numbers": (lambda c: torch.where(c, 2.0, -0.5), 2.0, -0.5),
    "masked": (lambda c: torch.full((2, 3), 3.0, dtype=torch.float64).masked_fill(c, -1.0), -1.0, 3.0),
    "not": (lambda c: torch.where(~c, 2.0, -1.0), -1.0, 2.0),
    "logical not": (lambda c: torch.logical_not(c).double() * 4.0, 0.0, 4.0),
    "a curve behind it": (lambda c: torch.where(c, 2.0, -1.0).exp().relu(), math.exp(2.0), math.exp(-1.0)),
}


class Comparison(nn.Module):
    """A function of whether one input is above another."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function(a > b)


@pytest.mark.parametrize("name", OF_TRUTH)
def test_every_function_of_a_truth_value_is_a_line_between_its_two_values(name):
    function, true, false = OF_TRUTH[name]
    a = vp.Moments(torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3), 0.7)
    b = vp.Moments(torch.zeros(2, 3, dtype=torch.float64), 0.5)
    found = vp.propagate(Comparison(function), (a, b)).output
    chance = torch.special.ndtr(a.mean / math.sqrt(1.2))
    torch.testing.assert_close(found.mean.double(), chance * true + (1 - chance) * false, rtol=1e-6, atol=1e-6)
    spread = chance * (1 - chance) * (true - false) ** 2
    torch.testing.assert_close(found.var.double(), spread, rtol=1e-5, atol=1e-6)
