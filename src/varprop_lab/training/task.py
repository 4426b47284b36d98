"""The data of every seed of an experiment, and the networks that training starts from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp
from varprop.cli.models import embedding_rows

from ..data import augmentation, datasets
from ..data.batches import Batches, evaluation_images
from ..data.datasets import Dataset
from ..protocol.experiments import Experiment
from ..protocol.models import Factory, build
from ..protocol.records import Cell
from ..protocol.starts import StartData, StartingPoint, starting_points, watch


def normalized_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with a scale, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(getattr(m, "scale", None), nn.Parameter)}


def ratios(model: nn.Module, data: Tensor) -> dict[str, float]:
    """True over predicted standard deviation of every normalized layer, root mean squares over its channels."""
    result: dict[str, float] = {}
    layers = normalized_layers(model)

    def measure(path: str, output: Tensor) -> None:
        channels = output.ndim - 1 if layers[path].weight.ndim == 2 else 1
        over = [axis for axis in range(output.ndim) if axis != channels]
        true, predicted = output.double().var(over, correction=0), layers[path].scale.double().square()
        result[path] = float((true.mean() / predicted.mean()).sqrt())

    watch(model, data, layers, measure)
    return result


Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

_PROBE = 256  # images on which functions are compared


@dataclass(frozen=True, eq=False)
class Task:
    """An experiment with its data."""

    experiment: Experiment  # what is done
    dataset: Dataset  # on the device of the training
    factory: str | Factory  # of the network; a name, or a function
    dtype: torch.dtype = torch.float32  # of the networks
    loss: Loss | None = None  # of outputs and targets, a mean over samples; cross-entropy by default
    # makes an optimizer of parameter groups, instead of Adam; cells are trained one at a time then
    optimizer: MakeOptimizer | None = None

    @property
    def device(self) -> torch.device:
        """Where everything happens."""
        return self.dataset.train_x.device

    def as_input(self, samples: Tensor) -> Tensor:
        """Samples in the dtype of the networks; tokens stay what they are."""
        return samples.to(self.dtype) if samples.is_floating_point() else samples

    @functools.cache  # noqa: B019  (it lives as long as its experiment)
    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Indices of the training and of the validation images."""
        training, validation = datasets.split(self.dataset, seed)
        return training[: self.experiment.train_samples], validation

    @functools.cache  # noqa: B019
    def moments(self, seed: int) -> vp.Moments | vp.Tokens:
        """Mean and variance of the augmented images that a seed trains on, or how frequent tokens are there.

        What it validates on has no part in them.
        """
        chosen = self.split(seed)[0]
        if augmentation.is_tokens(self.dataset.train_x):
            tokens = self.dataset.train_x[chosen]
            rows = embedding_rows(build(self.factory, 0), tokens[:1].cpu())
            return vp.Tokens(torch.bincount(tokens.flatten(), minlength=rows).to(self.dtype))
        moments = augmentation.statistics(self.dataset, chosen, self.experiment.augmentation)
        return vp.Moments(moments.mean.to(self.dtype), moments.var.to(self.dtype))

    def batches(self, seed: int, batch_size: int) -> Batches:
        """The training batches of a seed."""
        data, indices = self.dataset, self.split(seed)[0]
        return Batches(data.train_x, data.train_y, indices, self.experiment.augmentation, batch_size, seed)

    @functools.cache  # noqa: B019
    def validation(self, seed: int) -> tuple[Tensor, Tensor]:
        """Images and labels of the validation part."""
        chosen = self.split(seed)[1]
        images = evaluation_images(self.dataset.train_x[chosen], self.experiment.augmentation, seed)
        return images, self.dataset.train_y[chosen]

    @functools.cache  # noqa: B019
    def test(self) -> tuple[Tensor, Tensor]:
        """Images and labels of the official test set."""
        return evaluation_images(self.dataset.test_x, self.experiment.augmentation, 0), self.dataset.test_y

    def starts(self, cells: list[Cell]) -> dict[Cell, StartingPoint]:
        """Where each cell begins."""
        result: dict[Cell, StartingPoint] = {}
        for seed in sorted({cell.seed for cell in cells}):
            of_seed = [cell for cell in cells if cell.seed == seed]
            size = max(self.experiment.batch_sizes)  # the start does not depend on the batch size trained with
            batch, probe = self.batches(seed, size).first_batch(), self.validation(seed)[0][:_PROBE]
            classes = self.dataset.classes > 0
            samples = self.as_input(batch), self.as_input(probe)
            data = StartData(self.moments(seed), *samples, classes, self.experiment.borders)
            result.update(starting_points(self.factory, of_seed, data, self.experiment.own_weights))
        return result
