"""Every function of the moment kernel against varprop's own rule: values and all four derivatives."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from varprop.gaussian.derivatives import DOUBLE, KERNELS
from varprop.norm.backends import triton as kernels
from varprop.norm.backends.triton.functions import BUILDERS, encode
from varprop.norm.fold.layout import Channels, Function, Step

from .functions import ADD, MUL, RULES, SKIP, SLOPE, function
from .reference import EPS, NONE

pytestmark = pytest.mark.kernels

MEANS = (-60.0, -12.0, -5.0, -3.0, -1.0, -1e-3, 0.0, 0.3, 1.0, 2.9, 6.0, 40.0)
STDS = (1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0)
GRID = torch.cartesian_prod(torch.tensor(MEANS), torch.tensor(STDS))


def lanes_of(made: Function) -> Channels:
    count = len(GRID)
    return Channels(
        count, NONE, NONE, 0, (Step(made, (torch.arange(count),), count, count),), count + torch.arange(count)
    )


def by_kernels(made, device):
    """Mean and variance, and the derivatives of each by mean and std."""
    moments, shift_scale = kernels.TritonMoments(lanes_of(made), device), GRID.t().contiguous().to(device)
    entering, saved = moments.forward(shift_scale, None, True)
    one, zero = torch.ones_like(entering[0]), torch.zeros_like(entering[0])
    direct = torch.zeros_like(shift_scale)
    by_mean, *_ = moments.backward(shift_scale, saved, torch.stack([one, zero]), direct)
    by_var, *_ = moments.backward(shift_scale, saved, torch.stack([zero, one]), direct)
    return [x.cpu().double() for x in (*entering, *by_mean, *by_var)]


def by_rule(made):
    mean, std = (x.double().requires_grad_() for x in GRID.unbind(1))
    m, v = made.moments((mean, std.square()))
    of_mean, of_var = (torch.autograd.grad(x.sum(), (mean, std), retain_graph=True, allow_unused=True) for x in (m, v))
    derivatives = [torch.zeros_like(m) if d is None else d for d in (*of_mean, *of_var)]
    return [m.detach(), v.detach() + EPS, *derivatives]


@pytest.mark.parametrize("kernel", RULES, ids=lambda kernel: "-".join(map(str, kernel)))
def test_function_and_its_derivatives_agree_with_the_rule(kernel, device):
    made = function(*kernel)
    assert not encode(made).by_torch
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
    lanes = Channels(4, NONE, NONE, 0, (Step(made, (torch.arange(4),), 4, 4),), 4 + torch.arange(4))
    moments = kernels.TritonMoments(lanes, device)
    shift_scale = torch.tensor([[0.5, 0.5, 0.5, 0.0], [0.7, -0.7, 0.0, 0.0]], device=device)
    (mean, var), saved = moments.forward(shift_scale, None, True)
    assert mean[0] == mean[1] and var[0] == var[1] and mean[2] == 0.5 and mean[3] == 0.0
    by_entering = torch.stack([torch.ones_like(mean), var])
    (d_shift, d_scale), *_ = moments.backward(shift_scale, saved, by_entering, torch.zeros_like(shift_scale))
    assert d_scale[0] == -d_scale[1] != 0.0
    assert d_shift.isfinite().all() and d_scale.isfinite().all()


def test_functions_without_a_kernel_are_left_to_torch():
    for kernel in (None, ("gumbel",), ("compose", "maximum", 1.0, 1.0, "mul"), ("compose", "affine", 1.0, 0.0, "tanh")):
        assert encode(Function("f", lambda x: x, kernel)).by_torch
