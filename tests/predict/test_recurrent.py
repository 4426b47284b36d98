"""What bends recurrent layers: the variance that one step adds, and the marks of many steps."""

import pytest
import torch
from torch import nn

import varprop as vp


class Last(nn.Module):
    """The memory of a recurrent layer after the last step."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        state = self.layer(x)[1]
        return (state[1] if isinstance(state, tuple) else state)[-1]


def made(cell, gain, **settings):
    torch.manual_seed(0)
    layer = getattr(nn, cell)(8, 24, batch_first=True, **settings).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(gain)
    return Last(layer)


@pytest.mark.parametrize(
    ("cell", "settings"), [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu"})]
)
def test_one_step_adds_what_lines_leave(cell, settings):
    """Covariances of units are those of lines; the variance of all units together is that of draws."""
    model, x = made(cell, 3.0, **settings), torch.randn(8, 1, 8, dtype=torch.float64)
    found = vp.predict(model, x, input_var=0.25)
    with torch.no_grad():
        many = x.repeat(4000, 1, 1)
        truth = model(many + 0.5 * torch.randn_like(many)).unflatten(0, (4000, 8)).var(0).sum(1)
    added = sum(share.variance.sum(1) for share in found.shares if share.kind == "recurrent")
    ratio, by_lines = found.var.sum(1) / truth, (found.var.sum(1) - added) / truth
    assert (ratio - 1).abs().median() < 0.04
    assert by_lines.median() < 0.95
    assert (added > 0).all()


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_many_steps_of_independent_noise(cell):
    """Units are independent enough for what is added to suffice, and none is doubtful."""
    model, x = made(cell, 2.0), torch.randn(8, 12, 8, dtype=torch.float64)
    found = vp.predict(model, x, input_var=1.0)
    with torch.no_grad():
        many = x.repeat(2000, 1, 1)
        truth = model(many + torch.randn_like(many)).unflatten(0, (2000, 8)).var(0).sum(1)
    assert ((found.var.sum(1) / truth - 1).abs() < 0.06).all()
    assert found.reliable.all()


def test_both_directions_and_draws():
    torch.manual_seed(0)
    model, x = Last(nn.GRU(8, 12, 2, batch_first=True, bidirectional=True)), torch.randn(3, 5, 8)
    found = vp.predict(model, x, input_var=0.09)
    assert [kind for _, kind, _ in found.sources()].count("recurrent") == 4  # of two layers and two directions
    assert vp.predict(model, x, input_var=0.09, draws=8).std.isfinite().all()
