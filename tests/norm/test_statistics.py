"""Mean and deviation come from the parameters alone, and are the right ones."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from tests.norm.networks import apart, case, kept, sites, train_a_little
from varprop.norm import Normalized
from varprop.norm.statistics import Statistics

RELU_MEAN, RELU_VAR = 1 / math.sqrt(2 * math.pi), (1 - 1 / math.pi) / 2


def moments_before(layer: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of what a layer normalizes."""
    mean, std = layer.output_statistics()
    return mean, std.square()


def masked() -> nn.Sequential:
    """Units of the first layer are independent, so that the second one's statistics are exact."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 6)).double()
    nn.init.eye_(model[0].weight)
    unit = torch.ones(1, 8, dtype=torch.float64)
    normalized = vp.normalize(model, vp.Moments(0 * unit, unit), form="paper")
    with torch.no_grad():
        normalized[0].scale.copy_(torch.linspace(0.5, 2, 8))
        normalized[0].shift.copy_(torch.linspace(-1, 1, 8))
        normalized[3].scale.copy_(torch.linspace(-2, 2, 6))
        normalized[3].shift.copy_(torch.linspace(-1, 1, 6))
    return normalized


@pytest.mark.parametrize("training", (True, False), ids=("training", "evaluation"))
def test_dropout_does_not_shift_the_statistics(training: bool) -> None:
    model = masked().train(training)
    torch.manual_seed(1)
    count = 400_000
    with torch.no_grad():
        outputs = model(torch.randn(count, 8, dtype=torch.float64))
    scale, shift = model[3].scale.detach(), model[3].shift.detach()
    deviations = outputs - shift
    error = deviations.std(0) / count**0.5
    assert ((outputs.mean(0) - shift).abs() <= 5 * error).all()
    spread = deviations.square()
    assert ((spread.mean(0) - scale.square()).abs() <= 5 * spread.std(0) / count**0.5 + 1e-5 * scale.square()).all()


def test_dropout_counts_in_training_only() -> None:
    model = masked()
    layer = model[3]
    found = {mode: moments_before(layer.train(mode)) for mode in (True, False)}
    assert apart(found[True][0], found[False][0]) <= 1e-12
    normal = torch.distributions.Normal(0.0, 1.0)
    ratio = (model[0].shift / model[0].scale).detach()
    density, below = normal.log_prob(ratio).exp(), normal.cdf(ratio)
    scale = model[0].scale.detach()
    mean = scale * (ratio * below + density)
    var = scale.square() * ((ratio.square() + 1) * below + ratio * density) - mean.square()
    weight = layer.weight.detach().square()
    assert apart(found[False][1], weight @ (var + 1e-6)) <= 1e-6
    assert apart(found[True][1], weight @ ((var + 0.4 * mean.square()) / 0.6 + 1e-6)) <= 1e-6


def test_whatever_differs_in_training_counts() -> None:
    class Louder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)) * (3.0 if self.training else 1.0))

    unit = torch.ones(1, 4)
    model = vp.normalize(Louder(), vp.Moments(0 * unit, unit))
    _, var = moments_before(model.eval().second)
    _, louder = moments_before(model.train().second)
    assert apart(louder, 9 * var) <= 1e-4


def test_a_reused_layer_has_the_statistics_of_all_its_calls() -> None:
    _, normalized = kept("recalled", "project")
    z = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    sigmoid = torch.sigmoid(z)
    calls = [(RELU_MEAN, RELU_VAR), (float(density @ sigmoid), float(density @ sigmoid.square()) - 0.25)]
    weight = normalized.shared.weight.detach()
    means = torch.stack([weight.sum(1) * mean for mean, _ in calls])
    variances = torch.stack([weight.square().sum(1) * (var + 1e-6) for _, var in calls])
    mean, var = moments_before(normalized.shared)
    assert apart(mean, means.mean(0)) <= 1e-6
    assert apart(var, variances.mean(0) + means.var(0, correction=0)) <= 1e-6
    assert apart(mean, means[0]) > 0.1  # not those of the first call


def test_a_layer_that_expands_on_its_own_output_is_refused() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)
            nn.init.orthogonal_(self.layer.weight, 3.0)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layer(x)
            return x

    unit = torch.ones(1, 4)
    with pytest.raises(ValueError, match=r"^No scale and shift of 'layer' agree"):
        vp.normalize(Loop(), vp.Moments(unit, unit), init="preserve")
    assert isinstance(vp.normalize(Loop(), vp.Moments(unit, unit)).layer, Normalized)


class Shared(nn.Module):
    """One layer adds to the stream in every block, between layers of their own."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.shared, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        nn.init.orthogonal_(self.shared.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.shared(x)
            x = x + torch.tanh(block(x))
        return x


def test_a_layer_on_its_own_output_that_settles_nowhere_is_refused_soon_with_advice_that_works() -> None:
    unit, x = torch.ones(1, 4), torch.randn(8, 4)
    settles = Shared(0.1)
    assert apart(vp.normalize(settles, vp.Moments(unit, unit), init="preserve")(x), settles(x)) <= 1e-5
    grows = Shared(1.5)
    counted = mock.patch.object(
        Normalized, "output_statistics", autospec=True, side_effect=Normalized.output_statistics
    )
    with (
        counted as found,
        pytest.raises(ValueError, match=r"^No scale and shift of 'shared' agree"),
    ):
        vp.normalize(grows, vp.Moments(unit, unit), init="preserve")
    assert found.call_count <= 7 * 40  # layers times sweeps
    model = vp.normalize(grows, vp.Moments(unit, unit), init="preserve", only=lambda path, _: path != "shared")
    assert apart(model(x), grows(x)) <= 1e-5
    vp.normalize(grows, vp.Moments(unit, unit), init="project")(x)


LARGER = ("conv", "identity skip", "pools, one input channel", "branches")


@pytest.mark.parametrize("name", ("mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)))
def test_propagation_agrees_with_the_normalization_it_made(name: str) -> None:
    given, kept_model = kept(name)
    normalized = train_a_little(copy.deepcopy(kept_model))
    result = vp.propagate(normalized, given.moments, given.inputs)
    for path, site in sites(normalized).items():
        found = result[path]
        axes = [a for a in range(found.ndim) if a != 1]
        mean = found.mean.mean(axes, keepdim=True)
        var = (found.var + (found.mean - mean).square()).mean(axes)
        assert (mean.flatten() - site.shift).abs().max() <= 1e-4 * (1 + site.scale.abs().max()), path
        assert (var - site.scale.square()).abs().max() <= 1e-4 * site.scale.square().max(), path


def test_statistics_follow_the_input() -> None:
    given = case("mlp")
    normalized = given.normalized(form="paper")
    mean, var = moments_before(normalized[0])
    weight = normalized[0].weight
    assert apart(mean, weight @ given.moments.mean.flatten()) <= 1e-12
    assert apart(var, weight.square() @ (given.moments.var.flatten() + 1e-6)) <= 1e-12


def leaky(x: Tensor) -> Tensor:
    """The paper's leaky relu."""
    return F.relu(x) + 0.03 * x


class Chain(nn.Module):
    """Linear layers, or 3x3 convolutions, with one activation between."""

    def __init__(self, activation: object, depth: int, width: int, padding: int | None = None) -> None:
        super().__init__()
        self.activation = activation
        self.layers = nn.ModuleList(
            nn.Linear(width, width) if padding is None else nn.Conv2d(width, width, 3, padding=padding)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(self.activation(x))
        return x


def outputs_of(model: Chain, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    handles = [layer.register_forward_hook(lambda _m, _a, out: found.append(out)) for layer in model.layers]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return found


def check_medians(model: Chain, x: Tensor, mean_within: float) -> None:
    for index, output in enumerate(outputs_of(model, x)):
        axes = [axis for axis in range(output.ndim) if axis != 1]
        mean, std = output.mean(axes).abs().median(), output.std(axes).median()
        assert mean <= mean_within, f"layer {index}: mean {mean:.3f}"
        assert 0.9 <= std <= 1.1, f"layer {index}: std {std:.3f}"


def chain(activation: object, depth: int, width: int, *, side: int = 0, padding: int | None = None) -> Any:
    torch.manual_seed(0)
    model = Chain(activation, depth, width, padding)
    shape, size = ((side, side), 20_000 // side**2) if side else ((), 4000)
    x = torch.randn(size, width, *shape)
    one = torch.ones(1, width, *[1 for _ in shape])
    return vp.normalize(model, vp.Moments(0 * one, one), example=x[:1], form="paper"), x


@pytest.mark.slow
@pytest.mark.parametrize("activation", (torch.sigmoid, torch.tanh))
def test_deep_saturating_networks_start_centred(activation: object) -> None:
    check_medians(*chain(activation, 50, 256), 0.05)


RECTIFIERS = (torch.relu, leaky, F.gelu)


@pytest.mark.slow
@pytest.mark.parametrize("activation", RECTIFIERS)
def test_rectifier_networks_start_centred(activation: object) -> None:
    check_medians(*chain(activation, 10, 256), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "padding"), ((24, 0), (64, 1)), ids=("valid", "padded"))
@pytest.mark.parametrize("activation", RECTIFIERS)
def test_convolutional_networks_start_centred(activation: object, side: int, padding: int) -> None:
    # A border of zeros differs from the rest; where it is much of the image this adds up over layers, to std 1.07
    # (relu) and 1.13 (gelu) in the tenth at 32 x 32, 1.13 at 16 x 16 and 1.3 at 8 x 8 (relu).
    check_medians(*chain(activation, 10, 64, side=side, padding=padding), 0.1)


def test_a_shallow_network_starts_centred() -> None:
    check_medians(*chain(torch.tanh, 4, 256), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "most"), ((torch.tanh, 1.5), (torch.relu, 10), (leaky, 10)))
def test_a_hundred_layers_neither_vanish_nor_explode(activation: object, most: float) -> None:
    torch.manual_seed(0)
    one = torch.ones(1, 256)
    model = vp.init_(Chain(activation, 100, 256), vp.Moments(0 * one, one), center=False, orthogonal=False)
    seconds = [float(output.square().mean()) for output in outputs_of(model, torch.randn(1000, 256))]
    assert all(1 / most <= second <= most for second in seconds), seconds
    assert not any(layer.bias.any() for layer in model.layers)


@pytest.mark.parametrize(
    "start", (nn.init.orthogonal_, nn.init.xavier_normal_, nn.init.ones_), ids=lambda f: f.__name__
)
def test_initialization_works_from_any_start(start: Any) -> None:
    torch.manual_seed(0)
    model, x = Chain(torch.tanh, 2, 128), torch.randn(4000, 128)
    for layer in model.layers:
        start(layer.weight)
        nn.init.normal_(layer.bias)
    vp.init_(model, vp.Moments(torch.zeros(1, 128), torch.ones(1, 128)))
    outputs = outputs_of(model, x)
    check = outputs[:1] if start is nn.init.ones_ else outputs  # equal units are anything but independent
    for output in check:
        assert output.mean(0).abs().median() <= 0.05
        assert 0.9 <= output.std(0).median() <= 1.1


def test_without_centring_the_second_moment_is_one() -> None:
    torch.manual_seed(0)
    one = torch.ones(1, 64, dtype=torch.float64)
    model = vp.init_(Chain(torch.relu, 3, 64).double(), vp.Moments(0 * one, one), center=False)
    for layer in model.layers[1:]:  # He's rule: E relu(z)^2 = 1/2
        norms = layer.weight.square().sum(1)
        assert apart(norms, torch.full_like(norms, 2.0)) <= 1e-5
        assert not layer.bias.any()


def test_initialization_leaves_a_plain_model() -> None:
    given = case("own batch norm")
    model, classes = given.model, [type(m) for m in given.model.modules()]
    assert vp.init_(model, given.moments, example=given.inputs, shift=False, orthogonal=False) is model
    assert [type(m) for m in model.modules()] == classes
    expected = case("own batch norm").normalized(form="paper")
    assert apart(given.run(model), given.run(expected)) <= 1e-12


class WithTemperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.temperature = nn.Linear(4, 3), nn.Linear(3, 2), 1.0
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.temperature + self.shift)


def test_statistics_follow_buffers_and_not_numbers_in_attributes() -> None:
    """As the documentation of `vp.normalize` says."""
    model: Any = vp.normalize(WithTemperature(), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4)))
    before = [part.detach() for part in model.second.folded()]
    model.temperature = 2.0
    assert all(torch.equal(now, then) for now, then in zip(model.second.folded(), before, strict=True))
    model.shift.fill_(1.0)
    assert not torch.equal(model.second.folded()[1], before[1])


def test_a_layer_that_trains_counts_dropout_before_it_whatever_its_mode() -> None:
    layers = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2)
    model: Any = vp.normalize(nn.Sequential(*layers), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4)))
    training = model.train()[2].folded()[0].detach()
    model[1].eval()
    assert torch.equal(model[2].folded()[0], training)
    assert not torch.allclose(model.eval()[2].folded()[0], training)


class TimeStep(nn.Module):
    """A layer of the data and two of a time step, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return self.out(torch.relu(self.data(x) + self.time(step[:, None])))


@pytest.mark.parametrize("step", [torch.tensor([0.3]), vp.Moments(torch.tensor([0.3]), 0.0)])
def test_layers_that_read_the_same_for_all_data_stay_as_they_are(step: Tensor | vp.Moments) -> None:
    """Their variance is that of rounding: divided by it, any other time step would be a thousand times too large."""
    torch.manual_seed(0)
    model, moments = TimeStep(), vp.Moments(torch.zeros(1, 4), 1.0)
    with pytest.warns(vp.PlainWarning, match=r"same for all data, so they stay as they are: 'time.0', 'time.2'"):
        normalized = vp.normalize(model, (moments, step))
    assert [path for path, module in normalized.named_modules() if hasattr(module, "scale")] == ["data", "out"]
    later = torch.tensor([0.9])
    torch.testing.assert_close(normalized.get_submodule("time")(later[:, None]), model.time(later[:, None]))
    vp.init_(start := copy.deepcopy(model), (moments, step))
    assert torch.equal(start.time[0].weight, model.time[0].weight)


def test_layers_that_start_at_zero_are_left_out_by_name() -> None:
    """As the last layers of blocks in diffusion models do."""
    torch.manual_seed(0)
    model, moments = (
        nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 2)),
        vp.Moments(torch.zeros(1, 64), 4.0),
    )
    nn.init.zeros_(model[2].weight)
    with pytest.raises(
        ValueError, match="Output 0 of '2' has only zero weights: give it others, or leave it out with `only`"
    ):
        vp.init_(model, moments)
    vp.init_(model, moments, only=lambda path, _: path != "2", shift=False)
    found = vp.propagate(model, moments)
    torch.testing.assert_close(found["1"].var, torch.ones(1, 32), rtol=1e-4, atol=0.0)
    assert not model[2].weight.any()


def test_each_input_is_evaluated_once_to_preserve_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [module for _ in range(3) for module in (nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))]
    plain, x = nn.Sequential(nn.Linear(3, 4), *blocks).double(), torch.randn(2, 3, dtype=torch.float64)
    evaluated: list[Any] = []
    call = Statistics.__call__
    monkeypatch.setattr(Statistics, "__call__", lambda self, *more: evaluated.extend(self.targets) or call(self, *more))
    model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=x, init="preserve")
    assert len(evaluated) == 3
    torch.testing.assert_close(model(x), plain(x), rtol=1e-10, atol=1e-12)
