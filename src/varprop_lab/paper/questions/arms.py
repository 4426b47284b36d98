"""One way of training the paper's MNIST network, and what is kept of a run of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...data.batches import MEASURE
from ...data.datasets import Dataset
from ...protocol.experiments import Experiment
from ...protocol.initialization import StartingPoint
from ...protocol.models import Factory
from ...protocol.records import Cell, Method, Start
from ...report.series import rounded
from ...training.deviations import ratios
from ...training.metrics import in_parts
from ...training.single import SingleTrainer
from ...training.task import Task
from ..experiments import EXPERIMENTS

IMAGES = 10_000  # training images of a run; validation has 6000
MEASURED = 2048  # of the training images, for standard deviations
RATES = (0.004, 0.01, 0.025)
Change = Callable[[nn.Module, Task, int], nn.Module]  # of a network at its start, with the data and the seed
Run = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """What is trained and how it is looked at."""

    name: str
    method: Method = "analytic"
    start: Start = "ap2"
    rates: tuple[float, ...] = RATES  # that are tried
    factory: str | Factory = "mnist"
    change: Change | None = None  # of the network before it is trained
    averaged: bool = False  # whether the mean of the weights over steps is validated too
    watched: Change | None = None  # makes the network whose standard deviations are kept, if they are


def experiment(epochs: int, images: int = IMAGES) -> Experiment:
    """The paper's MNIST experiment on fewer images, for fewer epochs."""
    usual = EXPERIMENTS["mnist"]
    return replace(usual, train_samples=images, protocol=replace(usual.protocol, epochs=epochs))


def trained(arm: Arm, seed: int, data: Dataset, settings: Experiment) -> Iterator[Run]:
    """A run for every rate: what was measured before training and after every epoch, by name."""
    task = Task(settings, data, arm.factory)
    cell = Cell("questions", arm.method, arm.start, seed, settings.batch_sizes[0])
    started = task.starts([cell])[cell]
    if arm.change is not None:
        started = StartingPoint(arm.change(started.model, task, seed).train(), started.gap)
    trainer = AveragingTrainer(task, cell, started)
    for rate in arm.rates:
        yield {"arm": arm.name, "rate": rate, "seed": seed, **_run(arm, rate, trainer)}


def _run(arm: Arm, rate: float, trainer: AveragingTrainer) -> Run:
    trainer.reset([rate])
    found: Run = {}
    _keep(found, _watched(arm, trainer))
    for number in range(trainer.protocol.epochs):
        trainer.epoch(number, lambda steps: None)
        _keep(found, {**trainer.measured(arm.averaged), **_watched(arm, trainer)})
    return {**found, "train_eval_loss": rounded(trainer.training_loss(number))}


def _watched(arm: Arm, trainer: AveragingTrainer) -> Run:
    if arm.watched is None:
        return {}
    task, seed = trainer.task, trainer.cell.seed
    images = next(trainer.batches.chunks(0, MEASURE))[0].flatten(0, 1)[:MEASURED]
    return {"ratios": list(ratios(arm.watched(trainer.model, task, seed), images).values())}


def _keep(found: Run, values: Run) -> None:
    for name, value in values.items():
        found.setdefault(name, []).append(rounded(value))  # None where a run diverged


class AveragingTrainer(SingleTrainer):
    """One network, and the mean of its parameters: what is older than an epoch has a tenth of the weight in it."""

    def reset(self, rates: list[float]) -> None:
        """Back to the start."""
        super().reset(rates)
        self.means = [parameter.detach().clone() for parameter in self.model.parameters()]

    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        super()._one_step(images, labels)
        with torch.no_grad():
            torch._foreach_lerp_(self.means, list(self.model.parameters()), 1 - self.running.decay)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within, the network has the means for its parameters."""
        parameters: list[Tensor] = list(self.model.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.means)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, own)

    def measured(self, averaged: bool) -> Run:
        """Running training loss; loss and error in validation, with averaged weights and in batches if there are."""
        (loss, right), in_batches = self._validation()[0], self._batch_validation()[0]
        found = {"train_loss": self.losses()[0], "valid_loss": loss, "valid_error": 1 - right}
        if in_batches is not None:
            found |= {"batch_loss": in_batches[0], "batch_error": 1 - in_batches[1]}
        if averaged:
            with self._averaged():
                loss, right = self._measured(in_parts(*self.task.validation(self.cell.seed)))
            found |= {"averaged_loss": loss, "averaged_error": 1 - right}
        return found

    def training_loss(self, number: int) -> float:
        """On the training images of an epoch, in evaluation mode."""
        return self._training_losses(number)[0]
