"""What the rules of this folder cannot do counts as missing before anything runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp


class Expression(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.long)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.vector_norm(x, 3, -1),
        lambda x: F.grid_sample(x.view(1, 1, 2, 2), x.view(1, 2, 1, 2), mode="bicubic", align_corners=False),
        lambda x: x.scatter_reduce(1, zeros(x), x, "prod"),
        lambda x: x.index_fill(1, (x > 0).long()[0], 1.0),
        lambda x: torch.diff(x, 2),
        lambda x: (x > 0) + (torch.randn(4) > 0),
        lambda x: F.celu(x, -1.0),
        lambda x: torch.div(torch.ones(4), x, rounding_mode="floor"),
        lambda x: torch.cdist(x, 2 * x, 1.0),
        lambda x: F.kl_div(x, x.sigmoid()),
        lambda x: F.cross_entropy(x, (x > 0).long()[:, 0]),
    ],
    ids=["norm", "bicubic", "scatter", "place", "diff", "truth", "celu", "floor", "distance", "divergence", "class"],
)
def test_missing_before_anything_runs(function: Callable[[Tensor], Tensor]) -> None:
    assert vp.coverage(Expression(function), torch.zeros(1, 4)).missing
    with pytest.raises(vp.MissingRule):
        vp.propagate(Expression(function), vp.Moments(torch.zeros(1, 4), torch.ones(1, 4)))
