"""Models and layers that cannot be normalized are refused, each in one sentence."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..graph.capture import leaves_of
from ..graph.program import Program, tensor_at
from ..moments import Moments, Tokens
from .layers import Normalized, normalized_layers
from .linear_layers import (
    fan_in,
    is_linear_layer,
    largest_weights,
    owners,
    require_weight_of_its_own,
    with_centred_rows,
)
from .modes import calls_of
from .recurrent import check_gates
from .scope import shared_fold


def check_copyable(model: nn.Module) -> None:
    """Before a copy is made: torch cannot copy weights that hooks compute, nor other tensors with a history."""
    for path, module in model.named_modules():
        if is_linear_layer(module):
            require_weight_of_its_own(path, module)
        for name, value in vars(module).items():
            if any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in pytree.tree_leaves(value)):
                kind = "is a tensor with derivatives" if isinstance(value, Tensor) else "holds tensors with derivatives"
                raise ValueError(
                    f"Attribute '{name}' of '{path or type(module).__name__}' {kind} that an earlier call has left "
                    f"there, which torch cannot copy: call the model once under torch.no_grad(), or take them away."
                )


def check_model(model: nn.Module, moments: Any) -> None:
    """Raise if a model is normalized already, or moments of its inputs are not finite or have no variance."""
    done = next(iter(normalized_layers(model)), None)
    if done is not None:
        raise ValueError(f"The model is normalized already (layer '{done}'); fold it first.")
    values = leaves_of(moments, (Moments, Tokens))
    pairs = [value for value in values if isinstance(value, Moments)]
    if any(not bool(value.mean.isfinite().all() & value.var.isfinite().all()) for value in pairs):
        raise ValueError(
            "The moments of the input are not finite: give those of data that have a mean and a variance (see "
            "vp.input_moments), or clip the data first."
        )
    if pairs and len(pairs) == len(values) and all(not bool(value.var.any()) for value in pairs):
        raise ValueError("The input's variance is zero everywhere: there is nothing to normalize by.")


def check_dtypes(path: str, layer: nn.Module, norm_path: str, norm: nn.Module | None) -> None:
    """Raise if parameters of a layer, and those of the batch norm that it is to absorb, are of several dtypes."""
    modules = [layer] if norm is None else [layer, norm]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    kinds = sorted({str(tensor.dtype) for tensor in tensors if tensor.is_floating_point()})
    if len(kinds) > 1:
        names = f"'{path}'" if norm is None else f"'{path}' and of the batch norm '{norm_path}' behind it"
        raise ValueError(
            f"Parameters of {names} have different dtypes ({', '.join(kinds)}): give them one, as model.float() does."
        )


def check_weights(layers: dict[str, Any], centred: bool) -> None:
    """Raise if a weight cannot be normalized, its rows centred or not."""
    for path, layer in layers.items():
        require_weight_of_its_own(path, layer)
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith("weight") and not parameter.numel():
                raise ValueError(
                    f"The {name} of '{path}' has no entries, for its shape is {tuple(parameter.shape)}: "
                    f"leave the layer out with `only`."
                )
        if isinstance(layer, nn.RNNBase):
            check_gates(path, layer, centred)
            continue
        if layer.weight.is_complex():
            raise ValueError(f"The weight of '{path}' is complex, and moments are those of real numbers.")
        if not bool(layer.weight.isfinite().all()):
            raise ValueError(f"The weight of '{path}' has a value that is not finite.")
        weight = layer.weight.detach()
        _refuse_empty(
            path, largest_weights(weight, layer), "zero weights: give it others, or leave it out with `only`."
        )
        if centred and fan_in(weight, layer) > 1:
            left = largest_weights(with_centred_rows(weight, layer), layer)
            _refuse_empty(path, left, 'equal weights, of which the deep form leaves nothing: form="paper" takes them.')


def _refuse_empty(path: str, largest: Tensor, trouble: str) -> None:
    empty = (largest == 0).nonzero().flatten()
    if len(empty):
        raise ValueError(f"Output {int(empty[0])} of '{path}' has only {trouble}")


@torch.no_grad()
def check_finite(layers: dict[str, Any]) -> None:
    """Raise if the fold of a layer is not finite."""
    with shared_fold():
        for path, layer in layers.items():
            folded = layer.folded()
            tensors = folded.values() if isinstance(folded, dict) else folded
            if not all(bool(tensor.isfinite().all()) for tensor in tensors):
                raise ValueError(
                    f"What enters layer '{path}' has no finite mean and variance, for an operation before it gives NaN "
                    f"or infinity for some values of its input (a power or a root of negative numbers, say): "
                    f"vp.propagate names it."
                )


def refuse_reading_by_hand(program: Program, layers: dict[str, Any]) -> None:
    """Raise if something besides its layer reads a parameter, but for modules that hold it as well."""
    calls, held = calls_of(program, layers), owners(program.model)
    for node, name in program.state.items():
        path, _, parameter = name.rpartition(".")
        if path not in layers or not any(calls.get(user) == path for user in node.users):
            continue
        holders = {module for module, _ in held.get(tensor_at(program.model, name), ())}
        if any(user not in calls and program.module_of(user) not in holders for user in node.users):
            raise ValueError(
                f"The model reads the {parameter} of '{path}' by hand as well, where the normalization does not reach: "
                f"leave the layer out with `only`."
            )


def refuse_part(model: nn.Module) -> None:
    """Raise if layers outside of a module go on to read the scales and shifts of its normalized layers."""
    inside = set(model.modules())
    for layer in normalized_layers(model).values():
        networks = [network.joint for network, _ in layer.networks.values()]
        for statistics in (*networks, *getattr(layer, "statistics", {}).values()):
            layers = normalized_layers(statistics.graph.program.model)
            outside = [path for path, module in layers.items() if module not in inside]
            if outside:
                raise ValueError(
                    f"This is a part of a normalized model, whose layers {listed_paths(outside)} are normalized by "
                    f"means of its scales and shifts: fold the model, or a copy of the part (inplace=False)."
                )


def linear_by_look(model: nn.Module, except_paths: Container[str]) -> list[str]:
    """The modules with a weight matrix that are not normalized, as text, except those at some paths."""
    modules = model.named_modules()
    named = [(path, m) for path, m in modules if not isinstance(m, Normalized) and path not in except_paths]
    return [f"'{path}' ({type(m).__name__})" for path, m in named if looks_linear(m)]


def why_none(model: nn.Module, chosen: Collection[str], computed: Collection[str], constant: Collection[str]) -> str:
    """Why nothing of a model is normalized, as the end of a sentence; empty if no module has a weight matrix.

    `chosen` are the paths of its linear layers, `computed` of those with weights that are no parameters of theirs, and
    `constant` of those that read nothing random.
    """
    if chosen:
        hidden = "or only where torch.autocast or vmap inside its forward hides it"
        return f": it calls none of {listed_paths(chosen)}, {hidden}"
    if computed:
        names = listed_paths(sorted(computed))
        return f": weights or biases are no parameters of the layers that compute with them ({names})"
    attention = [path for path, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    projections = {module for path in attention for module in model.get_submodule(path).modules()}
    others = [m for path, m in model.named_modules() if path not in constant and m not in projections]
    if any(looks_linear(module) for module in others):
        return (
            f": one of another class than torch's has to multiply its one argument by its own `weight`, to add its own "
            f"`bias` and to do nothing else, unlike {listed(linear_by_look(model, constant))}"
        )
    if attention:
        return (
            f": the projections of torch's MultiheadAttention ({listed_paths(attention)}) are "
            f"arguments of one function, not layers; write them as nn.Linear around "
            f"torch.nn.functional.scaled_dot_product_attention"
        )
    return ""


def looks_linear(module: nn.Module) -> bool:
    """True for a module with a weight matrix that is no embedding."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    return any(p.ndim > 1 for name, p in module.named_parameters(recurse=False) if "weight" in name)


def listed_paths(paths: Iterable[str]) -> str:
    """The first of some paths in quotes, and how many more there are."""
    return listed([repr(path) for path in paths])


def listed(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
