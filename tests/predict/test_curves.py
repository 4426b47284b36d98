"""Activations with slopes, and recurrent layers, against the rules they stand for."""

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.gaussian import activations
from varprop.gaussian.rectifier import relu_of_sum
from varprop.predict.curves import gelu, rectified, rectified_sum
from varprop.predict.noise import gram

from .test_predict import assert_like_draws, drawn


def grid():
    mean, std = torch.meshgrid(
        torch.linspace(-8, 8, 33, dtype=torch.float64), torch.logspace(-3, 1, 9, dtype=torch.float64), indexing="ij"
    )
    return mean.contiguous(), std.contiguous()


@pytest.mark.parametrize("negative", [0.0, 0.2, -1.0])
def test_a_rectifier_has_the_moments_and_the_slope_of_its_rule(negative):
    mean, std = grid()
    at = mean.clone().requires_grad_()
    expected_mean, expected_var = activations.leaky_relu(at, std, negative)
    (expected_slope,) = torch.autograd.grad(expected_mean.sum(), at)
    found = rectified(vp.Moments(mean, std.square()), negative)
    for value, expected in zip(found, (expected_mean, expected_var, expected_slope), strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_gelu_has_the_moments_and_the_slope_of_its_rule(dtype, tolerance):
    mean, std = grid()
    at = mean.clone().requires_grad_()
    expected_mean, expected_var = activations.gelu(at, std)
    (expected_slope,) = torch.autograd.grad(expected_mean.sum(), at)
    found_mean, found_var, found_slope = gelu(vp.Moments(mean.to(dtype), std.square().to(dtype)))
    torch.testing.assert_close(found_mean.double(), expected_mean.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found_slope.double(), expected_slope, rtol=tolerance, atol=tolerance)
    off = (found_var.double() - expected_var.detach()).abs() / std.square()
    assert float(off.max()) < tolerance


def test_single_precision_keeps_the_variance_far_from_the_kink():
    mean, std = torch.tensor([300.0, 1.0, -300.0]), torch.tensor([0.1, 0.01, 0.1])
    _, var, slope = rectified(vp.Moments(mean, std.square()))
    torch.testing.assert_close(var, torch.tensor([0.01, 0.0001, 0.0]), rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(slope, torch.tensor([1.0, 1.0, 0.0]))


def test_the_rectifier_of_a_sum_has_the_slopes_of_its_rule():
    torch.manual_seed(0)
    x, y = torch.rand(50, dtype=torch.float64).requires_grad_(), torch.randn(50, dtype=torch.float64).requires_grad_()
    vx, vy = torch.rand(2, 50, dtype=torch.float64)
    mean, var = relu_of_sum(x, vx, y, vy)
    slopes = torch.autograd.grad(mean.sum(), (x, y))
    found = rectified_sum(vp.Moments(x, vx), vp.Moments(y, vy))
    for value, expected in zip(found, (mean, var, *slopes), strict=True):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("elements", [3, 50_000])
def test_products_of_factors_by_rows_and_by_matrices(elements):
    factors = torch.randn(4, 2, elements, dtype=torch.float64)
    torch.testing.assert_close(gram(factors), torch.einsum("kbn,lbn->bkl", factors, factors))


def test_a_random_weight_on_a_random_input_leaves_the_product_of_their_variances():
    layer, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    spread = {"weight": torch.rand(2, 3, dtype=torch.float64), "bias": 0.5}
    found = vp.predict(layer, x, input_var=0.3, parameter_var=spread)
    weight, squares = layer.weight.detach(), x.square() @ spread["weight"].T
    expected = 0.3 * weight.square().sum(1) + squares + 0.3 * spread["weight"].sum(1) + 0.5
    torch.testing.assert_close(found.var, expected)
    assert {kind for _, kind, _ in found.sources()} == {"input", "parameter", "product"}


class Recurrent(nn.Module):
    def __init__(self, layer, **settings):
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.2), layer(6, 16, batch_first=True, **settings)
        self.head = nn.Linear(32 if settings.get("bidirectional") else 16, 3)

    def forward(self, x):
        return self.head(self.dropout(self.layer(self.dropout(x))[0][:, -1]))


@pytest.mark.parametrize(
    ("layer", "settings"),
    [(nn.LSTM, {}), (nn.GRU, {}), (nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.RNN, {})],
)
def test_dropout_around_recurrent_layers(layer, settings):
    torch.manual_seed(0)
    model, x = Recurrent(layer, **settings), torch.randn(16, 5, 6)
    found = vp.predict(model, x)
    assert_like_draws(found, drawn(model, x))
    assert "recurrent" in {kind for _, kind, _ in found.sources()}
    assert not found.linearized


def test_without_noise_a_recurrent_layer_is_itself():
    for layer in (nn.LSTM(3, 4, 2, bidirectional=True), nn.GRU(3, 4), nn.LSTM(3, 4, proj_size=2)):
        model = nn.Sequential(Sequence(layer.double()), nn.Flatten())
        x = torch.randn(2, 5, 3, dtype=torch.float64)
        torch.testing.assert_close(vp.predict(model, x, input_var=1e-18).mean, model(x).detach())


class Sequence(nn.Module):
    """The sequence that a recurrent layer puts out for samples along the first axis."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


@pytest.mark.parametrize(
    ("pool", "most"),
    [
        (nn.MaxPool2d(2), 0.2),
        (nn.MaxPool2d(3, 2, 1), 0.35),
        (nn.MaxPool2d(2, ceil_mode=True), 0.2),
        (nn.MaxPool2d((1, 2), 1), 1e-6),
    ],
)
def test_maxima_over_windows_beside_their_rule(pool, most):
    """Pair by pair: exact for two entries, a variance too small by up to 20 % for four and 35 % for nine."""
    torch.manual_seed(0)
    x = vp.Moments(2 * torch.randn(2, 3, 5, 7).double(), torch.rand(2, 3, 5, 7).double())
    exact = vp.propagate(pool, x).output
    found = vp.predict(pool, x.mean, input_var=x.var)
    off = (found.mean - exact.mean.flatten(1)) / exact.std.flatten(1)
    assert off.abs().max() < 0.05
    ratio = found.diagonal_var / exact.var.flatten(1)
    assert (ratio - 1).abs().max() < most
    assert (ratio - 1).abs().median() < 0.05
    # a line that explains no more than there is, and what it leaves, are all of the variance
    torch.testing.assert_close(found.var.sum(), found.diagonal_var.sum(), rtol=1e-6, atol=0)


def test_the_slopes_of_a_maximum_are_the_chances_to_be_the_largest():
    """Of two equal entries one half each; far apart all of it is the larger one's."""
    for gap, share in ((0.0, 0.5), (20.0, 1.0)):
        x = torch.tensor([[[[gap, 0.0]]]], dtype=torch.float64)
        found = vp.predict(nn.MaxPool2d((1, 2)), x, input_var=1.0)
        torch.testing.assert_close(found.input_variance.flatten()[0], torch.tensor(share**2, dtype=torch.float64))
