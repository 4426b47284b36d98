"""A linear layer with a batch norm behind it, as one module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..norm.batchnorm import folded
from ..norm.linear_layers import LinearLayer, output_size


class Batched(nn.Module):
    """A linear layer and torch's batch norm over its outputs, standing where the layer stood.

    The layer is `.layer`, without bias, and the batch norm is `.norm`, whose own bias does that work. Other attributes
    (`in_features`, `stride`, ...) are the layer's; `weight` and `bias` are those of the plain layer that does the same
    in evaluation mode, so that code which reads them by hand stays right. `had_bias` tells whether the layer had a bias
    of its own when it was wrapped, and is to have one again.
    """

    def __init__(self, layer: LinearLayer) -> None:
        super().__init__()
        self.layer = layer
        self.norm = _new_norm(layer)
        self.had_bias = layer.bias is not None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, normalized per channel."""
        output = self.layer(*args, **kwargs)
        normalized: Tensor = self.norm(channels_second(output, self.layer))
        return normalized.reshape(output.shape)

    @property
    def weight(self) -> Tensor:
        """The weight with the running statistics folded in."""
        return folded(self.layer, self.norm)[0]

    @property
    def bias(self) -> Tensor:
        """The bias with the running statistics folded in."""
        return folded(self.layer, self.norm)[1]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer" or name.startswith("__"):  # not there yet, while a pickle is being read
                raise
            return getattr(self.layer, name)


def _new_norm(layer: LinearLayer) -> _BatchNorm:
    """The batch norm that fits a layer's outputs, on its device and as trainable as its weight."""
    kinds = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    kind = nn.BatchNorm1d if isinstance(layer, nn.Linear) else kinds[layer.weight.ndim]
    norm: _BatchNorm = kind(output_size(layer), device=layer.weight.device, dtype=layer.weight.dtype)
    return norm.requires_grad_(layer.weight.requires_grad).train(layer.training)


def channels_second(output: Tensor, layer: LinearLayer) -> Tensor:
    """A layer's output with exactly one axis before its channels, as batch norm takes it."""
    if isinstance(layer, nn.Linear):
        return output.reshape(-1, output.shape[-1])
    return output if output.ndim == layer.weight.ndim else output.unsqueeze(0)
