"""Would statistics with all covariances be truer, and would they train better?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...batches import MEASURE
from ...environment import require
from ...training import Task, normalized_layers
from .runs import TRAINED, Arm, Question, experiment, is_lower, ratio_figure
from .truth import NEAR, is_near, is_nearer, itself

DIAGONAL, FULL = "variances alone", "all covariances"
EPS = 1e-6  # as varprop has it, beside the variances of what enters a layer
NODES = 24


def hermite() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the mean over a normal variable."""
    rule = require("numpy.polynomial.hermite_e", "Quadrature").hermegauss(NODES)
    nodes, weights = map(torch.from_numpy, rule)
    return nodes, weights / weights.sum()


class Layer(nn.Module):
    """A linear layer whose outputs are brought to mean `shift` and deviation `scale`, by statistics it is given."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.scale, self.shift = (
            nn.Parameter(p.detach().clone()) for p in (like.weight, like.scale, like.shift)
        )

    def forward(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """The normalized outputs."""
        return (x @ self.weight.t() - mean) / std * self.scale + self.shift


class WithCovariances(nn.Module):
    """The paper's network, normalized by means and covariances of all units.

    Behind an activation Cov(f(X_i), f(X_j)) = C_ij E f'(X_i) E f'(X_j); variances are exact (mathematics.md, 9).
    """

    mean: Tensor
    covariance: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(self, layers: list[Any], mean: Tensor, covariance: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(layer) for layer in layers)
        nodes, weights = hermite()
        for name, value in (("mean", mean), ("covariance", covariance), ("nodes", nodes), ("weights", weights)):
            self.register_buffer(name, value.to(layers[0].weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x, mean, covariance = x.flatten(1), self.mean, self.covariance
        layer: Any
        for index, layer in enumerate(self.layers):
            out = layer.weight @ covariance @ layer.weight.t() + EPS * torch.diag(layer.weight.square().sum(1))
            std = out.diagonal().sqrt()
            x = layer(x, layer.weight @ mean, std)
            if index < len(self.layers) - 1:
                x = torch.sigmoid(x)
                mean, covariance = self._logistic(layer, out / std / std[:, None])
        return x

    def _logistic(self, layer: Any, correlation: Tensor) -> tuple[Tensor, Tensor]:
        """Means and covariances behind logistic units that come with mean `shift` and deviation `scale`."""
        values = torch.sigmoid(layer.shift + layer.scale * self.nodes[:, None])
        mean, slope = self.weights @ values, self.weights @ (values * (1 - values))
        var = self.weights @ (values - mean).square()
        through = layer.scale * slope
        across = correlation * through * through[:, None]
        return mean, across - torch.diag(across.diagonal()) + torch.diag(var)


def with_covariances(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model's weights under statistics with covariances; those of the images are measured."""
    chunks = [images.flatten(0, 1).flatten(1).double() for images, _ in task.batches(seed, 128).chunks(0, MEASURE)]
    images = torch.cat(chunks)
    return WithCovariances(list(normalized_layers(model).values()), images.mean(0), torch.cov(images.t(), correction=0))


QUESTION = Question(
    "correlations",
    "Would statistics with covariances do better?",
    (Arm(DIAGONAL, watched=itself), Arm(FULL, change=with_covariances, watched=itself)),
    experiment(epochs=10),
    (
        (f"with all covariances every layer is within {NEAR} times at the end", is_near(FULL, -1)),
        (
            "they are nearer than variances alone, in the farthest layer, at the end",
            is_nearer((FULL, -1), (DIAGONAL, -1)),
        ),
        ("they have a lower training loss", is_lower(((FULL, TRAINED), (DIAGONAL, TRAINED)))),
        ("they have a lower validation loss", is_lower(((FULL, "valid_loss"), (DIAGONAL, "valid_loss")))),
    ),
    lambda records: ratio_figure("correlations", records, [DIAGONAL, FULL]),
)
