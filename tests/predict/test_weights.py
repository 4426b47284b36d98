"""Random weights of convolutions of every kind, against derivatives by autograd and against drawn weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp

from .test_predict import assert_like_draws, with_drawn_parameters

KINDS = {
    "1-d": (lambda: nn.Conv1d(4, 6, 3, 2, 1, 2, groups=2), (9,)),
    "1-d, an even kernel, same": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (7,)),
    "2-d, more than is read": (lambda: nn.Conv2d(4, 6, (3, 2), (3, 2), 1), (6, 6)),
    "3-d": (lambda: nn.Conv3d(4, 6, (3, 2, 1), (2, 1, 1), (1, 0, 2), (1, 2, 1), 2), (5, 4, 3)),
    "1-d, transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2, dilation=2), (5,)),
    "1-d, transposed, more behind than a step": (lambda: nn.ConvTranspose1d(4, 6, 2, 2, 1, 2, dilation=3), (5,)),
    "1-d, transposed, cut off": (lambda: nn.ConvTranspose1d(4, 6, 2, 1, 2), (7,)),
    "2-d, transposed": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), groups=2), (4, 3)),
    "3-d, transposed": (lambda: nn.ConvTranspose3d(4, 6, (2, 1, 3), (2, 1, 1), (0, 1, 1)), (3, 4, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_one_convolution_is_exact(kind):
    """Outputs are linear in its weights and bias: their covariance follows from derivatives, sample by sample."""
    torch.manual_seed(0)
    make, extents = KINDS[kind]
    model, x = nn.Sequential(make(), nn.Flatten()).double(), torch.randn(3, 4, *extents, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    parameter_var = {name: torch.rand_like(p) for name, p in parameters.items()}
    directions = torch.randn(2, *model(x).shape[1:], dtype=torch.float64)
    found = vp.predict(model, x, parameter_var=parameter_var, outputs=directions)
    for sample, covariance in zip(x, found.covariance, strict=True):
        outputs = directions @ model(sample.unsqueeze(0))[0]
        rows = [torch.autograd.grad(output, [*parameters.values()], retain_graph=True) for output in outputs]
        spread = torch.cat([parameter_var[name].flatten() for name in parameters])
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        torch.testing.assert_close(covariance, jacobian * spread @ jacobian.T)


def within(dimensions, act):
    """Two convolutions, and two that go back."""
    there, back = getattr(nn, f"Conv{dimensions}d"), getattr(nn, f"ConvTranspose{dimensions}d")
    down = [there(2, 8, 3, padding=1), act(), there(8, 8, 3, stride=2, padding=1, groups=2), act()]
    up = [back(8, 8, 2, stride=2), act(), back(8, 4, 3, padding=1)]
    return nn.Sequential(*down, *up, nn.Flatten(2), Mean(), nn.Linear(4, 3)).double()


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(-1)


@pytest.mark.parametrize("dimensions", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_weights_of_convolutions_and_transposed_ones(dimensions):
    torch.manual_seed(0)
    model, x = within(dimensions, nn.GELU), torch.randn(6, 2, *[4] * dimensions, dtype=torch.float64)
    parameter_var = {name: 0.1 * float(p.detach().square().mean()) for name, p in model.named_parameters()}
    found = vp.predict(model, x, parameter_var=parameter_var)
    assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))
    assert {name for name, kind, _ in found.sources() if kind == "parameter"} == set(parameter_var)


@pytest.mark.parametrize("dimensions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_strong_noise_of_convolutions(dimensions):
    """Products of the noise of several layers, which all positions share."""
    torch.manual_seed(0)
    model, x = within(dimensions, nn.Identity), torch.randn(6, 2, *[4] * dimensions, dtype=torch.float64)
    names = [name for name, p in model.named_parameters() if p.ndim > 2]
    for name, p in model.named_parameters():  # else the last layer's own noise is nearly all
        p.detach().mul_(0.0 if name.endswith("bias") else 1.0)
    parameter_var = {name: 0.5 * float(model.get_parameter(name).detach().var()) for name in names}
    found = vp.predict(model, x, parameter_var=parameter_var)
    assert_like_draws(found, with_drawn_parameters(model, x, parameter_var))
    assert not found.reliable.any()


def test_an_image_without_an_axis_of_samples():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(1, 4, 3)

        def forward(self, x):
            return self.layer(F.dropout(x[0], 0.2, self.training)).mean(1).unsqueeze(0)

    torch.manual_seed(0)
    model, x = Alone().double(), torch.randn(1, 1, 8, dtype=torch.float64)
    parameter_var = {"layer.weight": 0.25}
    means = x[0, 0].unfold(0, 6, 1).mean(1)  # of what every tap reads
    found = vp.predict(model, x, parameter_var=parameter_var, random=[])
    torch.testing.assert_close(found.var, (0.25 * means.square().sum()).expand(1, 4))


class Residual(nn.Module):
    """A rectified sum, of channels whose positions see nearly the same."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.head(torch.relu(self.second(h) + h).mean((2, 3)))


def straight():
    layers = [nn.Conv2d(2, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8))


@pytest.mark.parametrize("make", [pytest.param(Residual, marks=pytest.mark.slow), straight])
def test_what_curves_leave_is_common_to_positions(make):
    """One weight bends all positions of a channel alike: as independent ones they have .94 of the std."""
    torch.manual_seed(0)
    model, x = make(), 1 + 0.3 * torch.randn(8, 2, 8, 8)
    weights = {name: p.detach() for name, p in model.named_parameters() if p.ndim == 4}
    parameter_var = {name: 0.5 * float(weight.square().mean()) for name, weight in weights.items()}
    found = vp.predict(model, x, parameter_var=parameter_var)
    truth = with_drawn_parameters(model, x, parameter_var)
    assert_like_draws(found, truth)
