"""Layer and group norm start as near to the plain network as least squares brings them."""

import pytest
import torch
from torch import nn

from varprop_lab import datasets, starts
from varprop_lab.paper.experiments import EXPERIMENTS
from varprop_lab.starts import StartData, add_sample_norms_, plain_network, with_sample_norms
from varprop_lab.training import Task

EXPLAINED = {"layer": 0.89, "group": 0.47}  # of the variance of the scores, on images that nothing was fitted to


@pytest.fixture(scope="module")
def task():
    return Task(EXPERIMENTS["digits"], datasets.load("digits"), "digits")


def explained(model, plain, images):
    with torch.no_grad():
        found, wanted = model.eval()(images), plain.eval()(images)
    return 1 - float((found - wanted).square().sum() / (wanted - wanted.mean(0)).square().sum())


@pytest.mark.parametrize("start", ["none", "bn", "ap2"])
@pytest.mark.parametrize("method", ["layer", "group"])
def test_the_start_explains_most_of_the_scores_and_more_than_scales_and_shifts_do(task, method, start, monkeypatch):
    batch, unseen = task.batches(0, 128).first_batch(), task.validation(0)[0]
    plain = plain_network("digits", start, 0, StartData(task.moments(0), batch, unseen))
    mixed = explained(with_sample_norms(plain, method, batch), plain, unseen)
    monkeypatch.setattr(starts, "_mix_", lambda *_: None)
    assert mixed > max(EXPLAINED[method], 0.05 + explained(with_sample_norms(plain, method, batch), plain, unseen))


def test_the_first_layer_stays_and_a_network_that_has_the_wanted_outputs_too():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2, bias=False), nn.Flatten(1))
    plain.append(nn.Linear(32, 3))
    batch = torch.randn(20, 1, 6, 6)
    model = with_sample_norms(plain, "group", batch)
    torch.testing.assert_close(model[0].weight, plain[0].weight, atol=1e-6, rtol=0)
    assert torch.equal(model[2].weight, plain[2].weight)  # its groups cannot be mixed
    assert not torch.allclose(model[4].weight, plain[4].weight, atol=1e-3)
    kept = with_sample_norms(nn.Sequential(nn.Linear(4, 3)), "layer", torch.randn(9, 4))
    assert not hasattr(kept[0], "norm")  # the last layer has none


def test_very_many_channels_are_not_mixed(monkeypatch):
    monkeypatch.setattr(starts, "_MOST_MIXED", 8)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 9))
    model = with_sample_norms(plain, "layer", torch.randn(20, 4))
    assert torch.equal(model[2].weight, plain[2].weight)


def test_norms_stand_behind_layers_in_the_order_of_their_calls():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(8, 2), nn.Linear(4, 8)

        def forward(self, x):
            return self.last(torch.tanh(self.first(x)))

    model = add_sample_norms_(Backwards(), "layer", torch.randn(5, 4))
    assert hasattr(model.first, "norm") and not hasattr(model.last, "norm")
