"""Rounding inside longer expressions, which are one function of one variable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp


class Expression(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def result(function: Callable[[Tensor], Tensor]) -> vp.Moments:
    mean = torch.linspace(-1.9, 1.9, 8, dtype=torch.float64).view(1, -1)
    std = torch.linspace(0.1, 0.6, 8, dtype=torch.float64).view(1, -1)
    return vp.propagate(Expression(function), vp.Moments(mean, std.square())).output


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        (lambda x: x + (torch.round(x) - x), torch.round),
        (lambda x: x - torch.floor(x), lambda x: torch.remainder(x, 1.0)),
        (lambda x: -torch.ceil(-x), torch.floor),
        (lambda x: torch.floor(2 * x), lambda x: torch.floor_divide(x, 0.5)),
    ],
    ids=["straight-through", "fraction", "mirrored", "scaled"],
)
def test_rounding_in_an_expression(expression: Callable[..., Tensor], same: Callable[..., Tensor]) -> None:
    whole, closed = result(expression), result(same)
    torch.testing.assert_close(whole.mean, closed.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(whole.var, closed.var, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("std", [0.0, 1e-6, 0.4999, 0.5001, 40.0])
def test_whole_means_and_the_change_of_method(std: float) -> None:
    mean = torch.tensor([[-2.0, 0.25, 3.0]], dtype=torch.float64)
    floor = vp.propagate(Expression(torch.floor), vp.Moments(mean, torch.full_like(mean, std**2))).output
    if std == 0:
        assert floor.mean.tolist() == mean.floor().tolist()
        assert floor.var.tolist() == [[0.0, 0.0, 0.0]]
    else:
        expected = [[-2.5, 0.0 if std < 0.01 else floor.mean[0, 1].item(), 2.5]]  # whole means: by symmetry
        torch.testing.assert_close(floor.mean, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)
        assert (floor.var >= 0).all()


def test_both_methods_agree_where_they_meet() -> None:
    mean = torch.linspace(-1, 1, 21, dtype=torch.float64).view(1, -1)
    pair = [
        vp.propagate(Expression(torch.floor), vp.Moments(mean, torch.full_like(mean, std**2))).output
        for std in (0.5 - 1e-9, 0.5 + 1e-9)
    ]
    torch.testing.assert_close(pair[0].mean, pair[1].mean, rtol=0, atol=1e-7)
    torch.testing.assert_close(pair[0].var, pair[1].var, rtol=0, atol=1e-7)
