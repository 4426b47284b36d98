"""Gradient scales against closed forms and against autograd on random inputs."""

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import varprop as vp


def normal_cdf(z):
    return 0.5 * torch.erfc(-z / math.sqrt(2))


def unit(*shape):
    return vp.Moments(torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64))


def rms(square):
    return float(square.mean().sqrt())


def test_linear_layers_transpose_their_squared_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    report = vp.inspect(model, unit(1, 5))
    expected = torch.ones(3, dtype=torch.float64) @ model[1].weight.detach().square()
    assert report["0"].numbers["gradient"] == pytest.approx(rms(expected), rel=1e-12)
    assert report["1"].numbers["gradient"] == 1.0
    assert report["0"].gradient_status == "exact"
    assert report.gradient_ratio == pytest.approx(rms(expected), rel=1e-12)


def test_a_rectifier_passes_the_gradients_of_what_is_on():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    moments = unit(1, 4)
    before = vp.propagate(model, moments)["0"]
    on = normal_cdf(before.mean / before.std).detach()
    after = torch.ones(2, dtype=torch.float64) @ model[2].weight.detach().square()
    report = vp.inspect(model, moments)
    assert report["0"].numbers["gradient"] == pytest.approx(rms(on * after), rel=1e-10)
    assert report["1"].gain == pytest.approx(rms(on), rel=1e-10)


class Written(nn.Module):
    """A rectifier by hand, whose two terms share their argument."""

    def forward(self, x):
        return F.relu(x) + 0.5 * x


def test_terms_of_a_hand_written_function_add_before_they_are_squared():
    moments = vp.Moments(torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[1.0, 4.0]]).double())
    on = normal_cdf(moments.mean / moments.std)
    report = vp.inspect(nn.Sequential(nn.Identity(), Scale(), Written()), moments)
    expected = 1.5**2 * on + 0.5**2 * (1 - on)
    assert report["1"].numbers["gradient"] == pytest.approx(rms(expected), rel=1e-9)


def test_the_gain_of_an_activation_is_its_own():
    model = nn.Sequential(Scale(), nn.ReLU(), nn.Dropout(), Written()).eval()
    moments = vp.Moments(torch.tensor([[0.3, -1.0]]).double(), torch.tensor([[1.0, 4.0]]).double())
    on = normal_cdf(moments.mean / moments.std)
    report = vp.inspect(model, moments)
    assert report["1"].gain == pytest.approx(rms(on), rel=1e-9)
    assert report["2"].gain == pytest.approx(1.0)
    # of a rectified value it is 1.5 where that is positive, and 0.5 at zero
    assert report["3"].gain == pytest.approx(rms(1.5**2 * on + 0.5**2 * (1 - on)), rel=1e-9)


def test_totals_do_not_depend_on_where_the_batch_axis_is():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x.transpose(0, 1)).transpose(0, 1))

    torch.manual_seed(0)
    model = Turned().double()
    report = vp.inspect(model, unit(1, 1, 4), example=torch.zeros(2, 9, 4, dtype=torch.float64))
    assert report["first"].gradient_total == pytest.approx(3 * report["first"].numbers["gradient"])
    assert report["last"].gradient_total == pytest.approx(3.0)


class Scale(nn.Module):
    """Keeps what follows from being a function of the input itself: a linear layer with the identity."""

    def __init__(self):
        super().__init__()
        self.register_buffer("eye", torch.eye(2, dtype=torch.float64))

    def forward(self, x):
        return F.linear(x, self.eye)


def test_a_smooth_function_has_its_mean_squared_slope():
    moments = vp.Moments(torch.tensor([[0.4]]).double(), torch.tensor([[2.0]]).double())
    report = vp.inspect(nn.Sequential(nn.Tanh()), moments)
    x = 0.4 + math.sqrt(2.0) * torch.linspace(-10, 10, 200_001, dtype=torch.float64)
    density = torch.exp(-((x - 0.4) ** 2) / 4) / math.sqrt(4 * math.pi)
    expected = torch.trapezoid(density * (1 - x.tanh() ** 2) ** 2, x)
    assert report["0"].gain == pytest.approx(math.sqrt(expected), rel=1e-8)


def test_uniform_axes_and_full_ones_agree():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.GELU(), nn.Conv2d(4, 3, 2), nn.AvgPool2d(2)).double()
    example = torch.zeros(1, 2, 11, 11, dtype=torch.float64)
    uniform = vp.inspect(model, unit(1, 2, 1, 1), example=example)
    full = vp.inspect(model, unit(1, 2, 11, 11))
    for path in "0123":
        assert uniform[path].numbers["gradient"] == pytest.approx(full[path].numbers["gradient"], rel=1e-9)


def test_broadcast_constants_are_summed_in_squares():
    class Broadcast(nn.Module):
        def forward(self, x):
            return F.linear(x, torch.ones(1, 2, dtype=torch.float64)) * torch.tensor([1.0, 2.0, 3.0]).double()

    report = vp.inspect(Broadcast(), unit(1, 2))
    assert report["(model) [linear]"].numbers["gradient"] == pytest.approx(math.sqrt(14), rel=1e-12)


class Residual(nn.Module):
    """Two branches, of which one is a product with a gate."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner, self.gate, self.head = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        return self.head(x + torch.tanh(self.inner(x)) * torch.sigmoid(self.gate(x)))


def measured_gradients(model, x, paths):
    kept = {}
    for path in paths:
        module = model.get_submodule(path)
        module.register_forward_hook(lambda _m, _i, out, path=path: kept.setdefault(path, out))
    out = model(x)
    found = torch.autograd.grad(out, list(kept.values()), torch.randn_like(out))
    return {path: rms(g.square()) for path, g in zip(kept, found, strict=True)}


def used(norm):
    """A batch norm that has seen data: one that has not counts as normalizing by the batch."""
    nn.init.constant_(norm.running_mean, 0.2), nn.init.constant_(norm.running_var, 1.5)
    return norm


NETWORKS = {
    "tanh": lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
    "residual": Residual,
    "dropout": lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.SiLU(), nn.Linear(64, 64)).train(),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(64, 64), used(nn.BatchNorm1d(64)), nn.ELU(), nn.Linear(64, 64)
    ).eval(),
    "layer norm": lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS.keys())
def test_gradient_scales_agree_with_autograd(make):
    torch.manual_seed(0)
    model = make().double()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1.5 / 8)
    report = vp.inspect(model, unit(1, 64))
    paths = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    measured = measured_gradients(model, torch.randn(2000, 64, dtype=torch.float64), paths)
    for path in paths:
        assert report[path].numbers["gradient"] == pytest.approx(measured[path], rel=0.1), path


def test_steps_without_a_backward_rule_are_marked():
    report = vp.inspect(
        nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8)), vp.Moments(*torch.ones(2, 1, 8))
    )
    assert report["0"].gradient_status == "approximate"
    assert report["2"].gradient_status == report["1"].gradient_status == "exact"
    assert "softmax" in report["1"].gradient_reason
    assert [f.kind for f in report.findings if f.severity == "note"] == ["backward"]


def test_an_average_gives_all_positions_one_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(1, 4, 1), nn.Conv1d(4, 2, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()).double()
    report = vp.inspect(model, unit(1, 1, 1), example=torch.zeros(1, 1, 18, dtype=torch.float64))
    assert report["1"].numbers["gradient"] == pytest.approx(1 / 16, rel=1e-12)
    # where all three taps meet they add up: 14 of 18 places, and 1 or 2 of them at the ends
    taps = model[1].weight.detach()
    ends = [taps[..., :1], taps[..., :2], taps[..., 1:], taps[..., 2:]]
    squares = 14 * taps.sum(-1).square() + sum(part.sum(-1).square() for part in ends)
    expected = (squares.sum(0) / 18 / 16**2).mean().sqrt()
    assert report["0"].numbers["gradient"] == pytest.approx(float(expected), rel=1e-10)
    assert report["0"].gradient_status == "exact" and report["2"].gradient_reason == ""


def test_equal_gradients_within_a_window_are_marked():
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.AvgPool1d(4), nn.Flatten(), nn.Linear(8, 2)).double()
    report = vp.inspect(model, unit(1, 1, 1), example=torch.zeros(1, 1, 18, dtype=torch.float64))
    assert report["0"].gradient_status == "approximate" and "average" in report["1"].gradient_reason
    assert report["1"].gradient_status == "exact"


class Gate(nn.Module):
    """Scales channels by a function of their averages."""

    def __init__(self, channels):
        super().__init__()
        self.pool, self.inner, self.outer = nn.AdaptiveAvgPool2d(1), *(nn.Conv2d(channels, channels, 1) for _ in "ab")

    def forward(self, x):
        return x * torch.sigmoid(self.outer(torch.relu(self.inner(self.pool(x)))))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in "ab")

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def pooled(*layers):
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 24)
    )


def conv(size=3, **settings):
    return nn.Conv2d(24, 24, size, **settings)


# With the largest relative error of the gradient of a layer: 0.2 where a step is known to be approximate (operands that
# share an ancestor, positions pooled). Without the common part the first layers come out up to 2.5 times too low.
AVERAGED = {
    "chain": (lambda: pooled(conv(), nn.ReLU(), conv(), nn.ReLU()), 0.06),
    "padded": (lambda: pooled(conv(padding=1), nn.ReLU(), conv(padding=1), nn.ReLU()), 0.06),
    "strided": (lambda: pooled(conv(padding=1, stride=2), nn.ReLU(), conv(5, padding=2, stride=2), nn.ReLU()), 0.06),
    "dilated, grouped": (lambda: pooled(conv(dilation=2, groups=4), nn.ReLU(), conv(groups=24)), 0.06),
    "transposed": (lambda: pooled(nn.ConvTranspose2d(24, 24, 3, stride=2, groups=2), nn.ReLU(), conv()), 0.2),
    "maximum": (lambda: pooled(conv(), nn.ReLU(), nn.MaxPool2d(2), conv(), nn.ReLU()), 0.06),
    "window": (lambda: pooled(conv(), nn.ReLU(), nn.AvgPool2d(2), conv(), nn.ReLU()), 0.06),
    "overlapping window": (lambda: pooled(nn.AvgPool2d(3, 1, 1), conv(), nn.ReLU()), 0.2),
    "batch norm, dropout": (
        lambda: pooled(conv(), used(nn.BatchNorm2d(24)), nn.SiLU(), nn.Dropout(0.3), conv(), nn.SiLU()),
        0.06,
    ),
    "residual": (lambda: pooled(Block(24), nn.ReLU(), Block(24), nn.ReLU()), 0.2),
    "gate": (lambda: pooled(conv(), nn.ReLU(), Gate(24), conv(), nn.ReLU(), Gate(24)), 0.2),
    "enlarged": (lambda: pooled(conv(), nn.Upsample(scale_factor=2), conv(), nn.ReLU()), 0.2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "error"), AVERAGED.values(), ids=AVERAGED.keys())
def test_gradients_before_an_average_agree_with_autograd(make, error):
    torch.manual_seed(0)
    model = make().double().eval()
    layers = {path: m for path, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d))}
    for layer in layers.values():
        nn.init.kaiming_normal_(layer.weight)
    for layer in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        layer.train()
    report = vp.inspect(model, unit(1, 3, 1, 1), example=torch.zeros(1, 3, 14, 14, dtype=torch.float64))
    measured = measured_gradients(model, torch.randn(200, 3, 14, 14, dtype=torch.float64), layers)
    for path in layers:
        assert report[path].numbers["gradient"] == pytest.approx(measured[path], rel=error), path


class Attention(nn.Module):
    """Self-attention in four heads with a residual sum."""

    def __init__(self, masked=False):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.mask = nn.Linear(32, 12) if masked else None

    def forward(self, x):
        parts = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mask = None if self.mask is None else self.mask(x).unsqueeze(1)
        return x + self.out(F.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).flatten(-2))


class Tokens(nn.Module):
    """Two layers of attention, and the average of the tokens if wanted."""

    def __init__(self, averaged):
        super().__init__()
        self.first, self.second, self.head, self.averaged = Attention(), Attention(), nn.Linear(32, 16), averaged

    def forward(self, x):
        x = self.second(self.first(x))
        return self.head(x.mean(1) if self.averaged else x)


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("tokens", [1, 12])
def test_gradients_of_attention_agree_with_autograd(averaged, tokens):
    torch.manual_seed(0)
    model = Tokens(averaged).double()
    layers = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for layer in layers.values():
        nn.init.normal_(layer.weight, std=32**-0.5)
    report = vp.inspect(model, unit(1, tokens, 32), example=torch.zeros(1, 12, 32, dtype=torch.float64))
    measured = measured_gradients(model, torch.randn(400, 12, 32, dtype=torch.float64), layers)
    for path in layers:  # queries and keys by more, values by less
        assert report[path].numbers["gradient"] == pytest.approx(measured[path], rel=0.3), path
    assert report["first.value"].gradient_status == "approximate"


class OneProjection(nn.Module):
    """Attention whose queries, keys and values are one value."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.inner(x)
        return self.out(F.scaled_dot_product_attention(x, x, x))


def test_a_value_that_is_queries_keys_and_values_gets_the_gradients_of_all():
    torch.manual_seed(0)
    model = OneProjection().double()
    layers = {"inner": model.inner}
    for layer in (model.inner, model.out):
        nn.init.normal_(layer.weight, std=32**-0.5)
    report = vp.inspect(model, unit(1, 12, 32), example=torch.zeros(1, 12, 32, dtype=torch.float64))
    measured = measured_gradients(model, torch.randn(400, 12, 32, dtype=torch.float64), layers)
    assert report["inner"].numbers["gradient"] == pytest.approx(measured["inner"], rel=0.3)  # of the values alone: 0.46


def test_a_mask_made_of_the_input_gets_its_gradient():
    torch.manual_seed(0)
    model = Attention(masked=True).double()
    for layer, std in (
        (model.query, 0.01),
        (model.key, 0.01),
        (model.mask, 0.05),
        (model.value, 1.0),
        (model.out, 1.0),
    ):
        nn.init.normal_(layer.weight, std=std * 32**-0.5)
    report = vp.inspect(model, unit(1, 12, 32))
    measured = measured_gradients(model, torch.randn(2000, 12, 32, dtype=torch.float64), {"mask": model.mask})
    assert report["mask"].numbers["gradient"] == pytest.approx(measured["mask"], rel=0.03)


def test_a_maximum_keeps_the_total_of_a_channel():
    report = vp.inspect(nn.Sequential(nn.Conv1d(1, 2, 1), nn.MaxPool1d(4)), unit(1, 1, 1).to(torch.float32),
                        example=torch.zeros(1, 1, 16))  # fmt: skip
    assert report["0"].numbers["gradient"] == pytest.approx(0.5, rel=1e-6)
    assert report["0"].gradient_total == pytest.approx(report["1"].gradient_total, rel=1e-6)


def test_exploding_gradients_stay_finite():
    layers = [nn.Linear(4, 4, bias=False) for _ in range(12)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1e5)
    report = vp.inspect(nn.Sequential(*layers[:3]), vp.Moments(torch.zeros(1, 4), torch.full((1, 4), 1e-20)))
    assert report.gradient_ratio == pytest.approx((2e5) ** 2, rel=1e-5)
    assert {"explode", "growth"} <= {finding.kind for finding in report.errors}


@pytest.mark.parametrize("dropout", [nn.Dropout(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)])
def test_dropout_passes_what_positions_share(dropout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.SELU(), dropout, nn.Conv2d(6, 6, 3, groups=6), nn.AdaptiveAvgPool2d(1))
    moments = vp.Moments(torch.full((1, 3, 8, 8), 0.2), torch.ones(1, 3, 8, 8))
    report = vp.inspect(model, moments, example=torch.zeros(32, 3, 8, 8), check="gaussian", samples=6400)
    for row in (report["1"], report["2"]):
        seen = row.measured["gradient"]
        assert row.gradient_status == "exact"
        assert row.numbers["gradient"] == pytest.approx(seen["value"], abs=5 * seen["error"])


NORMALIZED = {
    "layer norm": (lambda: nn.LayerNorm(32), False),
    "rms norm": (lambda: nn.RMSNorm(32), False),
    "group norm": (lambda: nn.GroupNorm(2, 32), False),
    "batch norm in training": (lambda: nn.BatchNorm1d(32), True),
}


@pytest.mark.parametrize(("make", "batch"), NORMALIZED.values(), ids=NORMALIZED.keys())
def test_normalizations_divide_gradients_by_what_they_divide_by(make, batch):
    """Against autograd, with weights and spreads that differ from unit to unit; two of n components are lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), make(), nn.Linear(32, 32))
    nn.init.uniform_(model[1].weight, 0.5, 1.5)
    model[0].weight.data.mul_(3)
    example = torch.zeros(64 if batch else 8, 32)
    report = vp.inspect(model, unit(1, 32), example=example, check="gaussian", samples=2048)
    row = report["0"]
    assert row.numbers["gradient"] == pytest.approx(row.measured["gradient"]["value"], rel=0.1)
    assert not any("no backward rule" in row.gradient_reason for row in report.rows)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def without_gradient(x):
    with torch.no_grad():
        constant = torch.tanh(x)
    return x + constant


def detached_in_place(x):
    y = torch.tanh(x)
    y.detach_()
    return x + y


STOPPED = {
    "half of it detached": (lambda x: x.detach() * 0.5 + x * 0.5, 0.5),
    "all of it detached": (lambda x: x.detach() * 1.0, 0.0),
    "straight-through rounding": (lambda x: x + (x.round() - x).detach(), 1.0),
    "straight-through sign behind a line": (lambda x: 2 * x + (x.sign() - 2 * x).detach(), 2.0),
    "under no_grad": (without_gradient, 1.0),
    "detached in place": (detached_in_place, 1.0),
    "detached before a maximum": (lambda x: F.max_pool1d(torch.relu(x.detach()).unsqueeze(1), 2).squeeze(1), 0.0),
}


@pytest.mark.parametrize("name", STOPPED)
def test_no_gradient_passes_what_is_detached(name):
    """A straight-through estimator has the gradient of what is not detached."""
    function, slope = STOPPED[name]
    model = nn.Sequential(Function(lambda x: 1.0 * x), Function(function))
    report = vp.inspect(model, vp.Moments(torch.zeros(1, 1), torch.ones(1, 1)), example=(1, 6))
    assert report["0"].numbers["gradient"] == pytest.approx(slope, abs=1e-6)


class Quantized(nn.Module):
    """Values of another layer with the gradient of this one, as in a vector-quantized autoencoder."""

    def __init__(self):
        super().__init__()
        self.first, self.codes, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x)
        return self.last(y + (self.codes(x) - y).detach())


def test_a_straight_through_estimator_between_two_layers():
    torch.manual_seed(0)
    report = vp.inspect(Quantized().double(), unit(1, 6))
    expected = torch.ones(3, dtype=torch.float64) @ report.source[0].plan.program.model.last.weight.detach().square()
    assert report["first"].numbers["gradient"] == pytest.approx(rms(expected), rel=1e-5)
    assert report["codes"].numbers["gradient"] == 0.0


class Unrolled(nn.Module):
    """A recurrent cell called once a step."""

    def __init__(self, cell, steps=4):
        super().__init__()
        self.cell, self.head, self.steps = cell(8, 32), nn.Linear(32, 4), steps

    def forward(self, x):
        h = c = torch.zeros(x.shape[0], 32)
        for step in range(self.steps):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, step], (h, c))
            else:
                h = self.cell(x[:, step], h)
        return self.head(h)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_gradients_of_an_unrolled_cell(cell):
    torch.manual_seed(0)
    report = vp.inspect(Unrolled(cell), vp.Moments(0.0, 1.0), example=(16, 4, 8), check="gaussian", samples=128)
    for label in ("cell", "cell #4"):
        row = report[label]
        assert row.numbers["gradient"] == pytest.approx(row.measured["gradient"]["value"], rel=0.25), label
    assert "no backward rule" in report["cell #4"].gradient_reason


def test_gradients_through_time_do_not_count_as_vanishing():
    """The weights of a cell get the gradients of its last call too."""
    torch.manual_seed(0)
    report = vp.inspect(Unrolled(nn.GRUCell, 16), vp.Moments(0.0, 1.0), example=(2, 16, 8))
    assert report["cell"].numbers["gradient"] < 1e-3 * report["head"].numbers["gradient"]
    assert not [finding for finding in report.findings if finding.kind == "vanish"]
