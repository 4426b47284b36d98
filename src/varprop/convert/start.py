"""The paper's starting point init=BN: a network as batch norm would begin with it, without the batch norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..norm.linear_layers import find_linear_layers, replace
from .batched import Batched
from .batchnorm import from_batch_norm_, own_batch_norms
from .reparametrize import reparametrize
from .statistics import calibrate_


def batch_norm_start(model: nn.Module, batch: Any, generator: torch.Generator | None = None) -> nn.Module:
    """The plain model that starts where a batch-normalized one does (init=BN of Shekhovtsov & Flach 2018).

    Batch norm goes after every linear layer with s uniform on (0, 1), as PyTorch drew it in 2018, and b = 0; the mean
    and variance of one batch then turn it into plain weights and biases. The result equals that batch-normalized model
    in training mode on this batch, where no layer is called twice (one that is gets the statistics of all its calls
    together). Layers without bias gain one; dropout is off while the statistics are taken.

    Args:
        model: Any model in any parametrization; not changed.
        batch: An input tensor, a tuple of positional arguments, or a dict of keyword arguments.
        generator: Where s is drawn from; torch's global generator if left out.

    Returns:
        A plain model, ready for `reparametrize`.
    """
    plain = reparametrize(model, "standard", example=batch)
    own, wrappers = own_batch_norms(plain), {}
    for path, layer in find_linear_layers(plain).items():
        wrappers[path] = Batched(layer)
        plain = replace(plain, layer, wrappers[path])
        _draw_scale(wrappers[path].norm.weight, generator)
    norms = {path: wrapper.norm for path, wrapper in wrappers.items()}
    reached = calibrate_(plain, {**own, **norms}, batch, pool=True)
    for path in wrappers.keys() - reached:
        plain = replace(plain, wrappers[path], wrappers[path].layer)
    return from_batch_norm_(plain, example=batch)


@torch.no_grad()
def _draw_scale(scale: torch.Tensor, generator: torch.Generator | None) -> None:
    device = scale.device if generator is None else generator.device
    scale.copy_(torch.rand(scale.shape, generator=generator, device=device, dtype=scale.dtype))
