"""Samples anywhere in a network: behind transposes, in merged axes, in windows; samples that meet are refused."""

import copy

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.predict.samples import Samples

from .test_predict import assert_like_draws, drawn, with_drawn_parameters


class Moved(nn.Module):
    """A function of an input with two layers, a dropout and a readout, of inputs (batch, time, 8)."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.f, self.first, self.second, self.out = forward, nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)
        self.dropout, self.recurrent = nn.Dropout(0.3), nn.LSTM(32, 32)
        self.attention = nn.MultiheadAttention(32, 2)

    def hidden(self, x):
        return self.dropout(torch.relu(self.second(torch.relu(self.first(x)))))

    def forward(self, x):
        return self.f(self, x, *x.shape[:2])


def windows(m, x, b, t):
    tiles = x.view(b, t // 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, 8)  # halves of channels exchange
    tiles = m.hidden(tiles) + m.hidden(tiles).mean(1, keepdim=True)
    return m.out(tiles.view(b, -1, 32).mean(1))


MOVED = {
    "time first": lambda m, x, b, t: m.out(m.hidden(x.transpose(0, 1)).mean(0)),
    "merged": lambda m, x, b, t: m.out(m.hidden(x.reshape(b * t, 8)).view(b, t, 32).mean(1)),
    "merged behind time": lambda m, x, b, t: m.out(
        m.hidden(x.transpose(0, 1).reshape(t * b, 8)).view(t, b, 32).mean(0)
    ),
    "side by side": lambda m, x, b, t: m.out(sum(m.hidden(torch.cat([x[:, 0], x[:, 1]])).chunk(2))),
    "last": lambda m, x, b, t: m.out(m.hidden(x).permute(1, 2, 0).mul(2).mean(0).T),
    "windows": windows,
    "recurrent": lambda m, x, b, t: m.out(m.dropout(m.recurrent(m.hidden(x.transpose(0, 1)))[0]).mean(0)),
    "attention": lambda m, x, b, t: m.out(m.attention(*[m.hidden(x.transpose(0, 1))] * 3)[0].mean(0)),
}


@pytest.mark.parametrize("steps", [6, 4])
@pytest.mark.parametrize("way", MOVED)
def test_noise_of_samples_that_have_moved(way, steps):
    """With as many samples as steps shapes do not tell which axis is which."""
    model, x = Moved(MOVED[way]), torch.randn(6, steps, 8)
    found = vp.predict(model, x)
    assert_like_draws(found, drawn(model, x))
    one = vp.predict(model, x[:1])
    torch.testing.assert_close(one.covariance, found.covariance[:1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("way", [way for way in MOVED if way not in ("recurrent", "attention")])
def test_random_weights_where_samples_have_moved(way):
    """All steps of a sample meet one draw of a weight, also where steps and samples are one axis."""
    model, x = Moved(MOVED[way]), torch.randn(6, 6, 8)
    names = [name for name, _ in model.named_parameters() if name.startswith(("first", "second", "out"))]
    parameter_var = {name: 0.04**2 for name in names}
    found = vp.predict(model, x, parameter_var=parameter_var, random=[])
    assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))
    one = vp.predict(model, x[:1], parameter_var=parameter_var, random=[])
    assert (one.std / found.std[:1]).log().abs().max() < 0.05  # both by four draws of shared products


def test_images_of_a_sample_share_the_weights_of_a_convolution():
    class Frames(nn.Sequential):
        def forward(self, x):
            return self[2](torch.relu(self[1](self[0](x.flatten(0, 1)))).mean((2, 3)).view(*x.shape[:2], -1).mean(1))

    torch.manual_seed(0)
    model, x = Frames(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)), torch.randn(6, 4, 2, 6, 6)
    parameter_var = {name: 0.04**2 for name, _ in model.named_parameters()}
    found = vp.predict(model, x, parameter_var=parameter_var)
    assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))


def test_parameters_along_time_that_comes_first():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions, self.gain, self.out = (
                nn.Parameter(torch.randn(5, 1, 8)),
                nn.Parameter(torch.randn(5, 1, 1)),
                nn.Linear(8, 3),
            )

        def forward(self, x):
            return self.out(torch.tanh(self.gain * x.transpose(0, 1) + self.positions).mean(0))

    torch.manual_seed(0)
    model, x = Positions(), torch.randn(6, 5, 8)
    parameter_var = {"positions": 0.1**2, "gain": 0.1**2}
    found = vp.predict(model, x, parameter_var=parameter_var)
    assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))
    torch.testing.assert_close(vp.predict(model, x[:1], parameter_var=parameter_var).std, found.std[:1])


def test_draws_where_samples_have_moved():
    model, x = Moved(MOVED["merged behind time"]), torch.randn(6, 5, 8)
    truth = drawn(model, x)
    torch.manual_seed(1)
    assert_like_draws(vp.predict(model, x, draws=64), truth)


class Shared(nn.Module):
    """Noise that all samples share."""

    def forward(self, x):
        return x * (1 + torch.randn(1, x.shape[1])) if self.training else x


class Mixed(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, x):
        return x - self.share * x.mean(0)


@pytest.mark.parametrize("module", [Shared(), Mixed(0.1), Mixed(1.0), nn.LSTM(32, 32)])
@pytest.mark.parametrize("samples", [4, 6, 32])
def test_samples_that_meet_are_refused(module, samples):
    class First(nn.Sequential):
        def forward(self, x):
            for layer in self:
                x = (
                    layer(x[:, None])[0][:, 0] if isinstance(layer, nn.LSTM) else layer(x)
                )  # time first: samples as steps
            return x

    torch.manual_seed(0)
    model, x = First(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), module, nn.Linear(32, 3)), torch.randn(samples, 8)
    with pytest.raises(vp.VarpropError, match=r"share noise or meet in .* predict one at a time"):
        vp.predict(model, x, random=["2", "3"])
    assert vp.predict(model, x[:1], random=["2", "3"]).std.isfinite().all()


def test_where_samples_are_is_found_once():
    model, x = Moved(MOVED["merged behind time"]).eval(), torch.randn(6, 4, 8)
    model.dropout.train()
    program = vp.capture(model, x)
    expected = vp.predict(program, x)
    (trace,) = (fact for fact in program.facts.values() if type(fact).__name__ == "SampleTrace")
    assert trace.known
    trace.complete = lambda entries, mean: trace.known
    torch.testing.assert_close(vp.predict(program, x).covariance, expected.covariance)
    assert not copy.deepcopy(type(trace)()).known


def test_samples_in_an_axis_and_across_axes():
    values = torch.arange(2 * 3 * 4 * 5).view(1, 6, 4, 5)
    middle = Samples.of(2, 3, (6, 4, 5))
    assert (middle.axis, middle.outer) == (0, 3)
    assert torch.equal(middle.apart(values)[0, 1], values[0, 1::2])
    across = Samples.of(8, 1, (2, 4, 5))
    assert across.axis is None
    assert torch.equal(across.rows(values[:, :2])[0], values[0, :2].reshape(8, 5))
