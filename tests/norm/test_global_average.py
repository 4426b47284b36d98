"""A global average counts as one of its positions in the deep form, and as independent ones in the paper's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.norm.fold.layout import EPS

SIZE = 4


class Network(nn.Module):
    """A convolution, a way to average its positions, and a linear layer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(WAYS[self.way](self.conv(x)).flatten(1))


WAYS: dict[str, Any] = {
    "adaptive": lambda x: nn.functional.adaptive_avg_pool2d(x, 1),
    "window": lambda x: nn.functional.avg_pool2d(x, SIZE),
    "mean": lambda x: x.mean((2, 3)),
    "kept mean": lambda x: x.mean((-2, -1), keepdim=True),
    "tokens": lambda x: x.flatten(2).mT.mean(1),
}


def normalized(way: str, form: Any) -> Any:
    torch.manual_seed(0)
    model = Network(way).double()
    moments = vp.Moments(torch.zeros(1, 3, 1, 1).double(), torch.ones(1, 3, 1, 1).double())
    return vp.normalize(model, moments, example=(1, 3, SIZE, SIZE), form=form)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["deep", "paper"])
def test_what_the_layer_behind_it_is_divided_by(way: str, form: str) -> None:
    model = normalized(way, form)
    weight = model.head.weight.detach()
    rows = weight - weight.mean(1, keepdim=True) if form == "deep" else weight
    positions = 1 if form == "deep" else SIZE * SIZE
    sigma = (
        rows.square().sum(1, keepdim=True) * (1 / positions + EPS)
    ).sqrt()  # the convolution's outputs have variance 1
    folded: Any = vp.fold(model)
    torch.testing.assert_close(
        folded.head.weight.detach(), rows / sigma, rtol=1e-6, atol=0
    )  # epsilon is 1e-6 of the variance
    if form == "deep":
        assert {row.path: row.how for row in vp.fold_report(model).layers}["head"] == "together"


def test_windows_smaller_than_the_image_count_as_independent() -> None:
    WAYS["windows"] = lambda x: nn.functional.avg_pool2d(x, SIZE // 2)[:, :, :1, :1]
    model = normalized("windows", "deep")
    weight = model.head.weight.detach()
    rows = weight - weight.mean(1, keepdim=True)
    sigma = (rows.square().sum(1, keepdim=True) * (4 / SIZE**2 + EPS)).sqrt()
    folded: Any = vp.fold(model)
    torch.testing.assert_close(
        folded.head.weight.detach(), rows / sigma, rtol=1e-6, atol=0
    )  # epsilon is 1e-6 of the variance
    del WAYS["windows"]


def test_channels_are_averaged_as_independent_ones() -> None:
    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(1, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(x).mean(1, keepdim=True))

    torch.manual_seed(0)
    moments = vp.Moments(torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1))
    folded: Any = vp.fold(vp.normalize(Channels(), moments, example=(1, 3, SIZE, SIZE), form="deep"))
    torch.testing.assert_close(folded.last.weight.abs().flatten(), torch.full((5,), (1 / 8 + EPS) ** -0.5))
