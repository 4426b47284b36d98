"""Every function of the moment kernel against varprop's own rule: values and all four derivatives."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from varprop.gaussian.derivatives import DOUBLE, KERNELS
from varprop.norm.backends import triton as kernels
from varprop.norm.backends.triton.opcodes import BUILDERS
from varprop.norm.fold.layout import Function, Lanes, Layout, Step

from .functions import ADD, MUL, RULES, SKIP, SLOPE, function
from .reference import EPS, NONE

pytestmark = pytest.mark.kernels

MEANS = (-60.0, -12.0, -5.0, -3.0, -1.0, -1e-3, 0.0, 0.3, 1.0, 2.9, 6.0, 40.0)
STDS = (1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0)
GRID = torch.cartesian_prod(torch.tensor(MEANS), torch.tensor(STDS))


def lanes_of(made: Function) -> Lanes:
    count = len(GRID)
    return Lanes(count, NONE, NONE, 0, (Step(made, (torch.arange(count),), count, count),), count + torch.arange(count))


def by_kernels(made, device):
    """Mean and variance, and the derivatives of each by mean and std."""
    lanes = lanes_of(made)
    tables = kernels.TritonTables(Layout(lanes, ()), device)
    shift, scale, none = GRID[:, 0].to(device), GRID[:, 1].to(device), NONE.float().to(device)
    mean, var, saved = kernels.moments_forward(lanes, tables, shift, scale, none, none)
    one, zero = torch.ones_like(mean), torch.zeros_like(mean)
    of_mean = kernels.moments_backward(lanes, tables, saved, scale, one, zero)[:2]
    of_var = kernels.moments_backward(lanes, tables, saved, scale, zero, one)[:2]
    return [x.cpu().double() for x in (mean, var, *of_mean, *of_var)]


def by_rule(made):
    mean, std = (x.double().requires_grad_() for x in GRID.unbind(1))
    m, v = made.moments((mean, std.square()))
    of_mean, of_var = (torch.autograd.grad(x.sum(), (mean, std), retain_graph=True, allow_unused=True) for x in (m, v))
    derivatives = [torch.zeros_like(m) if d is None else d for d in (*of_mean, *of_var)]
    return [m.detach(), v.detach() + EPS, *derivatives]


@pytest.mark.parametrize("kernel", RULES, ids=lambda kernel: "-".join(map(str, kernel)))
def test_function_and_its_derivatives_agree_with_the_rule(kernel, device):
    made = function(*kernel)
    assert kernels.supported(Layout(lanes_of(made), ()))
    found, expected = by_kernels(made, device), by_rule(made)
    size = expected[0].abs() + expected[1].sqrt()
    assert ((found[0] - expected[0]).abs() <= 1e-6 * size).all()
    assert ((found[1] - expected[1]).abs() <= 1e-6 * expected[1]).all()
    for got, want in zip(found[2:], expected[2:], strict=True):
        assert ((got - want).abs() <= 1e-5 * want.abs() + 1e-8 * (1.0 + GRID[:, 1])).all()


def test_kernels_name_the_functions_of_gaussian_and_all_are_compared():
    assert {*BUILDERS, "compose"} == set(KERNELS[DOUBLE])
    compared = {kernel[0] for kernel in RULES} | {made.kernel[0] for made in (ADD, MUL, SKIP, SLOPE)}
    assert compared == set(KERNELS[DOUBLE])


def test_scale_of_zero_and_of_either_sign(device):
    """Moments are even in the scale, its gradient is odd, and nothing is NaN where the scale is zero."""
    made = function("two_slopes", 1.0, 0.0)
    lanes = Lanes(4, NONE, NONE, 0, (Step(made, (torch.arange(4),), 4, 4),), 4 + torch.arange(4))
    tables, none = kernels.TritonTables(Layout(lanes, ()), device), NONE.float().to(device)
    shift, scale = torch.tensor([0.5, 0.5, 0.5, 0.0], device=device), torch.tensor([0.7, -0.7, 0.0, 0.0], device=device)
    mean, var, saved = kernels.moments_forward(lanes, tables, shift, scale, none, none)
    assert mean[0] == mean[1] and var[0] == var[1] and mean[2] == 0.5 and mean[3] == 0.0
    d_shift, d_scale, *_ = kernels.moments_backward(lanes, tables, saved, scale, torch.ones_like(mean), var)
    assert d_scale[0] == -d_scale[1] != 0.0
    assert d_shift.isfinite().all() and d_scale.isfinite().all()


def test_unknown_functions_are_not_supported():
    index = torch.arange(3)
    for kernel in (None, ("gumbel",), ("compose", "maximum", 1.0, 1.0, "mul"), ("compose", "affine", 1.0, 0.0, "tanh")):
        lanes = Lanes(3, NONE, NONE, 0, (Step(Function("f", lambda x: x, kernel), (index,), 3, 3),), index)
        assert not kernels.supported(Layout(lanes, ()))
