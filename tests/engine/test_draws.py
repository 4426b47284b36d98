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


class DroppedConstant(nn.Module):
    """Positions that are dropped before they are added, as some transformers do."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(4, 4), dropout, nn.Linear(4, 3)
        self.positions = nn.Parameter(torch.full((1, 4), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) + self.dropout(self.positions))


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), nn.Dropout1d(0.5), nn.AlphaDropout(0.3)], ids=str)
def test_dropout_of_a_constant_is_random(dropout: nn.Module) -> None:
    torch.manual_seed(0)
    model = DroppedConstant(dropout).train()
    moments = vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))
    found, before = vp.propagate(model, moments), model.first(torch.randn(20_000, 4))
    dropped = torch.cat([dropout(model.positions) for _ in range(4_000)])
    entering = found["first"].var + dropped.var(0)
    torch.testing.assert_close(found["dropout"].mean, dropped.mean(0, keepdim=True), rtol=0.1, atol=0.0)
    torch.testing.assert_close(found["dropout"].var, dropped.var(0, keepdim=True), rtol=0.1, atol=0.0)
    assert torch.allclose(found["first"].var, before.var(0), rtol=0.1)
    weights = model.second.weight.square()
    torch.testing.assert_close(found.output.var, entering @ weights.T, rtol=0.1, atol=0.0)
    torch.testing.assert_close(vp.propagate(model.eval(), moments).output.var, found["first"].var @ weights.T)


def test_a_normalized_model_counts_dropout_of_a_constant() -> None:
    torch.manual_seed(0)
    model = vp.normalize(DroppedConstant(nn.Dropout(0.5)), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))).train()
    outputs = torch.cat([model(torch.randn(1, 4)) for _ in range(4_000)])
    torch.testing.assert_close(outputs.std(0), torch.ones(3), rtol=0.1, atol=0.0)


def test_a_model_without_inputs_draws_all_that_is_random() -> None:
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self) -> Tensor:
            return self.layer(torch.randn(8, 4))

    model = Generator()
    found = vp.propagate(model, ())["layer"]
    assert torch.allclose(found.var.squeeze(0), model.layer.weight.square().sum(1))
