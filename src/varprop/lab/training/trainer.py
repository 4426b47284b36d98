"""What a job asks of a way of training, be it one network or many at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from ..protocol.records import Cell

Tick = Callable[[int], None]  # called with a number of steps done


class Trainer(Protocol):
    """Cells that train together, from their starts, as often as asked."""

    cells: list[Cell]
    gaps: list[float]
    steps: int

    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""

    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""

    def losses(self) -> list[float]:
        """The running mean of the loss of every cell; not finite where it diverged."""

    def curves(self, number: int) -> list[dict[str, float]]:
        """What is measured of every cell after an epoch, by the names of `records`."""

    def test(self) -> list[tuple[float, float]]:
        """Loss and accuracy of every cell on the official test set."""

    def trained(self) -> list[nn.Module]:
        """The network of every cell as it is now."""

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name: the tensors themselves."""


def load_(trainer: Trainer, rates: list[float], state: dict[str, Tensor]) -> None:
    """Put a trainer back to where it was when its state was kept."""
    trainer.reset(rates)
    for name, tensor in trainer.state().items():
        tensor.copy_(state[name])
