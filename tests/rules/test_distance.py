"""Distances between the rows of one value, which a row of independent operands cannot show."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import varprop as vp


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x)


def test_a_row_has_no_distance_from_itself() -> None:
    torch.manual_seed(0)
    given = vp.Moments(torch.randn(4, 8), 0.5 + torch.rand(4, 8))
    found = vp.propagate(Distances(), given).output
    draws = given.mean + given.std * torch.randn(20_000, 4, 8)
    measured = torch.cdist(draws, draws)
    apart = ~torch.eye(4, dtype=torch.bool)
    assert found.mean.diagonal().abs().max() < 1e-6 and found.var.diagonal().abs().max() < 1e-6
    torch.testing.assert_close(found.mean[apart], measured.mean(0)[apart], rtol=0.01, atol=0)
    torch.testing.assert_close(found.std[apart], measured.std(0)[apart], rtol=0.07, atol=0)
