"""Chains without skips: the spread that is predicted, the one that is measured, and the warning."""

from __future__ import annotations

import functools
import math
import time
import warnings

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.norm.depth import DepthWarning, predict_spread

WIDTH = 64


class Skips(nn.Module):
    """As many layers as the chain that is warned of, in blocks of two with a skip round each."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + second(torch.relu(first(x)))
        return x


def chain(depth, activation=nn.ReLU, width=WIDTH, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(width, width), activation())][:-1])


def gaussian(width=WIDTH):
    return vp.Moments(torch.zeros(1, width), torch.ones(1, width))


def normalized(model, given=None, form="paper"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DepthWarning)
        return vp.normalize(model, given or gaussian(), form=form)


def depth_warnings(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, DepthWarning)]


@torch.no_grad()
def measured_spreads(model, inputs):
    """Standard deviation over samples, as a root mean square over the units of every linear layer."""
    found, x = [], inputs
    for part in model:
        x = part(x)
        if isinstance(part, (nn.Linear, nn.Conv2d)):
            found.append(float(x.var(0).mean().sqrt()))
    return found


# --- the warning ---


def test_a_deep_chain_is_warned_of_with_its_layer_length_and_growth():
    (warning,) = depth_warnings(lambda: vp.normalize(chain(30), gaussian(), form="paper"))
    text = str(warning.message)
    assert "Layer '58' ends a chain of 30 normalized layers without skips" in text
    assert "predicted to grow to 15" in text and "above 1.2 from layer '20' on" in text
    assert 'vp.normalize(..., form="deep")' in text
    assert warning.filename == __file__


def test_init_warns_where_it_centres_and_only_there():
    assert len(depth_warnings(lambda: vp.init_(chain(8, width=16), gaussian(16), shift=False))) == 1
    assert not depth_warnings(lambda: vp.init_(chain(8, width=16), gaussian(16), center=False))


def test_preserving_the_function_is_no_reason_to_warn():
    assert not depth_warnings(lambda: vp.normalize(chain(8, width=16), gaussian(16), init="preserve"))


@pytest.mark.parametrize(
    "build", [lambda: chain(8), lambda: chain(50, nn.Tanh), lambda: Skips(30)], ids=["shallow", "tanh", "skips"]
)
def test_no_warning_without_reason(build):
    assert not depth_warnings(lambda: vp.normalize(build(), gaussian(), form="paper"))


def test_as_an_error_the_warning_leaves_the_model_as_it_was():
    model = chain(8, width=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for change in (
        functools.partial(vp.init_, shift=False),
        functools.partial(vp.normalize, inplace=True, form="paper"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DepthWarning)
            with pytest.raises(DepthWarning):
                change(model, gaussian(16))
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_what_cannot_be_predicted_is_not_warned_of(monkeypatch):
    def fail(model):
        raise RuntimeError

    monkeypatch.setattr("varprop.norm.depth.predict_spread", fail)
    assert not depth_warnings(lambda: vp.normalize(chain(8, width=16), gaussian(16), form="paper"))


# --- the prediction ---


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.Sigmoid])
def test_prediction_agrees_with_measurement(activation):
    """Networks scatter by a factor of 1.5 about the prediction at this depth: it is their mean that is predicted."""
    spreads = predict_spread(normalized(chain(14, activation)))
    runs = torch.tensor([own_measurement(activation(), 14, seed) for seed in range(12)])
    measured = runs.square().mean(0).sqrt()
    for layer in (2, 5, 8, 11, 14):
        spread = spreads[str(2 * layer - 2)]
        assert spread.length == layer
        assert abs(math.log(spread.std / measured[layer - 1])) < math.log(1.08 if layer < 9 else 1.3)


@torch.no_grad()
def own_measurement(activation, depth, seed):
    """The same networks written by hand: rows of unit length, mean and variance of the activation from a sample."""
    generator = torch.Generator().manual_seed(seed)
    after = activation(torch.special.ndtri((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000))
    x, found = torch.randn(4096, WIDTH, generator=generator), []
    for _ in range(depth):
        weight = torch.randn(WIDTH, WIDTH, generator=generator)
        x = x @ (weight / weight.norm(dim=1, keepdim=True)).T
        found.append(float(x.var(0).mean().sqrt()))
        x = (activation(x) - float(after.mean())) / float(after.std())
    return found


def test_prediction_agrees_with_the_normalized_network_itself():
    model = normalized(chain(10, width=128), gaussian(128))
    spreads = predict_spread(model)
    for layer, std in enumerate(measured_spreads(model, torch.randn(4096, 128))):
        assert spreads[str(2 * layer)].std == pytest.approx(std, rel=0.15)


def test_convolutions_average_over_places():
    layers = [part for _ in range(8) for part in (nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.ReLU())]
    torch.manual_seed(0)
    model = normalized(nn.Sequential(*layers), vp.Moments(torch.zeros(1, 8, 8, 8), torch.ones(1, 8, 8, 8)))
    spreads = predict_spread(model)
    assert spreads["14"].length == 8
    assert spreads["14"].std == pytest.approx(measured_spreads(model, torch.randn(256, 8, 8, 8))[-1], rel=0.15)
    assert spreads["14"].std < predict_spread(normalized(chain(8, width=8), gaussian(8)))["14"].std


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_with_the_first_shift_deep_chains_stay_in_range_and_are_not_warned_of(activation):
    deep, made = chain(60, activation), []
    assert not depth_warnings(lambda: made.append(vp.normalize(deep, gaussian(), form="deep")))
    predicted = [spread.std for spread in predict_spread(made[0]).values()]
    measured = measured_spreads(made[0], torch.randn(512, WIDTH))
    assert all(0.9 < std < 1.1 for std in predicted)
    assert measured == pytest.approx(predicted, rel=0.25)  # single networks of this width scatter that much


def test_the_map_of_a_rectifier_with_centred_rows_is_a_square():
    from varprop.norm.depth import _known_response

    model = normalized(chain(2), form="deep")
    with torch.no_grad():
        model[0].shift.zero_()
    squares, _ = _known_response(model[2], {})(torch.tensor([0.25, 1.0, 9.0], dtype=torch.float64))
    assert squares == pytest.approx(torch.tensor([0.25, 1.0, 9.0], dtype=torch.float64), rel=1e-3)


def test_the_map_of_a_rectifier_is_the_closed_form():
    from varprop.norm.depth import _known_response

    model = normalized(chain(2))
    response = _known_response(model[2], {})
    r = torch.tensor([0.1, 0.3, 0.9, 1.0, 1.05, 3.0, 60.0], dtype=torch.float64)
    closed = (r.square() / 2 - r / math.pi + 1 / (2 * math.pi)) / (0.5 - 0.5 / math.pi)
    squares, variances = response(r.square())
    assert squares == pytest.approx(closed, rel=1e-3)
    assert squares[3] == pytest.approx(1.0, rel=1e-6)
    assert variances[3] == pytest.approx(4.4076, rel=1e-3)  # kurtosis of a rectified Gaussian, less one


def test_chains_end_at_joins_and_continue_through_what_is_not_linear():
    spreads = predict_spread(normalized(Skips(6)))
    assert [spread.length for spread in spreads.values()] == [1, 2, 1, 2, 1, 2]
    image = vp.Moments(torch.zeros(1, 2, 8, 8), torch.ones(1, 2, 8, 8))
    pooled = [nn.Conv2d(2, 4, 3), nn.PReLU(4), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8)]
    spreads = predict_spread(normalized(nn.Sequential(*pooled, nn.ReLU(), nn.Linear(8, 3)), image))
    assert [spread.length for spread in spreads.values()] == [1, 2, 3]


def test_a_layer_norm_brings_scales_back():
    layers = [part for _ in range(6) for part in (nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))]
    spreads = predict_spread(normalized(nn.Sequential(*layers), gaussian(16)))
    assert spreads["15"].std == pytest.approx(1.0, abs=0.02)


def test_prediction_is_cheap():
    model = normalized(chain(10))
    predict_spread(model)
    start = time.perf_counter()
    predict_spread(model)
    assert time.perf_counter() - start < 1.0  # about 0.02 s on an idle core
