"""Looks at what layers give out while a network runs on a batch, and leaves the network as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def watch(
    model: nn.Module, batch: Tensor, layers: Mapping[str, nn.Module], look: Callable[[str, Tensor], Tensor | None]
) -> None:
    """Run a network in evaluation mode; `look` gets the name of every layer called, and what it gives before any norm.

    What `look` returns, unless it is None, is what the network goes on with.
    """
    with contextlib.ExitStack() as undone:
        for module in model.modules():
            undone.callback(setattr, module, "training", module.training)
        for name, layer in layers.items():
            undone.enter_context(
                layer.register_forward_hook(lambda _, __, output, name=name: look(name, output), prepend=True)
            )
        model.eval()(batch)
