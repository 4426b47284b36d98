"""To and from weight normalization, torch's own parametrization: w = g v / |v| for every output channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard, cast

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import _WeightNorm

from ..norm.linear_layers import (
    LinearLayer,
    find_linear_layers,
    is_linear_layer,
    output_axis,
    owners,
    remove_parametrizations_,
)


def to_weight_norm_(model: nn.Module) -> nn.Module:
    """Give every linear layer of a model torch's weight normalization in place, by the same function: g = |w|, v = w.

    Layers with tied weights share g and v. A weight that something else than a linear layer reads as well (an
    embedding, a transposed twin) stays as it is, and so does a layer that has weight normalization already.
    """
    layers = {path: m for path, m in find_linear_layers(model).items() if not has_weight_norm(m)}
    _check(layers)
    held, chosen, twins = owners(model), set(layers.values()), dict[Tensor, nn.Module]()
    for layer in layers.values():
        weight = layer.weight
        if all(owner in chosen and output_axis(owner) == output_axis(layer) for owner, _ in held[weight]):
            parametrizations.weight_norm(layer, dim=output_axis(layer))
            layer.train(layer.training)  # torch leaves the new modules in training mode
            factors, shared = parts_of(layer), parts_of(twins.setdefault(weight, layer))
            factors.original0, factors.original1 = shared.original0, shared.original1
    return model


def from_weight_norm_(model: nn.Module) -> nn.Module:
    """Turn torch's weight normalization in a model back into plain weights, in place; ties stay."""
    plain: dict[Tensor, nn.Parameter] = {}
    for layer in [m for m in model.modules() if has_weight_norm(m)]:
        direction = parts_of(layer).get_parameter("original1")
        remove_parametrizations_(layer)
        layer.weight = plain.setdefault(direction, cast(nn.Parameter, layer.weight))  # twins share one
        # torch's weight_norm leaves a hook behind that reads old checkpoints and cannot be pickled
        hooks = layer._load_state_dict_pre_hooks
        for key, hook in list(hooks.items()):
            if "_weight_norm_compat_hook" in getattr(getattr(hook, "hook", hook), "__qualname__", ""):
                del hooks[key]
    return model


def has_weight_norm(module: nn.Module) -> TypeGuard[LinearLayer]:
    """True if a layer's weight is computed by torch's weight normalization and nothing else."""
    if not is_linear_layer(module) or not parametrize.is_parametrized(module, "weight"):
        return False
    steps = list(parts_of(module))
    return len(steps) == 1 and isinstance(steps[0], _WeightNorm)


def parts_of(layer: nn.Module) -> parametrize.ParametrizationList:
    """The module that holds g as `original0` and v as `original1`."""
    return layer.parametrizations.weight  # type: ignore[union-attr, return-value]


def _check(layers: Mapping[str, LinearLayer]) -> None:
    """Raise if the weight of a layer cannot be normalized."""
    for path, layer in layers.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"The weight of '{path}' is parametrized otherwise: remove that first.")
        # Not per output channel: torch takes one norm over all groups of a transposed convolution.
        rows = layer.weight.detach().movedim(output_axis(layer), 0).flatten(1)
        zero = (rows == 0).all(1).nonzero().flatten().tolist()
        if zero:
            raise ValueError(f"Row {zero[0]} of the weight of '{path}' is zero and has no direction to normalize.")
        if not rows.isfinite().all():
            raise ValueError(f"The weight of '{path}' is not finite.")
