"""Standard deviations that layers have, over those that the analytic normalization has given them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def normalized_layers(model: nn.Module) -> dict[str, Any]:
    """Those with a scale, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(getattr(m, "scale", None), nn.Parameter)}


@torch.no_grad()
def ratios(model: nn.Module, data: Tensor) -> dict[str, float]:
    """True over predicted standard deviation of every normalized layer, root mean squares over its channels."""
    found: dict[str, float] = {}

    def hook(path: str, layer: Any) -> Any:
        def measure(_: nn.Module, __: Any, output: Tensor) -> None:
            channels = output.ndim - 1 if layer.weight.ndim == 2 else 1
            over = [axis for axis in range(output.ndim) if axis != channels]
            true, predicted = output.double().var(over, correction=0), layer.scale.double().square()
            found[path] = float((true.mean() / predicted.mean()).sqrt())

        return layer.register_forward_hook(measure)

    handles = [hook(path, layer) for path, layer in normalized_layers(model).items()]
    training = model.training
    try:
        model.eval()(data)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found
