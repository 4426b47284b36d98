"""The networks of the experiments; log-softmax belongs to the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factory = Callable[[], nn.Module]
Layers = Callable[..., list[nn.Module]]

# Kernel size, stride, and channels as multiples of the width; a last layer gives the classes.
_CONVOLUTIONS = ((3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 2), (3, 1, 2), (3, 2, 2), (3, 1, 2), (1, 1, 2))


class LeakyRelu(nn.Module):
    """max(0, x) + 0.03 x, as the paper has it."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of every element."""
        return F.relu(x) + 0.03 * x


class GlobalAverage(nn.Module):
    """The mean over all positions."""

    def forward(self, x: Tensor) -> Tensor:
        """One value a channel."""
        return x.mean((2, 3))


class RowByRow(nn.Module):
    """A recurrent network that reads an image from top to bottom: h = tanh(W x + b + U h + c), classes from the last h.

    It is written with linear layers, so that every method can normalize after each of them. The first rows have no
    state before them and are read by W alone. Several rows are read at once: the statistics of every reading are
    propagated by themselves, so few readings train faster.
    """

    def __init__(self, columns: int = 28, rows: int = 4, units: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.rows = rows
        self.input = nn.Linear(rows * columns, units)
        self.state = nn.Linear(units, units)
        self.output = nn.Linear(units, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        first, *later = images.squeeze(1).unflatten(1, (-1, self.rows)).flatten(2).unbind(1)
        state = torch.tanh(self.input(first))
        for strip in later:
            state = torch.tanh(self.input(strip) + self.state(state))
        scores: Tensor = self.output(state)
        return scores


def _alone(kind: type[nn.Module], *settings: int, **more: int) -> list[nn.Module]:
    return [kind(*settings, **more)]


def logistic(inputs: int, hidden: int, units: int = 20, classes: int = 10, layers: Layers = _alone) -> nn.Module:
    """Hidden layers of logistic units, fully connected.

    `layers` makes every layer but the last, with whatever is to follow it, from its kind and arguments.
    """
    modules: list[nn.Module] = [nn.Flatten()]
    for index in range(hidden):
        modules += [*layers(nn.Linear, units if index else inputs, units), nn.Sigmoid()]
    return nn.Sequential(*modules, nn.Linear(units, classes))


def convolutional(width: int = 96, classes: int = 10, layers: Layers = _alone) -> nn.Module:
    """The paper's network for CIFAR-10: nine convolutions, then the mean over positions; `layers` as of `logistic`."""
    modules: list[nn.Module] = []
    before = 3
    for kernel, stride, factor in _CONVOLUTIONS:
        modules += [*layers(nn.Conv2d, before, width * factor, kernel, stride, padding=kernel // 2), LeakyRelu()]
        before = width * factor
    return nn.Sequential(*modules, nn.Conv2d(before, classes, 1), GlobalAverage())


FACTORIES: dict[str, Factory] = {
    "digits": lambda: logistic(64, hidden=3),
    "mnist": lambda: logistic(784, hidden=6),
    "rows": RowByRow,
    "cifar10": convolutional,
}


def build(factory: str | Factory, seed: int, **placed: Any) -> nn.Module:
    """A network with PyTorch's default weights for a seed, drawn on the CPU, so that every device gets the same ones.

    The global generator is left as it was. `placed` is device and dtype, as for `nn.Module.to`.
    """
    make = FACTORIES[factory] if isinstance(factory, str) else factory
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make()
    if not isinstance(model, nn.Module):
        raise TypeError(f"The factory of the model must return an nn.Module, not {type(model).__name__}.")
    return model.to(**placed)
