"""Weights that a model standardizes itself, by batch norm in training mode, are constants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp


class StandardizedConv(nn.Conv2d):
    """A convolution of normalizer-free networks, as timm writes it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


def test_the_weights_are_standardized_as_the_model_does() -> None:
    model, x = StandardizedConv(3, 4, 2), vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    found = vp.propagate(model, x, torch.zeros(1, 3, 5, 5)).output
    torch.testing.assert_close(found.var.flatten(), torch.full((4,), 12.0), rtol=1e-3, atol=0)
