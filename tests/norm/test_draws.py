"""Models that decide in Python, anew in every call, what they compute."""

import random
import warnings

import numpy
import pytest
import torch
from torch import Tensor, nn

import varprop as vp

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).double()


class RandomDepth(nn.Module):
    """Every block is skipped with some probability in training."""

    def __init__(self, drop: float, draw=random.random) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)).double()
        self.head = nn.Linear(8, 3).double()
        self.drop, self.draw = drop, draw

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not (self.training and self.draw() < self.drop):
                x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("draw", [random.random, numpy.random.rand], ids=["random", "numpy"])
@pytest.mark.parametrize("drop", [0.0, 1.0])
def test_layers_that_are_skipped_at_random_have_the_statistics_of_evaluation(draw, drop: float) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="RandomDepth draws from Python's random or from numpy in training mode"):
        model = vp.normalize(RandomDepth(drop, draw), vp.Moments(0.0, 1.0), example=(1, 8))
    expected = model.eval()(X)
    model.train().drop = 0.0
    assert torch.equal(model(X), expected)


def test_draws_of_torch_are_not_complained_of() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), RandomDepth(0.0, lambda: 1.0)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 8))


def test_a_layer_in_a_mode_it_was_not_called_in_is_refused_in_a_sentence() -> None:
    model = vp.normalize(RandomDepth(1.0, lambda: 0.0), vp.Moments(0.0, 1.0), example=(1, 8))
    model.train()(X)
    model.drop = 0.0
    with pytest.raises(RuntimeError, match="did not call this layer in training mode when it was normalized"):
        model(X)
