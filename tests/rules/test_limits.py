"""What the rules of this folder cannot do counts as missing before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp


class Expression(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.long)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.vector_norm(x, 3, -1),
        lambda x: F.grid_sample(x.view(1, 1, 2, 2), x.view(1, 2, 1, 2), mode="bicubic", align_corners=False),
        lambda x: x.scatter_reduce(1, zeros(x), x, "prod"),
        lambda x: x.index_fill(1, (x > 0).long()[0], 1.0),
        lambda x: torch.diff(x, 2),
        lambda x: (x > 0) + (torch.randn(4) > 0),
        lambda x: F.celu(x, -1.0),
        lambda x: torch.div(torch.ones(4), x, rounding_mode="floor"),
        lambda x: torch.floor_divide(torch.ones(4), x),
        lambda x: torch.clamp(torch.ones(4), max=x),
        lambda x: torch.heaviside(torch.ones(4), x),
        lambda x: torch.ops.aten._prelu_kernel(torch.ones(1, 4), x),
        lambda x: torch.cdist(x, 2 * x, 1.0),
        lambda x: F.kl_div(x, x.sigmoid()),
        lambda x: F.cross_entropy(x, (x > 0).long()[:, 0]),
    ],
    ids=[
        *(
            "norm",
            "bicubic",
            "scatter",
            "place",
            "diff",
            "truth",
            "celu",
            "floor",
            "divisor",
            "bound",
            "value",
            "slope",
        ),
        *("distance", "divergence", "class"),
    ],
)
def test_missing_before_anything_runs(function: Callable[[Tensor], Tensor]) -> None:
    assert vp.coverage(Expression(function), torch.zeros(1, 4)).missing
    with pytest.raises(vp.MissingRule):
        vp.propagate(Expression(function), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4)))


def test_a_blend_may_have_a_random_share() -> None:
    """In 32 bits, where torch's own lerp refuses the 64 bits that functions are integrated in."""
    x = vp.Moments(torch.full((1, 4), 0.3), 2.0)
    blend = vp.propagate(Expression(lambda x: torch.lerp(torch.ones(4), torch.zeros(4), x.sigmoid())), x).output
    share = vp.propagate(Expression(torch.sigmoid), x).output
    torch.testing.assert_close(blend.mean, 1 - share.mean)
    torch.testing.assert_close(blend.var, share.var)


def test_a_sum_of_nothing_is_zero() -> None:
    output = vp.propagate(Expression(lambda x: x[:, :0].sum(1)), vp.Moments(torch.ones(1, 4), 1.0)).output
    assert output.mean.tolist() == output.var.tolist() == [0]


def test_the_variance_of_a_power_too_high_for_any_number_is_infinite() -> None:
    output = vp.propagate(Expression(lambda x: x**200), vp.Moments(torch.ones(1, dtype=torch.float64), 1.0)).output
    assert output.mean.isfinite().all() and output.var.isinf().all()


def test_high_powers() -> None:
    """E x^20 = 19!!, E x^40 = 39!!."""
    output = vp.propagate(Expression(lambda x: x**20), vp.Moments(torch.zeros(1, dtype=torch.float64), 1.0)).output
    first, second = (math.prod(range(1, n, 2)) for n in (20, 40))
    assert output.mean.item() == pytest.approx(first) and output.var.item() == pytest.approx(second - first**2)
