"""`init_` of models whose batch norms stand before a layer: they will normalize by the batch."""

import copy

import pytest
import torch
import torch.nn as nn

import varprop as vp


class PreActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.line1 = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.norm2, self.line2 = nn.BatchNorm1d(16), nn.Linear(16, 32)

    def forward(self, x):
        x = x + self.line1(torch.relu(self.norm1(x)))
        return self.line2(torch.relu(self.norm2(x)))


@pytest.mark.parametrize("training", [True, False])
def test_units_start_with_mean_zero_and_variance_one_in_training(training):
    torch.manual_seed(0)
    model = PreActivation().train(training)
    vp.init_(model, vp.Moments(5.0, 100.0), example=(1, 16))
    assert model.training == training and not model.norm1.running_mean.any()
    out = model.train()(5 + 10 * torch.randn(20000, 16)).detach()
    assert out.mean(0).abs().max() < 0.05
    assert out.std(0).min() > 0.9 and out.std(0).max() < 1.1


def test_batch_norms_that_have_seen_data_are_taken_as_stored():
    torch.manual_seed(0)
    model = PreActivation().train()
    for _ in range(20):
        model(5 + 10 * torch.randn(500, 16))
    model.norm1.running_var.mul_(4)  # halves what passes
    copied = vp.init_(copy.deepcopy(model).eval(), vp.Moments(5.0, 100.0), example=(1, 16))
    out = copied(5 + 10 * torch.randn(20000, 16))
    assert 0.9 < out.std(0).mean() < 1.1


def behind_layers(bias):
    parts = [(nn.Linear(64, 64, bias=bias), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*(module for part in parts for module in part), nn.Linear(64, 64))


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norms_behind_layers_start_where_the_batch_puts_them(bias):
    torch.manual_seed(0)
    model = vp.init_(behind_layers(bias), vp.Moments(0.0, 1.0), example=(1, 64), shift="first").train()
    x = torch.randn(20000, 64)
    for end in (2, 5, 8):
        out = model[:end](x).detach()
        assert (out.mean(0) - 0.3767).abs().max() < 1e-3 and (out.std(0) - 1).abs().max() < 1e-3
    out = model(x).detach()
    assert out.mean(0).abs().max() < 0.05
    assert 0.95 < out.std(0).square().mean().sqrt() < 1.05


def test_a_batch_norm_of_factor_zero_keeps_it_and_the_weights_before_it():
    torch.manual_seed(0)
    model = behind_layers(bias=False)
    nn.init.zeros_(model[4].weight)
    weight = model[3].weight.detach().clone()
    vp.init_(model, vp.Moments(0.0, 1.0), example=(1, 64))
    assert not model[4].weight.any() and torch.equal(model[3].weight, weight)
    assert not model.eval()[:5](torch.randn(8, 64)).any()
