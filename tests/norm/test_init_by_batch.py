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
