"""torch.nn's own recurrent and attention modules, and the two networks of the paper."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .inputs import Inputs, Normal

WIDTH, HEADS = 64, 4
SEQUENCE = Normal((1, 12, WIDTH), channels=2)


class First(nn.Module):
    """The first of a module's outputs, for one input given as many times as it takes."""

    def __init__(self, module: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.module, self.times = module, times

    def forward(self, x: Tensor) -> Tensor:
        return self.module(*[x] * self.times)[0]


class Leaky(nn.Module):
    """max(0, x) + 0.03 x."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 0.03 * x


def mnist_mlp() -> nn.Module:
    """Six hidden layers of 20 logistic units."""
    widths = [784] + [20] * 6
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(20, 10), nn.LogSoftmax(1))


def cifar_cnn() -> nn.Module:
    """Nine convolutions, an average over positions, log-softmax."""
    channels = [3, 96, 96, 96, 192, 192, 192, 192, 192, 10]
    kernels, strides = [3] * 7 + [1, 1], [1, 1, 2, 1, 1, 2, 1, 1, 1]
    layers: list[nn.Module] = []
    for a, b, kernel, stride in zip(channels, channels[1:], kernels, strides, strict=False):
        layers += [nn.Conv2d(a, b, kernel, stride), Leaky()]
    return nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LogSoftmax(1))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 128, batch_first=True), 2)


BASIC: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "nn_lstm": (lambda: First(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)), (SEQUENCE,)),
    "nn_gru": (lambda: First(nn.GRU(WIDTH, WIDTH, 2, batch_first=True)), (SEQUENCE,)),
    "nn_mha": (lambda: First(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), 3), (SEQUENCE,)),
    "nn_transformer_encoder": (encoder, (SEQUENCE,)),
    "nn_transformer": (lambda: nn.Transformer(WIDTH, HEADS, 2, 2, 128, batch_first=True), (SEQUENCE, SEQUENCE)),
    "paper_mnist_mlp": (mnist_mlp, (Normal((1, 784)),)),
    "paper_cifar_cnn": (cifar_cnn, (Normal((1, 3, 32, 32)),)),
}


def from_torch(name: str) -> tuple[nn.Module, Inputs]:
    """A module that needs nothing but torch."""
    make, inputs = BASIC[name]
    return make(), inputs
