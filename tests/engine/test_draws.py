"""Functions of random numbers that a model draws itself: their own law counts, not a Gaussian of the same moments."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
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
    dropped = torch.cat([dropout(model.positions) for _ in range(1_000)])
    entering = found["first"].var + dropped.var(0)
    torch.testing.assert_close(found["dropout"].mean, dropped.mean(0, keepdim=True), rtol=0.1, atol=0.0)
    torch.testing.assert_close(found["dropout"].var, dropped.var(0, keepdim=True), rtol=0.1, atol=0.0)
    assert torch.allclose(found["first"].var, before.var(0), rtol=0.1)
    weights = model.second.weight.square()
    torch.testing.assert_close(found.output.var, entering @ weights.T, rtol=0.1, atol=0.0)
    torch.testing.assert_close(vp.propagate(model.eval(), moments).output.var, found["first"].var @ weights.T)


class Pipeline(nn.Module):
    """A dropout, and a function of what it leaves."""

    def __init__(self, dropout: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dropout, self.function = dropout, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.dropout(x))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "square": torch.square, "sigmoid of a line": lambda x: torch.sigmoid(2 * x - 1),
    "by hand": lambda x: x * torch.tanh(x + 0.3), "rectifier with kink": lambda x: (x + 0.5).clamp(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "dropout", [nn.Dropout(0.4), nn.Dropout2d(0.2), nn.AlphaDropout(0.3), nn.Dropout(1.0)], ids=str
)
def test_functions_of_what_a_dropout_leaves_are_exact(dropout: nn.Module, name: str) -> None:
    """Its law is known: one line of the value or another, with their chances."""
    torch.manual_seed(0)
    model = Pipeline(dropout, FUNCTIONS[name]).train()
    mean = torch.tensor([[-1.0, 0.2, 1.5, 0.0]], dtype=torch.float64).view(1, 4, 1, 1)
    result = vp.propagate(model, vp.Moments(mean, torch.full_like(mean, 0.25)), example=(1, 4, 1, 1))
    drawn = model(mean + 0.5 * torch.randn(100_000, 4, 1, 1, dtype=torch.float64))
    error = drawn.var(0) / len(drawn)
    assert not result.approximations
    assert ((result.output.mean[0] - drawn.mean(0)).abs() <= 5 * error.sqrt() + 1e-9).all()
    torch.testing.assert_close(result.output.var[0], drawn.var(0), rtol=0.05, atol=1e-4)


@pytest.mark.parametrize(
    "function",
    [lambda x: x.amax(1), lambda x: torch.maximum(x[:, :2], x[:, 2:].detach() * 2), lambda x: x.softmax(1)],
    ids=["maximum", "of two", "softmax"],
)
def test_what_takes_dropped_values_as_gaussian_says_so(function: Callable[[Tensor], Tensor]) -> None:
    x = vp.Moments(torch.full((1, 4), -1.0), torch.full((1, 4), 0.25))
    for training in (True, False):
        result = vp.propagate(Pipeline(nn.Dropout(0.4), function).train(training), x)
        assert any("dropout" in reason for e in result.approximations for reason in e.reasons) == training


def test_a_function_of_a_moved_function_is_marked() -> None:
    x = vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))
    for function, marked in {
        (lambda x: x.relu().flip(1).exp(), True),
        (lambda x: F.dropout(x.relu(), 0.5).exp(), True),
        (lambda x: F.dropout(x.relu(), 0.5, training=False).exp(), False),
        (lambda x: F.alpha_dropout(x.relu(), 0.5, training=False).exp(), False),
        (lambda x: (2 * x).flip(1).exp(), False),
        (lambda x: x.relu().exp(), False),
        (lambda x: (x * torch.bernoulli(torch.full_like(x, 0.4)) - 0.2).relu(), True),
        (lambda x: (x * (1 + torch.randn_like(x))).flip(1).relu(), True),
        (lambda x: torch.where(torch.rand_like(x) < 0.4, x, 0.0).exp(), True),
        (lambda x: (x + torch.randn_like(x)).exp(), False),
        (lambda x: 2 * (x * torch.randn_like(x)), False),
    }:
        result = vp.propagate(Pipeline(nn.Identity(), function), x)
        assert any("no longer Gaussian" in reason for e in result.approximations for reason in e.reasons) == marked


@pytest.mark.parametrize(
    "function",
    [lambda x: x.sum(-1), lambda x: F.linear(x.relu(), torch.ones(1, 5)), lambda x: x.flip(-1).mean(-1)],
    ids=["sum", "linear", "mean"],
)
@pytest.mark.parametrize("dropout", [nn.Dropout1d(0.4), nn.FeatureAlphaDropout(0.4), nn.Dropout(0.4)], ids=str)
def test_features_that_drop_together_are_not_independent(
    dropout: nn.Module, function: Callable[[Tensor], Tensor]
) -> None:
    together = not isinstance(dropout, nn.Dropout)
    x = vp.Moments(torch.full((1, 4, 5), 1.0), torch.full((1, 4, 5), 0.1))
    for training in (True, False):
        result = vp.propagate(Pipeline(dropout, function).train(training), x)
        assert any("copies" in reason for e in result.approximations for reason in e.reasons) == (training and together)


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "shuffled": lambda x: x[:, torch.randperm(x.shape[1])],
    "masked as by MAE": lambda x: x.gather(1, torch.rand(x.shape).argsort(1)[:, :2]),
    "restored": lambda x: x.gather(1, torch.rand(x.shape).argsort(1).argsort(1)),
    "highest of noise": lambda x: x.gather(1, torch.rand(x.shape).topk(2, 1).indices),
    "numbers": lambda x: x * torch.randperm(4),
}


@pytest.mark.parametrize("name", PLACES)
def test_places_drawn_at_random_are_marked(name: str) -> None:
    model = Pipeline(nn.Identity(), PLACES[name])
    x = vp.Moments(torch.tensor([[0.0, 0.0, 0.0, 9.0]]), torch.ones(1, 4))
    state = torch.get_rng_state()
    results = [vp.propagate(model, x) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(results[0].output.mean, results[1].output.mean)
    for entries in (results[0].entries, vp.coverage(model, torch.zeros(1, 4)).entries):
        assert any("draws anew in every call" in reason for entry in entries for reason in entry.reasons)


def test_the_order_of_the_input_has_no_moments() -> None:
    model = Pipeline(nn.Identity(), lambda x: x.gather(1, x.argsort(1)))
    with pytest.raises(vp.MissingRule, match=r"aten\.argsort"):
        vp.propagate(model, vp.Moments(torch.zeros(1, 4), torch.ones(1, 4)))


def test_a_normalized_model_counts_functions_of_dropped_values() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4)
    nn.init.orthogonal_(layers[0].weight)  # so that units are independent
    model = vp.normalize(nn.Sequential(*layers), vp.Moments(torch.zeros(1, 8), torch.ones(1, 8))).train()
    torch.testing.assert_close(model(torch.randn(40_000, 8)).std(0), torch.ones(4), rtol=0.03, atol=0.0)


def test_a_normalized_model_counts_dropout_of_a_constant() -> None:
    torch.manual_seed(0)
    model = vp.normalize(DroppedConstant(nn.Dropout(0.5)), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4))).train()
    outputs = torch.cat([model(torch.randn(1, 4)) for _ in range(1_000)])
    torch.testing.assert_close(outputs.std(0), torch.ones(3), rtol=0.1, atol=0.0)


@pytest.mark.parametrize(
    ("layer", "var"),
    [
        (lambda x: F.conv2d(x, torch.randn(2, 4, 3, 3)), 36.0),
        (lambda x: F.conv2d(x, torch.ones(2, 4, 3, 3), torch.randn(2)), 37.0),
        (lambda x: F.conv_transpose2d(x, torch.randn(4, 2, 2, 2), stride=2), 4.0),
        (lambda x: F.linear(x[..., 0, 0], torch.ones(2, 4), torch.randn(2)), 5.0),
    ],
    ids=["kernel", "bias", "transposed", "bias of a linear layer"],
)
def test_layers_with_weights_that_are_drawn(layer: Callable[[Tensor], Tensor], var: float) -> None:
    x = vp.Moments(torch.zeros(1, 4, 1, 1), torch.ones(1, 4, 1, 1))
    output = vp.propagate(Pipeline(nn.Identity(), layer), x, example=(1, 4, 7, 6)).output
    torch.testing.assert_close(output.var, torch.full_like(output.var, var))


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
