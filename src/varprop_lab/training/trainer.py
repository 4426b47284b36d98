"""What a job asks of a way of training, be it one network or many at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ..protocol.records import (
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_BATCH_ACCURACY,
    VALID_BATCH_LOSS,
    VALID_LOSS,
    Cell,
)
from .metrics import RunningLoss

Tick = Callable[[int], None]  # called with a number of steps done
Measured = Sequence[tuple[float, float]]  # loss and accuracy of every cell


class Trainer(ABC):
    """Cells that train together, from their starts, as often as asked."""

    cells: list[Cell]
    gaps: list[float]
    steps: int
    running: RunningLoss

    @abstractmethod
    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""

    @abstractmethod
    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""

    @abstractmethod
    def test(self) -> Measured:
        """Loss and accuracy of every cell on the official test set."""

    @abstractmethod
    def trained(self) -> list[nn.Module]:
        """The network of every cell as it is now."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name: the tensors themselves."""

    @abstractmethod
    def _validation(self) -> Measured:
        """In evaluation mode."""

    @abstractmethod
    def _batch_validation(self) -> Sequence[tuple[float, float] | None]:
        """With the statistics of batches as large as in training, where that is another thing: for batch norm."""

    @abstractmethod
    def _training_losses(self, number: int) -> Sequence[float]:
        """In evaluation mode on the training set of an epoch."""

    def losses(self) -> list[float]:
        """The running mean of the loss of every cell; not finite where it diverged."""
        return self.running.values()

    def curves(self, number: int) -> list[dict[str, float]]:
        """What is measured of every cell after an epoch, by the names of `records`."""
        measured = self._training_losses(number), self._validation(), self._batch_validation()
        found = []
        for train, evaluated, (loss, right), in_batches in zip(self.losses(), *measured, strict=True):
            curve = {TRAIN_LOSS: train, TRAIN_EVAL_LOSS: evaluated, VALID_LOSS: loss}
            curve |= _unless_nan(VALID_ACCURACY, right)
            if in_batches is not None:
                curve |= {VALID_BATCH_LOSS: in_batches[0]} | _unless_nan(VALID_BATCH_ACCURACY, in_batches[1])
            found.append(curve)
        return found

    def load_(self, rates: list[float], state: dict[str, Tensor]) -> None:
        """Put the trainer back to where it was when its state was kept."""
        self.reset(rates)
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _unless_nan(name: str, value: float) -> dict[str, float]:
    """An accuracy under its name; nothing where targets are no classes."""
    return {} if math.isnan(value) else {name: value}
