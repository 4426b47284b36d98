"""The linear layers of a model: where they are, which way their weights lie, and how a module is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from ..graph.node import Node
from ..graph.program import Program, tensor_at
from ..rules.registry import lookup
from .fold.reference import minus_row_mean, powers_of_two

LinearLayer = nn.Linear | _ConvNd
OUTPUT_AXIS = "varprop_output_axis"  # an attribute of a normalized layer of a class that is none of torch's
Only = str | Iterable[str] | Callable[[str, nn.Module], bool]

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def find_linear_layers(model: nn.Module) -> dict[str, LinearLayer]:
    """The linear and convolution layers of a model by path, in the order of registration, a reused layer once."""
    return {path: module for path, module in model.named_modules() if is_linear_layer(module)}


def find_layers(model: nn.Module, only: Only | None, wanted: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """The wanted modules of a model, as in `find_linear_layers`.

    `only` chooses among them: a path or several, each naming one or a module that holds some (a ValueError if it leads
    to none), or a predicate called as `only(path, module)`.
    """
    layers = {path: module for path, module in model.named_modules() if wanted(module)}
    if only is None:
        return layers
    if callable(only):
        return {path: layer for path, layer in layers.items() if only(path, layer)}
    named = list(model.named_modules(remove_duplicate=False))  # each path of a reused layer names it
    chosen: set[nn.Module] = set()
    for path in [only] if isinstance(only, str) else only:
        inside = {m for at, m in named if wanted(m) and (at == path or not path or at.startswith(path + "."))}
        if not inside:
            raise ValueError(f"`only` names '{path}', where the model has no linear layer.")
        chosen |= inside
    return {path: layer for path, layer in layers.items() if layer in chosen}


def is_linear_layer(module: nn.Module) -> TypeGuard[LinearLayer]:
    """True for a linear layer that is called as one.

    Attention's output projection is not: attention reads its weight and never calls it.
    """
    of_torch = isinstance(module, (nn.Linear, _ConvNd)) and not isinstance(module, NonDynamicallyQuantizableLinear)
    return of_torch or hasattr(module, OUTPUT_AXIS)


def is_call_of_linear_layer(node: Node) -> bool:
    """True for the operation of a linear layer: a linear map or a convolution of any kind."""
    rule = lookup(node.target)
    return rule is not None and rule.linear


def computes_with_its_own(program: Program, call: Node, layer: nn.Module) -> bool:
    """True if a call of a linear or recurrent layer reads the layer's own parameters, parametrized or as they are.

    Otherwise the model computes them, from other parameters or from data: a hypernetwork that sets attributes, a
    property, torch.func.functional_call.
    """
    own = layer._parameters
    if isinstance(layer, nn.RNNBase):
        names, read = layer._flat_weights_names, call.args[2]
        return len(names) == len(read) and all(
            holds(program, operand, own.get(name)) for operand, name in zip(read, names, strict=True)
        )
    weight, bias = (*call.args, None)[1:3]
    if not (bias is own.get("bias") is None or holds(program, bias, own.get("bias"))):
        return False
    if not parametrize.is_parametrized(layer, "weight"):
        return holds(program, weight, own.get("weight"))
    originals = cast(Any, layer).parametrizations["weight"].parameters(recurse=False)
    read = {tensor_at(program.model, program.state[node]) for node in nodes_before([weight]) if node in program.state}
    return read.issuperset(originals)


def holds(program: Program, operand: Any, tensor: Tensor | None) -> bool:
    """True if an operand is a parameter or buffer of the model, namely this tensor."""
    return operand in program.state and tensor_at(program.model, program.state[operand]) is tensor


def nodes_before(targets: list[Node], ends: Container[Node] = ()) -> set[Node]:
    """Some nodes and all that they follow from, without what is before `ends`."""
    needed, waiting = set(targets), list(targets)
    while waiting:
        node = waiting.pop()
        if node not in ends:
            fresh = [operand for operand in node.operands if operand not in needed]
            needed.update(fresh)
            waiting += fresh
    return needed


def output_axis(layer: nn.Module) -> int:
    """The axis of a layer's weight that runs over its outputs (of one group, for a transposed convolution)."""
    axis: int = getattr(layer, OUTPUT_AXIS, int(bool(getattr(layer, "transposed", False))))
    return axis


def group_count(layer: Any) -> int:
    """Into how many groups the channels are divided; a matrix has none."""
    return getattr(layer, "groups", 1) if layer.weight.ndim > 2 else 1


def output_size(layer: LinearLayer) -> int:
    """The number of output channels."""
    axis = output_axis(layer)
    return layer.weight.shape[axis] * (group_count(layer) if axis else 1)


def along_outputs(vector: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
    """A vector over output channels in the shape that multiplies the layer's weight.

    A transposed convolution's weight is (in, out / groups, ...): the rows of a group are multiplied by its entries.
    """
    trailing = [1] * (weight.ndim - 2)
    if not output_axis(layer):
        return vector.reshape(-1, 1, *trailing)
    groups = group_count(layer)
    rows = vector.reshape(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1)
    return rows.reshape(weight.shape[0], -1, *trailing)


_ENTRIES = (1, 3)  # the axes of `_by_rows` that run along a row


def _by_rows(weight: Tensor, layer: nn.Module) -> Tensor:
    """A weight with the entries of a row on axes 1 and 3: (group, input, output, tap) if transposed."""
    taps = weight.shape[2:].numel()
    if not output_axis(layer):
        return weight.reshape(weight.shape[0], weight.shape[1], 1, taps)
    groups = group_count(layer)
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], taps)


def weight_norms(weight: Tensor, layer: nn.Module) -> Tensor:
    """The Euclidean norm of the weights of every output channel, as a vector."""
    norms: Tensor = torch.linalg.vector_norm(_by_rows(weight, layer), dim=_ENTRIES)
    return norms.flatten()


def largest_weights(weight: Tensor, layer: nn.Module) -> Tensor:
    """The largest absolute weight of every output channel, as a vector."""
    return _by_rows(weight.abs(), layer).amax(_ENTRIES).flatten()


def row_sizes(weight: Tensor, layer: nn.Module) -> Tensor:
    """A power of two near the largest weight of every output channel, as a vector; 1 where there are only zeros."""
    return powers_of_two(largest_weights(weight, layer))


def fan_in(weight: Tensor, layer: nn.Module) -> int:
    """The number of weights of an output channel."""
    rows = _by_rows(weight, layer)
    return rows.shape[1] * rows.shape[3]


def with_centred_rows(weight: Tensor, layer: nn.Module) -> Tensor:
    """A weight minus its mean over the weights of each output channel."""
    return minus_row_mean(_by_rows(weight, layer), _ENTRIES).reshape(weight.shape)


def require_weight_of_its_own(path: str, layer: nn.Module) -> None:
    """Raise if a hook of the layer computes its weight, anew before each of its calls but not before the model's."""
    if any(name.endswith(("weight_orig", "weight_g", "weight_v")) for name in layer._parameters):
        raise ValueError(
            f"The weight of '{path}' is computed by a hook (of torch.nn.utils.prune, or the old weight_norm or "
            f"spectral_norm): make it permanent, or use torch.nn.utils.parametrizations, which work."
        )


@torch.no_grad()
def remove_parametrizations_(layer: Any) -> None:
    """Replace a layer's parametrizations by parameters with the values that they compute.

    torch's own function changes the layer's class, which copies of the layer share.
    """
    computed = {name: getattr(layer, name).detach().clone() for name in layer.parametrizations}
    trainable = {name: any(p.requires_grad for p in maps.parameters()) for name, maps in layer.parametrizations.items()}
    layer.__class__ = type(layer).__bases__[0]
    del layer.parametrizations
    for name, value in computed.items():
        layer.register_parameter(name, nn.Parameter(value, requires_grad=trainable[name]))
    if "bias" in layer._parameters:  # weight before bias again, as optimizers and `state_dict` list them
        layer._parameters["bias"] = layer._parameters.pop("bias")


def owners(model: nn.Module) -> dict[Tensor, list[tuple[nn.Module, str]]]:
    """Every parameter with the modules that hold it and its name there; several for tied weights."""
    holders: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append((module, name))
    return holders


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` wherever `old` is, with its hooks and its mode.

    Returns the model, which is `new` where `old` was the model itself.
    """
    new.training = old.training
    for name in _HOOKS:  # the containers themselves, so that the handles users hold still remove their hooks
        hooks = getattr(new, name)
        setattr(new, name, getattr(old, name))
        setattr(old, name, hooks)
    if model is old:
        return new
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return model
