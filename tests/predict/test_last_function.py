"""A function of elements at the end of a network, over the whole variance of what it reads."""

import pytest
import torch
from torch import nn

import varprop as vp

from .test_predict import assert_like_draws, mlp

ENDS = {
    "sigmoid": (nn.Sigmoid(),),
    "exp": (type("Exp", (nn.Module,), {"forward": lambda self, x: x.exp()})(),),
    "scaled tanh, reshaped": (nn.Tanh(), type("Scaled", (nn.Module,), {"forward": lambda self, x: 2 * x - 1})(),
                              nn.Unflatten(1, (3, 1))),
    "rectifier": (nn.ReLU(),),
}  # fmt: skip


@pytest.mark.parametrize("outputs", [None, [2, 0]])
@pytest.mark.parametrize("end", ENDS)
def test_a_function_of_gaussian_outputs_of_units_that_are_not_independent(end, outputs):
    """64 units of four noisy inputs: independent, they would have a fraction of the variance."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3)).double()
    model, x, chosen = nn.Sequential(*layers, *ENDS[end]), torch.randn(5, 4).double(), outputs or [0, 1, 2]
    before = vp.predict(layers, x, input_var=0.5, outputs=outputs)
    found = vp.predict(model, x, input_var=0.5, outputs=outputs)
    z = torch.linspace(-8, 8, 4001, dtype=torch.float64).view(-1, 1, 1)
    weight = torch.softmax(-0.5 * z.square(), 0)
    whole = torch.zeros(*z.shape[:1], 5, 3).double()
    whole[..., chosen] = before.mean + z * before.std
    with torch.no_grad():
        values = nn.Sequential(*ENDS[end])(whole.flatten(0, 1)).view(whole.shape)[..., chosen]
    mean = (weight * values).sum(0)
    torch.testing.assert_close(found.mean, mean, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.var, (weight * (values - mean).square()).sum(0), rtol=2e-3, atol=1e-6)
    slope = (weight * z * values).sum(0) / before.std
    off_diagonal = slope[:, 0] * slope[:, 1] * before.covariance[:, 0, 1]
    torch.testing.assert_close(found.covariance[:, 0, 1], off_diagonal, rtol=2e-3, atol=1e-6)
    torch.testing.assert_close(sum(share.variance for share in found.shares), found.var)
    torch.testing.assert_close(found.input_variance.sum(-1), found.shares[0].variance)


def test_a_sigmoid_behind_dropout_and_one_number_a_sample():
    torch.manual_seed(0)
    model, x = nn.Sequential(mlp(outputs=1), nn.Sigmoid(), nn.Flatten(0)), torch.randn(16, 8)
    with torch.no_grad():
        model[0][-1].weight.mul_(4)
        draws = torch.sigmoid(model[0].train()(x.repeat(3000, 1))).view(3000, 16, 1)
    found = vp.predict(model, x)
    assert_like_draws(found, draws)
    assert {(name, kind) for name, kind, _ in found.sources()} >= {("0.5", "dropout"), ("1", "sigmoid")}
    assert sum(share for *_, share in found.sources()) == pytest.approx(1)


def test_a_last_function_that_bends_most_of_the_variance_is_doubtful():
    model, x = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), torch.randn(5, 4)
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(1, 4))
        model[0].bias.fill_(-8.0)
    assert not vp.predict(model, 0 * x, input_var=1.0).reliable.any()
    assert vp.predict(model, 2 + 0 * x, input_var=0.01).reliable.all()


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.LSTM(8, 3, batch_first=True), nn.Parameter(torch.rand(3))

    def forward(self, x):
        return torch.sigmoid(self.scale * self.layer(x)[0])[:, -1]


class Gated(Last):
    def forward(self, x):
        return torch.sigmoid(self.scale * self.layer(x)[1][0][0] + x.mean((1, 2), keepdim=True)[..., 0])


@pytest.mark.parametrize("make", [Last, Gated])
def test_networks_that_end_otherwise(make):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(6, 5, 8)
    found, draws = vp.predict(model, x, input_var=0.1), []
    with torch.no_grad():
        draws = model((x + 0.1**0.5 * torch.randn(3000, *x.shape)).flatten(0, 1)).unflatten(0, (3000, 6))
    assert_like_draws(found, draws)


def test_batches_of_a_captured_program_and_half_precision():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2), nn.Sigmoid()]
    model, x = nn.Sequential(*layers).eval(), torch.randn(13, 8)
    expected = vp.predict(model, x)
    model[2].train()
    torch.testing.assert_close(vp.predict(vp.capture(model, x[:5]), x).covariance, expected.covariance)
    assert (vp.predict(model.bfloat16(), x.bfloat16()).std / expected.std - 1).abs().max() < 0.05
