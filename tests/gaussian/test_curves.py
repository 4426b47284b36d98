"""Slopes of the activation functions, and which function each is."""

import pytest
import torch
import torch.nn.functional as F

from varprop.gaussian.activations import CURVES
from varprop.gaussian.derivatives import DOUBLE, KERNELS
from varprop.gaussian.rectifier import clamp

NUMBERS = {"softplus": (2.0,), "elu": (1.3, 0.7, 0.5)}
FUNCTIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": lambda x: F.softplus(x, 2.0, 40.0),
    "elu": lambda x: 0.7 * torch.where(x > 0, x, 1.3 * torch.expm1(0.5 * x)),
    "erf": torch.erf,
}


@pytest.mark.parametrize("name", CURVES)
def test_value_and_slope(name):
    x = torch.linspace(-7.1, 7.3, 97, dtype=torch.float64).requires_grad_()
    value, slope = CURVES[name].with_slope(x, *NUMBERS.get(name, ()))
    expected = FUNCTIONS.get(name, getattr(F, name, None))(x)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(slope, *torch.autograd.grad(expected.sum(), x))


def test_clamp_in_closed_form():
    mean, var = torch.linspace(-4, 4, 33, dtype=torch.float64), torch.linspace(0.01, 9, 33, dtype=torch.float64)
    leaves = mean.clone().requires_grad_(), var.clone().requires_grad_()
    found, [derivatives] = KERNELS[DOUBLE]["clamp"]((mean, var), -1.0, 2.0)
    for row, moment in enumerate(clamp(leaves[0], leaves[1].sqrt(), -1.0, 2.0)):
        torch.testing.assert_close(found[row], moment)
        torch.testing.assert_close(
            derivatives.view(2, 2, -1)[row], torch.stack(torch.autograd.grad(moment.sum(), leaves, retain_graph=True))
        )
