"""`vp.init_(shift="depth", orthogonal=True)`: gradients keep their size at any depth, and weights are rotations."""

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.gaussian.stability import SMOOTH, chi, scale_rate, start_for
from varprop.norm.initialization import orthogonalize_

MODULES = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh, "leaky": nn.LeakyReLU, "elu": nn.ELU}


def chain(activation, depth, width=64, seed=0):
    torch.manual_seed(seed)
    layers = [part for _ in range(depth) for part in (nn.Linear(width, width), activation())]
    return nn.Sequential(*layers[:-1])


def unit(width):
    return vp.Moments(torch.zeros(1, width), torch.ones(1, width))


def growth_of(model, width):
    """Root mean square of the gradient by the first layer's outputs over that by the last hidden layer's."""
    first = model[0](torch.randn(256, width))
    last = model[1:-2](first)
    weights = torch.randn(256, width)
    (gradient,) = torch.autograd.grad(last, first, weights)
    return float(gradient.square().mean().sqrt())


SHAPES = ("relu", "gelu", "tanh")  # a bend, a smooth one, an odd function; the others are like one of them


@pytest.mark.parametrize(
    "name", [name if name in SHAPES else pytest.param(name, marks=pytest.mark.slow) for name in MODULES]
)
def test_gradients_of_a_deep_chain_keep_their_size(name):
    """Squared, they may grow by 1.5 or e = 1.65^2; with the first shift alone it would be 1.3^30 for ReLU."""
    model = vp.init_(chain(MODULES[name], 30), unit(64), shift="depth", orthogonal=True)
    assert 1 < growth_of(model, 64) < 2.2
    y = model(torch.randn(2000, 64)).detach()
    assert y.var(0).mean().sqrt() == pytest.approx(1, abs=0.3)


def test_a_shallow_chain_has_the_first_shift_and_nothing_smaller():
    starts = []
    for shift in ("depth", "first"):
        torch.manual_seed(0)
        starts.append(vp.init_(chain(nn.ReLU, 8, 16), unit(16), shift=shift))
    for parameter, expected in zip(*(start.parameters() for start in starts), strict=True):
        assert torch.equal(parameter, expected)


def quadratic(mean, std):
    """x + x^2 / 2: its moments and the mean square of its slope."""
    var = std.square()
    return mean + (mean.square() + var) / 2, (1 + mean).square() * var + var.square() / 2, (1 + mean).square() + var


def test_the_start_of_a_function_with_moments_in_closed_form():
    """At mean b and deviation s chi - 1 = s^2 / 2 over (1 + b)^2 + s^2 / 2, and so is lambda - 1: steady nowhere."""
    growth = SMOOTH ** (1 / 20)
    shift, std = start_for(quadratic, 0.0, 20)
    assert shift == 0 and std**2 == pytest.approx(2 * (growth - 1) / (2 - growth), rel=1e-3)
    at = torch.tensor([shift], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)
    assert float(chi(quadratic, *at)) == pytest.approx(growth, abs=1e-5)
    assert float(scale_rate(quadratic, *at)) == pytest.approx(growth, abs=1e-4)


def test_a_line_needs_nothing():
    assert start_for(lambda mean, std: (mean, std.square(), torch.ones_like(mean)), 0.0, 1000) == (0.0, 1.0)


LAYERS = {
    "linear": lambda: nn.Linear(12, 8),
    "more rows than columns": lambda: nn.Linear(8, 12),
    "convolution": lambda: nn.Conv2d(4, 6, 3),
    "groups": lambda: nn.Conv2d(8, 4, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose2d(8, 6, 2, groups=2),
    "depthwise": lambda: nn.Conv1d(5, 5, 3, groups=5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rows_or_columns_become_orthonormal(name):
    torch.manual_seed(0)
    layer = LAYERS[name]()
    orthogonalize_([layer])
    weight, groups = layer.weight.detach(), getattr(layer, "groups", 1)
    pieces = weight.chunk(groups)
    if getattr(layer, "transposed", False):
        pieces = [piece.transpose(0, 1) for piece in pieces]
    for piece in pieces:
        matrix = piece.flatten(1)
        small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        torch.testing.assert_close(small, torch.eye(len(small)), atol=1e-5, rtol=0)
    again = weight.clone()
    orthogonalize_([layer])
    torch.testing.assert_close(layer.weight.detach(), again)


def test_rotations_are_as_torch_draws_them():
    """The same matrix and the same choice of signs as torch.nn.init.orthogonal_."""
    torch.manual_seed(0)
    layer = nn.Linear(7, 5)
    nn.init.normal_(layer.weight)
    drawn = layer.weight.detach().clone()
    orthogonalize_([layer])
    q, r = torch.linalg.qr(drawn.T)
    torch.testing.assert_close(layer.weight.detach(), (q * r.diagonal().sign()).T)


def test_growth_is_shared_by_the_layers_of_a_chain():
    """Half the layers may grow twice the logarithm each."""
    shifts = [
        float(vp.init_(chain(nn.ReLU, depth, 16), unit(16), shift="depth")[0](torch.randn(20000, 16)).detach().mean())
        for depth in (10, 40)
    ]
    assert shifts == pytest.approx([1.08, 1.83], abs=0.05)
