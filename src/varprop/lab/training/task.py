"""What an experiment trains and evaluates on: the data of every seed, and the networks that training starts from."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

import varprop as vp

from ..data import augmentation, datasets
from ..data.batches import Batches, evaluation_images
from ..data.datasets import Dataset
from ..protocol.experiments import Experiment
from ..protocol.initialization import StartData, StartingPoint, starting_points
from ..protocol.models import Factory
from ..protocol.records import Cell

_PROBE = 256  # images on which functions are compared


@dataclass(frozen=True, eq=False)
class Task:
    """An experiment with its data.

    Attributes:
        experiment: What is done.
        dataset: On the device of the training.
        factory: Of the network; a name, or a function.
        dtype: Of the networks.
    """

    experiment: Experiment
    dataset: Dataset
    factory: str | Factory
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where everything happens."""
        return self.dataset.train_x.device

    @functools.cache  # noqa: B019  (it lives as long as its experiment)
    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Indices of the training and of the validation images."""
        training, validation = datasets.split(self.dataset, seed)
        return training[: self.experiment.train_samples], validation

    @functools.cache  # noqa: B019
    def moments(self, seed: int) -> vp.Moments:
        """Mean and variance of the augmented images that a seed trains on; validation images have no part in them."""
        found = augmentation.statistics(self.dataset, self.split(seed)[0], self.experiment.augmentation)
        return vp.Moments(found.mean.to(self.dtype), found.var.to(self.dtype))

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
        found: dict[Cell, StartingPoint] = {}
        for seed in sorted({cell.seed for cell in cells}):
            own = [cell for cell in cells if cell.seed == seed]
            size = max(self.experiment.batch_sizes)  # the start does not depend on the batch size trained with
            images = self.batches(seed, size).first_batch(), self.validation(seed)[0][:_PROBE]
            data = StartData(self.moments(seed), *(part.to(self.dtype) for part in images))
            found.update(starting_points(self.factory, own, data, self.experiment.own_weights))
        return found
