"""Many networks trained together: cells of one structure are stacked, and all of them make one step at a time.

Every cell has its own parameters, learning rate and optimizer state; cells of one seed see the same samples. What
happens to one, divergence included, does not reach the others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .batches import GENERAL, MEASURE, seed_of
from .cudagraph import replayed, side_by_side
from .group import Group
from .material import Material
from .measure import in_parts, loss_and_accuracy
from .protocol import DOUBLE
from .records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Cell
from .running import RunningLoss
from .starts import Started
from .trainer import Tick


class Ensemble:
    """All given cells as one `Trainer`.

    Args:
        material: The experiment and its data.
        cells: Of one batch size.
        started: Their networks, if they are made already; they stay as they are.
    """

    def __init__(self, material: Material, cells: list[Cell], started: dict[Cell, Started] | None = None) -> None:
        sizes = {cell.batch_size for cell in cells}
        if len(sizes) != 1:
            raise ValueError(f"The cells of an ensemble must have one batch size, not {sorted(sizes)}.")
        self.material, self.protocol = material, material.experiment.protocol
        self.seeds = sorted({cell.seed for cell in cells})
        self.sources = [material.source(seed, cells[0].batch_size) for seed in self.seeds]
        self.steps = self.sources[0].steps
        started = material.starts(cells) if started is None else started
        self.groups = [
            Group(own, [started[cell].model for cell in own], self.seeds, self.protocol.weight_decay)
            for own in _by_structure(cells)
        ]
        self.cells = [cell for group in self.groups for cell in group.cells]
        self.gaps = [started[cell].gap for cell in self.cells]
        self.base_rates = [0.0] * len(self.cells)
        self.rates = torch.zeros(len(self.cells), dtype=torch.float64, device=material.device)
        self.number = torch.zeros((), dtype=torch.float64, device=material.device)
        self.running = RunningLoss(len(self.cells), self.steps, self.protocol.remain, material.device)
        self._step = self._prepared()

    def _prepared(self) -> functools.partial[None]:
        images, labels = next(self._chunks(0))
        for group in self.groups:
            group.prepare(images[:, 0], labels[:, 0])
        return functools.partial(replayed(self._one_step, images[:, 0], labels[:, 0]))

    def _chunks(self, epoch: int, purpose: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels with axes for seeds, steps and samples."""
        chosen = {} if purpose is None else {"purpose": purpose}
        for parts in zip(*(source.chunks(epoch, **chosen) for source in self.sources), strict=True):
            images, labels = zip(*parts, strict=True)
            yield torch.stack(images).to(self.groups[0].start.dtype), torch.stack(labels)

    @torch.no_grad()
    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        self.number.add_(1)
        rates = self.rates.split([len(group.cells) for group in self.groups])
        tasks = [
            functools.partial(group.step, images, labels, own, self.number)
            for group, own in zip(self.groups, rates, strict=True)
        ]
        self.running.update(torch.cat(side_by_side(tasks, images.device)))

    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""
        self.base_rates = list(rates)
        self.number.zero_()
        self.running.reset_()
        for group in self.groups:
            group.reset_()

    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""
        torch.manual_seed(seed_of(GENERAL, self.seeds[0], number))  # for networks that draw numbers themselves
        factor = self.protocol.decay**number
        self.rates.copy_(torch.tensor([rate * factor for rate in self.base_rates], dtype=torch.float64))
        for images, labels in self._chunks(number):
            for step in range(images.shape[1]):
                self._step(images[:, step], labels[:, step])
            tick(images.shape[1])

    def losses(self) -> list[float]:
        """The running mean of the loss of every cell; not finite where it diverged."""
        return self.running.values()

    def curves(self, number: int) -> list[dict[str, float]]:
        """What is measured of every cell after an epoch."""
        images, labels = zip(*(self.material.validation(seed) for seed in self.seeds), strict=True)
        validation = torch.stack(images).to(self.groups[0].start.dtype), torch.stack(labels)
        found = self._measured(*validation)
        curves = [
            {TRAIN_LOSS: train, VALID_LOSS: loss, VALID_ACCURACY: right}
            for train, (loss, right) in zip(self.losses(), found, strict=True)
        ]
        for curve, loss in zip(curves, self._training_losses(number), strict=True):
            curve.update({} if loss is None else {TRAIN_EVAL_LOSS: loss})
        return curves

    def _measured(self, images: Tensor, labels: Tensor) -> list[tuple[float, float]]:
        found = [
            loss_and_accuracy(group.scores, ((x, group.own(y)) for x, y in in_parts(images, labels, axis=1)))
            for group in self.groups
        ]
        losses, shares = (torch.cat(part).tolist() for part in zip(*found, strict=True))
        return list(zip(losses, shares, strict=True))

    def _training_losses(self, number: int) -> list[float | None]:
        """In evaluation mode on the training set; for batch norm only, where it is another thing."""
        found: list[float | None] = []
        for group in self.groups:
            if group.cells[0].method != "batch":
                found += [None] * len(group.cells)
                continue
            parts = ((x.flatten(1, 2), group.own(y.flatten(1, 2))) for x, y in self._chunks(number, MEASURE))
            found += loss_and_accuracy(group.scores, parts)[0].tolist()
        return found

    def test(self) -> list[tuple[float, float]]:
        """Loss and accuracy of every cell on the official test set."""
        images, labels = self.material.test()
        images = images.to(self.groups[0].start.dtype)
        many = len(self.seeds)
        return self._measured(images.expand(many, *images.shape), labels.expand(many, *labels.shape))

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name."""
        parts = {f"group{index}": group.state() for index, group in enumerate(self.groups)}
        named = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return {**named, **self.running.state(), "number": self.number}


def _by_structure(cells: list[Cell]) -> list[list[Cell]]:
    found: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.method, cell.variant == DOUBLE), []).append(cell)
    return list(found.values())
