"""Which weights to spare from weight decay, and the paper's alternative to it: weights of unit norm.

Decay on a weight whose scale the output does not depend on has no minimum, only a singularity at zero (Shekhovtsov &
Flach 2018, "How (Not) to Make a Comparison"); decay on scales and shifts is doubtful, as nonlinearities move both.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..norm.batchnorm import batch_norms_after, computes_as_torch_batch_norm
from ..norm.layers import normalized_layers
from ..norm.linear_layers import along_outputs, is_linear_layer, output_axis, owners, weight_norms, with_centred_rows
from ..norm.recurrent import NormalizedRecurrent, suffixes, unit_gates_
from .batched import Batched
from .batchnorm import own_batch_norms
from .weightnorm import has_weight_norm, parts_of

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
Owner = tuple[nn.Module, str]


def param_groups(model: nn.Module, weight_decay: float, *, example: Any = None) -> list[dict[str, Any]]:
    """Optimizer groups in which only ordinary weights decay.

    Spared are weights whose scale the output does not depend on (analytically normalized, weight-normalized, or
    directly under batch norm), scales, shifts and biases, the parameters of normalization layers, and whatever has at
    most one axis. A tied weight is spared only if that holds in all its places. Frozen parameters are left out.

    Args:
        model: The model to train.
        weight_decay: For the group that decays.
        example: An input tensor (or tuple, or dict), to see in the graph which layers the model's own batch norms
            follow; without it only those next to each other in an `nn.Sequential` are known.

    Returns:
        Up to two groups for any `torch.optim` optimizer, every trainable parameter in exactly one.
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")
    spared = set(_spared(model, example))
    held = {parameter: found for parameter, found in owners(model).items() if parameter.requires_grad}
    free = {p for p, found in held.items() if p.ndim <= 1 or all(owner in spared for owner in found)}
    groups = [
        {"params": [p for p in held if p not in free], "weight_decay": weight_decay},
        {"params": [p for p in held if p in free], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def unit_norm_(model: nn.Module) -> nn.Module:
    """Scale the weights of every output channel to norm 1 where the output does not depend on their scale.

    Where it does not depend on their mean either (the deep form), they lose that first.

    These are the weights of analytically normalized layers (of a recurrent one those of input and state together) and
    the directions of weight normalization. Layers under batch norm stay as they are: the eps in sqrt(var + eps) makes
    their scale matter a little. So do frozen weights, weights tied to others whose scale matters or whose output
    channels are other rows (a transposed twin), and channels whose weights are all zero.

    Args:
        model: Changed in place.

    Returns:
        The model, with the same output.
    """
    held = owners(model)
    invariant = list(_invariant(model))
    places = {(module, name) for module, name, _ in invariant}
    for module, name, layer in invariant:
        weight = getattr(module, name)
        if weight.requires_grad and all(owner in places for owner in held[weight]) and _share_rows(held[weight]):
            if all(getattr(owner, "centred_rows", False) for owner, _ in held[weight]):
                weight.copy_(with_centred_rows(weight, layer))
            norms = _row_norms(weight, module, layer)
            weight.div_(torch.where(norms > 0, norms, 1.0))
    for site, suffix in _gates(model):
        weights = [site.part(name, suffix) for name in ("weight_ih", "weight_hh")]
        if all(weight.requires_grad and len(held[weight]) == 1 for weight in weights):
            unit_gates_(site, suffix)
    return model


def _row_norms(weight: Tensor, module: nn.Module, layer: nn.Module) -> Tensor:
    if module is layer:
        return along_outputs(weight_norms(weight, layer), weight, layer)
    # Weight norm's own rows, which for a transposed convolution run over all groups.
    dim: Any = parts_of(layer)[0].dim
    return torch.norm_except_dim(weight, 2, dim)


def _share_rows(tied: list[Owner]) -> bool:
    """Whether the output channels of all layers that hold a weight are the same rows of it."""
    axes = {(output_axis(module), getattr(module, "groups", 1) * output_axis(module)) for module, _ in tied}
    return len(axes) == 1


def _invariant(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(module, name, layer) of each weight whose scale has no effect; recurrent layers have theirs in `_gates`."""
    for site in normalized_layers(model).values():
        if "weight" in site._parameters:
            yield site, "weight", site
    for layer in model.modules():
        if has_weight_norm(layer):
            yield parts_of(layer), "original1", layer


def _gates(model: nn.Module) -> Iterator[tuple[NormalizedRecurrent, str]]:
    """Recurrent layers, with how the names of two weights end whose rows only a common factor may scale."""
    for site in normalized_layers(model).values():
        if isinstance(site, NormalizedRecurrent):
            yield from ((site, suffix) for suffix in suffixes(site))


def _spared(model: nn.Module, example: Any) -> Iterator[Owner]:
    for site in normalized_layers(model).values():
        names = [name for name, _ in site.named_parameters(recurse=False)]
        yield from ((site, name) for name in names if not name.startswith("weight_hr"))  # an LSTM's projection is plain
    for module in model.modules():
        if has_weight_norm(module):
            yield from ((parts_of(module), "original0"), (parts_of(module), "original1"))
        if isinstance(module, Batched):
            yield module.layer, "weight"
        if isinstance(module, _NORMS):
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
    yield from ((layer, "weight") for layer in _under_batch_norm(model, example))


def _under_batch_norm(model: nn.Module, example: Any) -> list[nn.Module]:
    norms = own_batch_norms(model)
    if not norms:
        return []
    if example is not None:
        return [model.get_submodule(path) for path in batch_norms_after(model, example)]
    pairs = [pair for module in model.modules() for pair in _neighbours(module)]
    unclear = set(norms.values()) - {norm for _, norm in pairs}
    if unclear:
        path = next(path for path, norm in norms.items() if norm in unclear)
        warnings.warn(
            f"Which layer batch norm '{path}' follows is not known without `example`; it decays.", stacklevel=4
        )
    return [layer for layer, _ in pairs]


def _neighbours(module: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Layers and batch norms in immediate succession in a Sequential that is called as one."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return []
    pairs = itertools.pairwise(module)
    return [(layer, norm) for layer, norm in pairs if is_linear_layer(layer) and computes_as_torch_batch_norm(norm)]
