"""The smallest shift from which on an activation damps errors of scale."""

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from varprop.gaussian.activations import CURVES
from varprop.gaussian.derivatives import DOUBLE, KERNELS
from varprop.gaussian.stability import DAMPING, LARGEST, response, stable_shift


def activation(name, *numbers):
    """Its mean and variance as a function of mean and standard deviation."""

    def moments(mean, std):
        values, _ = KERNELS[DOUBLE][name]((mean, std.square()), *numbers)
        return values[0], values[1]

    return moments


def mirrored(moments):
    """f(-x)."""
    return lambda mean, std: moments(-mean, std)


def variance_of_two_slopes(b, s, t):
    """Var f(b + Z) for f(x) = s x above zero and t x below, by the moments of the truncated Gaussian."""
    above, density = norm.cdf(b), norm.pdf(b)
    mean = s * (b * above + density) + t * (b * (1 - above) - density)
    square = (b * b + 1) * above + b * density
    return s * s * square + t * t * (b * b + 1 - square) - mean * mean


@pytest.mark.parametrize("slope", [0.0, 0.03, -0.2])
def test_a_rectifier_starts_where_its_variance_exceeds_that_of_far_scales(slope):
    """Far from the fixed point the square grows by (1 + slope^2) / 2 over the variance at one."""
    far = (1 + slope**2) / 2
    expected = brentq(lambda b: variance_of_two_slopes(b, 1.0, slope) - far, 0.01, 3.0)
    assert stable_shift(activation("two_slopes", 1.0, slope)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("name", "numbers"), [("two_slopes", (1.0, 0.3)), ("gelu", ()), ("silu", ()), ("mish", ())])
def test_others_start_where_small_errors_lose_a_tenth(name, numbers):
    """The rate is d log v / d log sigma^2, of which the derivatives are known in closed form or by quadrature."""

    def rate(b):
        mean, one = torch.tensor([b], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        values, [derivatives] = KERNELS[DOUBLE][name]((mean, one), *numbers)
        return float(derivatives[3] / values[1])

    expected = brentq(lambda b: rate(b) - DAMPING, 0.0, 1.0)
    assert stable_shift(activation(name, *numbers)) == pytest.approx(expected, abs=2e-3)


def test_where_none_damps_that_much_large_errors_decide():
    softplus = activation("softplus", 1.0)
    shift = stable_shift(softplus)
    rate, growth = response(softplus, torch.tensor([shift, shift - 1e-3], dtype=torch.float64))
    assert DAMPING < rate[0] < 1
    assert (growth[0] <= 1 + 1e-9).all() and (growth[1] > 1).any()


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "erf"])
def test_what_saturates_damps_by_itself(name):
    assert stable_shift(activation(name)) == 0


def test_a_line_keeps_every_scale():
    assert stable_shift(activation("affine", 2.0, 1.0)) == 0


def test_a_function_that_never_damps_has_no_shift():
    assert stable_shift(activation("two_slopes", 1.0, -1.0)) == 0  # |x|, whose variance stays below that of x


def test_a_mirrored_function_has_the_mirrored_shift():
    softplus = activation("softplus", 1.0)
    assert stable_shift(mirrored(softplus)) == pytest.approx(-stable_shift(softplus), abs=1e-6) != 0


@pytest.mark.parametrize("name", [name for name in CURVES if name not in ("softplus", "elu")])
def test_just_below_the_shift_it_is_not_stable(name):
    moments = activation(name)
    shift = stable_shift(moments)
    assert 0 <= shift < LARGEST
    rate, growth = response(moments, torch.tensor([shift, shift - 1e-3], dtype=torch.float64))
    assert rate[0] <= DAMPING + 1e-4 and (growth[0] <= 1 + 1e-9).all()
    assert shift == 0 or rate[1] > DAMPING or (growth[1] > 1).any()


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "mish"])
def test_scales_below_one_come_back_too(name):
    moments, scales = activation(name), torch.tensor([1.0, 0.9, 0.5, 0.1], dtype=torch.float64)
    mean, var = moments(torch.full_like(scales, stable_shift(moments)), scales)
    squares = var + (mean - mean[0]).square()
    assert (squares[1:] / squares[0] > scales[1:].square()).all()
