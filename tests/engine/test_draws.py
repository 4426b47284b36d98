"""Functions of random numbers that a model draws itself: their own law counts, not a Gaussian of the same moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import varprop as vp


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x + self.draw(x)


COIN = (0.3, 0.3 * 0.7)
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "mask": (lambda x: (torch.rand_like(x) < 0.3).to(x.dtype), COIN),
    "mask over other extents": (lambda x: (torch.rand(x.shape[0], 1, dtype=x.dtype) > 0.7).to(x.dtype), COIN),
    "floor": (lambda x: (torch.rand_like(x) + 0.3).floor(), COIN),
    "square": (lambda x: torch.rand_like(x) ** 2, (1 / 3, 1 / 5 - 1 / 9)),
    "triangle": (lambda x: torch.zeros_like(x).uniform_(-1, 2).relu(), (2 / 3, 8 / 9 - 4 / 9)),
    "logarithm": (lambda x: torch.rand_like(x).log(), (-1.0, 1.0)),
    "Gumbel": (lambda x: -torch.empty_like(x).exponential_().log(), (0.5772156649015329, math.pi**2 / 6)),
    "coin above a half": (lambda x: (torch.bernoulli(torch.full_like(x, 0.3)) > 0.5).to(x.dtype), COIN),
    "coin in place": (lambda x: torch.empty_like(x).bernoulli_(0.3) ** 2, COIN),
    "whole number": (lambda x: (torch.randint(10, x.shape) < 3).to(x.dtype), COIN),
    "whole number between": (lambda x: torch.randint_like(x, -1, 2).abs(), (2 / 3, 2 / 9)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_functions_of_draws_are_exact(name: str) -> None:
    draw, (mean, var) = DRAWS[name]
    x = vp.Moments(torch.zeros(2, 3, dtype=torch.float64), 0.0)
    output = vp.propagate(Drawing(draw), x).output
    torch.testing.assert_close(output.mean, torch.full_like(output.mean, mean), rtol=0, atol=2e-6)
    torch.testing.assert_close(output.var, torch.full_like(output.var, var), rtol=0, atol=2e-5)


def test_chances_may_differ() -> None:
    chance = torch.tensor([[0.1, 0.5, 0.8]], dtype=torch.float64)
    x = vp.Moments(torch.zeros(1, 3, dtype=torch.float64), 0.0)
    output = vp.propagate(Drawing(lambda x: torch.bernoulli(chance.expand(x.shape)).exp()), x).output
    torch.testing.assert_close(output.mean, 1 + chance * (math.e - 1))
    torch.testing.assert_close(output.var, chance * (1 - chance) * (math.e - 1) ** 2)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: torch.zeros_like(x).log_normal_(0.0, 0.5), "log_normal"),
        (lambda x: torch.poisson(torch.ones_like(x)), "poisson"),
    ],
    ids=["log-normal", "Poisson"],
)
def test_draws_without_a_rule_are_no_constants(draw: Callable[[Tensor], Tensor], name: str) -> None:
    x = vp.Moments(torch.zeros(1, 3, dtype=torch.float64), 0.0)
    with pytest.raises(vp.MissingRule, match=rf"aten\.{name}"):
        vp.propagate(Drawing(draw), x)
    sampled = vp.propagate(Drawing(draw), x, on_missing="sample")
    assert (sampled.output.var > 0.2).all()
    assert any(entry.status == "sampled" for entry in sampled.entries)
