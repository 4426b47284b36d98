"""Shortcuts of training steps agree with what they stand for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.gaussian import activations
from varprop.gaussian.activations import CURVES
from varprop.gaussian.derivatives import FORMULAS
from varprop.gaussian.quadrature import expectation
from varprop.gaussian.shortcuts import by_formulas, first_order

DOUBLE = torch.float64
NAMES = [name for name in CURVES if name not in ("softplus", "elu")]  # those with numbers have none


def places() -> tuple[Tensor, Tensor]:
    grid = torch.cartesian_prod(torch.linspace(-5, 5, 11), torch.tensor([0.03, 0.5, 1.0, 4.0])).to(DOUBLE)
    return grid[:, 0].clone().requires_grad_(), grid[:, 1].clone().requires_grad_()


def to_second_order(function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
    mean, std = places()
    results = function(mean, std)
    weights = [torch.linspace(0.5, 1.5, len(mean), dtype=DOUBLE), torch.linspace(1.0, 0.2, len(mean), dtype=DOUBLE)]
    total = sum((w * r).sum() for w, r in zip(weights, results, strict=True))
    first = torch.autograd.grad(total, (mean, std), create_graph=True)
    second = torch.autograd.grad(first[0].sum() + first[1].square().sum(), (mean, std))
    return [*results, *first, *second]


@pytest.mark.parametrize("name", NAMES)
def test_formulas_agree_with_the_integral_up_to_second_derivatives(name: str) -> None:
    assert name in FORMULAS
    function = getattr(activations, name)
    expected = to_second_order(function)
    with by_formulas():
        found = to_second_order(function)
    assert "_ByFormula" in type(found[0].grad_fn).__name__ and "_ByFormula" not in type(expected[0].grad_fn).__name__
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


def test_transforms_and_forward_mode_take_the_integral() -> None:
    mean, std = (t.detach() for t in places())

    def total(mean: Tensor) -> Tensor:
        return activations.tanh(mean, std)[1].sum()

    expected = torch.func.grad(total)(mean)
    with by_formulas():
        torch.testing.assert_close(torch.func.grad(total)(mean), expected)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(mean, torch.ones_like(mean))
            tangent = torch.autograd.forward_ad.unpack_dual(total(dual)).tangent
    torch.testing.assert_close(tangent, expected.sum())


def test_first_derivatives_need_nothing_of_kinks_but_all_of_jumps() -> None:
    def function(x: Tensor) -> Tensor:
        return (x - 0.3).relu() + (x > 1.1).to(x.dtype) * x

    def moments(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        return expectation(function, mean, std, breaks=(0.3,), jumps=(1.1,))

    def to_first_order() -> list[Tensor]:
        mean, std = places()
        m, v = moments(mean, std)
        return [m, v, *torch.autograd.grad(m.sum() + 2 * v.sum(), (mean, std))]

    expected = to_first_order()
    with first_order():
        found = to_first_order()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_normalized_cell_that_is_called_by_hand_has_second_derivatives() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for now in x.unbind(1):
                state = self.cell(now, state)
            return self.head(state)

    torch.manual_seed(0)
    model = vp.normalize(Unrolled().double(), vp.Moments(0.0, 1.0), example=(1, 3, 3))
    x = torch.randn(5, 3, 3, dtype=DOUBLE)
    weight = model.cell.weight_hh

    def gradient() -> Tensor:
        return torch.autograd.grad(model(x).square().sum(), weight, create_graph=True)[0]

    direction = torch.randn_like(weight)
    (second,) = torch.autograd.grad((gradient() * direction).sum(), weight)
    step, sides = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * step)
        sides.append(gradient().detach())
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * step)
    torch.testing.assert_close(second, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-6)
