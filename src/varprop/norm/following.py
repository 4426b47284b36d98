"""Which batch norm stands directly after which linear layer, read from the captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..graph.capture import Program, capture
from ..graph.node import Node
from ..rules.registry import module_classes
from ..training.restore import preserved_modes
from .sites import Site, is_site

aten = torch.ops.aten
_BATCH_NORM = aten._native_batch_norm_legit_no_training
_LINEAR = {
    aten.linear,
    aten.conv1d,
    aten.conv2d,
    aten.conv3d,
    aten.conv_transpose1d,
    aten.conv_transpose2d,
    aten.conv_transpose3d,
    aten.convolution,
}


def batch_norms_after(model: nn.Module, example: Any) -> dict[str, str]:
    """The batch norm directly after each linear layer: nothing else reads the layer's output.

    A layer called several times counts if every call goes to the same batch norm, and that reads from nothing else.

    Args:
        model: A module in any mode; it is captured in evaluation mode and not changed.
        example: An input tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Returns:
        Path of the layer -> path of the batch norm.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return {}
    with preserved_modes(model):
        program = capture(model.eval(), example, module_classes())
    paths = {module: path for path, module in model.named_modules()}
    calls = list(_calls(program))
    pairs = {layer: norm for layer, norm in calls if layer is not None and norm is not None}
    return {paths[layer]: paths[norm] for layer, norm in pairs.items() if _only_pair(calls, layer, norm)}


Pair = tuple[nn.Module | None, nn.Module | None]


def _calls(program: Program) -> Iterator[Pair]:
    """Every call of a linear layer with the batch norm directly after it, and the other calls of batch norms."""
    paired = set()
    for node in program.nodes:
        if node.packet in _LINEAR:
            reader = _direct_reader(program, node)
            paired.add(reader)
            yield _module(program, node), None if reader is None else _module(program, reader)
        elif node.packet is _BATCH_NORM and node not in paired:
            yield None, _module(program, node)


def _direct_reader(program: Program, call: Node) -> Node | None:
    """The batch norm that reads a layer's call, if it alone does and could be done by the layer."""
    if len(call.users) != 1 or call in program.outputs:
        return None
    (reader,) = call.users
    layer = _module(program, call)
    if reader.packet is not _BATCH_NORM or not isinstance(_module(program, reader), _BatchNorm):
        return None
    if layer is None or not is_site(layer) or not _channels_agree(call, layer):
        return None
    return reader if _read_by_layers_alone(program, call.args[1]) else None


def _channels_agree(output: Node, layer: Site) -> bool:
    """Batch norm takes axis 1 for the channels: a layer's outputs lie there only with exactly one batch axis before."""
    return output.ndim == (2 if isinstance(layer, nn.Linear) else layer.weight.ndim)


def _read_by_layers_alone(program: Program, weight: Node) -> bool:
    """Not so where the model also reads a layer's weight by hand, which a change of the layer would alter."""
    modules = [_module(program, reader) for reader in weight.users]
    return all(module is not None and is_site(module) for module in modules)


def _only_pair(calls: list[Pair], layer: nn.Module, norm: nn.Module) -> bool:
    return all(call == (layer, norm) for call in calls if call[0] is layer or call[1] is norm)


def _module(program: Program, node: Node) -> nn.Module | None:
    try:
        return program.model.get_submodule(node.module)
    except AttributeError:
        return None
