"""How true the predicted standard deviations of a normalized network are on data."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from varprop_lab.starts import watch


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
