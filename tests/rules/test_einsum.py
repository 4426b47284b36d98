"""Einsum of one value given several times, which a row of independent operands cannot show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp


class Expression(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def result(function: Callable[..., Tensor]) -> vp.Result:
    mean = torch.linspace(-1, 2, 8, dtype=torch.float64).view(2, 4)
    return vp.propagate(Expression(function), vp.Moments(mean, 0.5 + mean.square()))


@pytest.mark.parametrize(
    ("written", "same"),
    [
        (lambda x: torch.einsum("bi,bi->b", x, x), lambda x: x.square().sum(1)),
        (lambda x: torch.einsum("bi,bi,bi->b", x, x, x), lambda x: x.pow(3).sum(1)),
        (lambda x: torch.einsum("...i,...i", x, x), lambda x: x.square().sum(1)),
    ],
    ids=["square", "cube", "ellipsis"],
)
def test_powers(written: Callable[..., Tensor], same: Callable[..., Tensor]) -> None:
    found, expected = result(written), result(same).output
    torch.testing.assert_close(found.output.mean, expected.mean)
    torch.testing.assert_close(found.output.var, expected.var)
    assert not found.approximations


def test_one_value_under_different_indices_is_noted() -> None:
    (entry,) = result(lambda x: torch.einsum("bi,bj->bij", x, x)).approximations
    assert "given twice" in entry.reasons[-1]
