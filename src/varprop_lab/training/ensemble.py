"""Many networks trained together: cells of one structure are stacked, and all of them make one step at a time.

Every cell has its own parameters, learning rate and optimizer state; cells of one seed see the same samples. What
happens to one, divergence included, does not reach the others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from varprop.cli.names import first_line

from ..data.batches import AUGMENT, GENERAL, MEASURE, seed_of
from ..protocol.experiments import DOUBLE, MOMENTUM
from ..protocol.initialization import StartingPoint
from ..protocol.records import Cell
from .cuda_graph import captured_step, in_parallel_streams
from .metrics import RunningLoss, full_batches, in_parts
from .stacked import StackedNetworks
from .task import Task
from .trainer import Tick, Trainer


class CannotStack(RuntimeError):
    """Networks cannot be trained as an ensemble, though each of them can be trained by itself."""


class EnsembleTrainer(Trainer):
    """All given cells, of one batch size; their networks may be made already, and stay as they are."""

    def __init__(self, task: Task, cells: list[Cell], started: dict[Cell, StartingPoint] | None = None) -> None:
        sizes = {cell.batch_size for cell in cells}
        if len(sizes) != 1:
            raise ValueError(f"The cells of an ensemble must have one batch size, not {sorted(sizes)}.")
        self.task, self.protocol = task, task.experiment.protocol
        self.seeds = sorted({cell.seed for cell in cells})
        self.batches = [task.batches(seed, cells[0].batch_size) for seed in self.seeds]
        self.steps = self.batches[0].steps
        started = task.starts(cells) if started is None else started
        with _stacking():
            self.stacks = [
                StackedNetworks(own, [started[c].model for c in own], self.seeds, self.protocol.weight_decay, task.loss)
                for own in _by_structure(cells)
            ]
        self.cells = [cell for stack in self.stacks for cell in stack.cells]
        self.gaps = [started[cell].gap for cell in self.cells]
        self.started = [started[cell].model for cell in self.cells]
        self.base_rates = [0.0] * len(self.cells)
        self.rates = torch.zeros(len(self.cells), dtype=torch.float64, device=task.device)
        self.number = torch.zeros((), dtype=torch.float64, device=task.device)
        self.running = RunningLoss(len(self.cells), self.steps, self.protocol.remain, task.device)
        images, labels = (part[:, 0] for part in next(self._chunks(0)))
        with _stacking():
            for stack in self.stacks:
                stack.prepare(images, labels)
        self._step = captured_step(self._one_step, images, labels)

    def _chunks(self, epoch: int, purpose: int = AUGMENT) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels with axes for seeds, steps and samples."""
        for parts in zip(*(batches.chunks(epoch, purpose) for batches in self.batches), strict=True):
            images, labels = zip(*parts, strict=True)
            yield self.task.as_input(torch.stack(images)), torch.stack(labels)

    @torch.no_grad()
    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        self.number.add_(1)
        rates = self.rates.split([len(stack.cells) for stack in self.stacks])
        tasks = [
            functools.partial(stack.step, images, labels, own, self.number)
            for stack, own in zip(self.stacks, rates, strict=True)
        ]
        self.running.update(torch.cat(in_parallel_streams(tasks, images.device)))

    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""
        self.base_rates = list(rates)
        self.number.zero_()
        self.running.reset_()
        for stack in self.stacks:
            stack.reset_()

    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""
        torch.manual_seed(seed_of(GENERAL, self.seeds[0], number))  # for networks that draw numbers themselves
        factor = self.protocol.decay**number
        self.rates.copy_(torch.tensor([rate * factor for rate in self.base_rates], dtype=torch.float64))
        for images, labels in self._chunks(number):
            for step in range(images.shape[1]):
                self._step(images[:, step], labels[:, step])
            tick(images.shape[1])

    def _validation(self) -> list[tuple[float, float]]:
        return self._measured(*self._validation_samples())

    def _validation_samples(self) -> tuple[Tensor, Tensor]:
        images, labels = zip(*(self.task.validation(seed) for seed in self.seeds), strict=True)
        return self.task.as_input(torch.stack(images)), torch.stack(labels)

    def _measured(self, images: Tensor, labels: Tensor) -> list[tuple[float, float]]:
        found = [
            stack.measured((x, stack.own(y)) for x, y in in_parts(images, labels, axis=1)) for stack in self.stacks
        ]
        losses, shares = (torch.cat(part).tolist() for part in zip(*found, strict=True))
        return list(zip(losses, shares, strict=True))

    def _training_losses(self, number: int) -> list[float]:
        found: list[float] = []
        for stack in self.stacks:
            parts = ((x.flatten(1, 2), stack.own(y.flatten(1, 2))) for x, y in self._chunks(number, MEASURE))
            found += stack.measured(parts)[0].tolist()
        return found

    def _batch_validation(self) -> list[tuple[float, float] | None]:
        images, labels = self._validation_samples()
        found: list[tuple[float, float] | None] = []
        for stack in self.stacks:
            if stack.cells[0].method != "batch":
                found += [None] * len(stack.cells)
                continue
            parts = full_batches(images, labels, stack.cells[0].batch_size, axis=1)
            measured = stack.measured(((x, stack.own(y)) for x, y in parts), stack.scores_in_batch_mode)
            found += zip(*(part.tolist() for part in measured), strict=True)
        return found

    def test(self) -> list[tuple[float, float]]:
        """Loss and accuracy of every cell on the official test set."""
        images, labels = self.task.test()
        images = self.task.as_input(images)
        many = len(self.seeds)
        return self._measured(images.expand(many, *images.shape), labels.expand(many, *labels.shape))

    def trained(self) -> list[nn.Module]:
        """Every network as it is now."""
        values = [one for stack in self.stacks for one in stack.tensors()]
        models = [copy.deepcopy(model) for model in self.started]
        for model, tensors in zip(models, values, strict=True):
            model.load_state_dict(tensors, strict=False)  # what is not among the parameters and buffers does not change
        return models

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name."""
        parts = {f"group{index}": stack.state() for index, stack in enumerate(self.stacks)}
        named = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return {**named, **self.running.state(), "number": self.number}


@contextlib.contextmanager
def _stacking() -> Iterator[None]:
    """Within, what torch cannot do for many networks at once is a `CannotStack`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of which kind depends on the operation
        raise CannotStack(first_line(error)) from error


def _by_structure(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that differ in nothing but values; an analytic network has the input moments of its seed in its graph."""
    found: dict[tuple[str, str, int | None], list[Cell]] = {}
    for cell in cells:
        structure = cell.variant if cell.variant in (DOUBLE, MOMENTUM) else ""
        seed = cell.seed if cell.method == "analytic" else None
        found.setdefault((cell.method, structure, seed), []).append(cell)
    return list(found.values())
