"""Which weights to spare from weight decay, and the paper's alternative to it: weights of unit norm.

Decay on a weight whose scale the output does not depend on has no minimum, only a singularity at zero (Shekhovtsov &
Flach 2018, "How (Not) to Make a Comparison"); decay on scales and shifts is doubtful, as nonlinearities move both.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..norm.batchnorm import batch_norms_after, computes_as_torch_batch_norm
from ..norm.layers import normalized_layers
from ..norm.linear_layers import along_outputs, is_linear_layer, output_axis, owners, weight_norms, with_centred_rows
from ..norm.recurrent import NormalizedRecurrent, suffixes, unit_gates_
from ..norm.scope import ModuleT
from .batchnorm import Batched, own_batch_norms
from .reparametrize import has_weight_norm, parts_of

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def param_groups(model: nn.Module, weight_decay: float, *, example: Any = None) -> list[dict[str, Any]]:
    """Optimizer groups in which only ordinary weights decay.

    Spared are weights whose scale the output does not depend on (analytically normalized, weight-normalized, or
    directly under batch norm), scales, shifts and biases, the parameters of normalization layers, and whatever has at
    most one axis. A tied weight is spared only if that holds in all its places. Frozen parameters are left out.

    The scale of a normalized weight changes no output, but decay keeps steps of its direction large: for ResNets
    trained by SGD let all weights decay, as with batch norm, and do not use these groups.

    Args:
        model: The model to train.
        weight_decay: For the group that decays.
        example: An input tensor (or tuple, or dict), to see in the graph which layers the model's own batch norms
            follow; without it only those next to each other in an `nn.Sequential` are known.

    Returns:
        Up to two groups for any `torch.optim` optimizer, every trainable parameter in exactly one.

    Raises:
        ValueError: If the decay is negative.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
        >>> groups = vp.param_groups(model, weight_decay=5e-4)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(2, 0.0005), (4, 0.0)]
        >>> optimizer = torch.optim.SGD(groups, lr=0.1)
    """
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must be at least 0, got {weight_decay}.")
    spared = set(_spared(model, example))
    trained = {parameter: holders for parameter, holders in owners(model).items() if parameter.requires_grad}
    free = {p for p, holders in trained.items() if p.ndim <= 1 or all(holder in spared for holder in holders)}
    groups = [
        {"params": [p for p in trained if p not in free], "weight_decay": weight_decay},
        {"params": [p for p in trained if p in free], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@torch.no_grad()
def unit_norm_(model: ModuleT) -> ModuleT:
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

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4))
        >>> model = vp.unit_norm_(model)  # before networks that were trained apart are averaged
        >>> torch.allclose(model[0].weight.norm(dim=1), torch.ones(8))
        True
    """
    holders = owners(model)
    # (module, name, layer) of each weight whose scale has no effect, those of recurrent layers left out
    normalized = normalized_layers(model).values()
    invariant: list[tuple[nn.Module, str, Any]] = [(x, "weight", x) for x in normalized if "weight" in x._parameters]
    invariant += [(parts_of(layer), "original1", layer) for layer in model.modules() if has_weight_norm(layer)]
    without_effect = {(module, name) for module, name, _ in invariant}
    for module, name, layer in invariant:
        weight = getattr(module, name)
        tied = holders[weight]
        # the output channels of all layers that hold the weight have to be the same rows of it
        axes = {(output_axis(holder), getattr(holder, "groups", 1) * output_axis(holder)) for holder, _ in tied}
        if weight.requires_grad and all(holder in without_effect for holder in tied) and len(axes) == 1:
            if all(getattr(holder, "centred_rows", False) for holder, _ in tied):
                weight.copy_(with_centred_rows(weight, layer))
            if module is layer:
                norms = along_outputs(weight_norms(weight, layer), weight, layer)
            else:  # rows of torch's weight norm, which for a transposed convolution run over all groups
                norms = torch.norm_except_dim(weight, 2, cast(Any, parts_of(layer)[0]).dim)
            weight.div_(torch.where(norms > 0, norms, 1.0))
    for recurrent in (layer for layer in normalized if isinstance(layer, NormalizedRecurrent)):
        for suffix in suffixes(recurrent):  # only a common factor may scale the rows of a gate's two weights
            weights = [recurrent.parameter(name, suffix) for name in ("weight_ih", "weight_hh")]
            if all(weight.requires_grad and len(holders[weight]) == 1 for weight in weights):
                unit_gates_(recurrent, suffix)
    return model


def _spared(model: nn.Module, example: Any) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of the parameters that do not decay, whatever their number of axes."""
    for layer in normalized_layers(model).values():
        names = [name for name, _ in layer.named_parameters(recurse=False)]
        yield from ((layer, name) for name in names if not name.startswith("weight_hr"))  # an LSTM's projection
    for module in model.modules():
        if has_weight_norm(module):
            yield from ((parts_of(module), "original0"), (parts_of(module), "original1"))
        if isinstance(module, Batched):
            yield module.layer, "weight"
        if isinstance(module, _NORMS):
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
    yield from ((layer, "weight") for layer in _under_batch_norm(model, example))


def _under_batch_norm(model: nn.Module, example: Any) -> list[nn.Module]:
    """The layers directly before the model's own batch norms, as far as they are known; warns if some are not."""
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
