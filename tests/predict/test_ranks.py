"""Several ranks along an axis and running maxima, against real draws."""

import pytest
import torch
from torch import nn

import varprop as vp

from .test_predict import assert_like_draws


class Ranked(nn.Module):
    """Ranks of a layer's values, (samples, 2, count)."""

    def __init__(self, rank, left, count=12):
        super().__init__()
        self.layer, self.rank, self.head = nn.Linear(8, count), rank, nn.Linear(2 * left, 3)

    def forward(self, x):
        return self.head(self.rank(self.layer(x)).flatten(1))


SEVERAL = {
    "the three largest": (lambda h: h.topk(3).values, 3),
    "the four largest of rectified": (lambda h: h.relu().topk(4, 2).values, 4),
    "the three least along another axis": (lambda h: h.mT.topk(3, 1, largest=False).values, 3),
    "all in order": (lambda h: h.sort(descending=True).values, 12),
    "all in order, stable": (lambda h: h.sort(stable=True, dim=-1).values, 12),
}
RUNNING = {
    "largest so far": (lambda h: h.cummax(-1).values, 12),
    "largest so far of rectified": (lambda h: h.relu().cummax(-1).values, 12),
    "least so far along another axis": (lambda h: h.mT.cummin(1).values, 12),
}


def drawn(model, x, noise):
    with torch.no_grad():
        many = x.expand(2000, *x.shape)
        return model((many + noise * torch.randn(many.shape)).flatten(0, 1)).unflatten(0, (2000, -1))


@pytest.mark.parametrize("noise", [0.2, 0.5])
@pytest.mark.parametrize("case", {**SEVERAL, **RUNNING})
def test_ranks_are_those_of_draws(case, noise):
    """Lines alone have 0.8 to 0.9 of the std of ranks; what they leave counts as independent."""
    torch.manual_seed(0)
    model, x = Ranked(*{**SEVERAL, **RUNNING}[case]), torch.randn(16, 2, 8)
    found, draws = vp.predict(model, x, input_var=noise**2), drawn(model, x, noise)
    assert_like_draws(found, draws, 0.05 if case in RUNNING else 0.08, mean=0.2)
    total = (found.var.sum(1) / draws.var(0).sum(1)).sqrt()
    assert ((total - 1).abs() < 0.1).float().mean() > 0.9
    assert not found.linearized


def test_strong_noise_of_ranks_is_doubtful():
    """Where most of the variance is what lines leave, it matters how that is correlated."""
    torch.manual_seed(0)
    model, x = Ranked(*SEVERAL["the three largest"]), torch.randn(16, 2, 8)
    shares = [float((~vp.predict(model, x, input_var=noise**2).reliable).float().mean()) for noise in (0.05, 3.0)]
    assert shares[0] < 0.1
    assert shares[1] > 0.8


def test_ranks_of_what_drops_out_are_doubtful():
    """Zero or not is no Gaussian, for running maxima and for others."""
    torch.manual_seed(0)
    for rank, left in (SEVERAL["all in order"], RUNNING["largest so far"]):
        model = Ranked(rank, left)
        model.layer = nn.Sequential(model.layer, nn.ReLU(), nn.Dropout1d(0.3))
        assert not vp.predict(model, torch.randn(6, 2, 8)).reliable.any()


def test_draws_of_running_maxima_agree():
    torch.manual_seed(0)
    model, x = Ranked(*RUNNING["largest so far"]), torch.randn(4, 2, 8)
    parameter_var = {"layer.weight": 0.01}  # so that draws are regressed on the linear part
    found = vp.predict(model, x, parameter_var=parameter_var, input_var=0.04, draws=64)
    alone = vp.predict(model, x, parameter_var=parameter_var, input_var=0.04)
    assert abs((found.std / alone.std).median() - 1) < 0.1


def test_more_ranks_than_are_followed_are_named():
    torch.manual_seed(0)
    found = vp.predict(Ranked(lambda h: h.sort().values, 40, 40), torch.randn(2, 2, 8), input_var=0.01)
    assert found.linearized == {"(model)": "aten.sort"}
