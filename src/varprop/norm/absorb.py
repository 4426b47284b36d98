"""Batch norms that a linear layer does the work of: their arithmetic, and the note they leave in their place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .sites import Site, along_outputs, owners


class Absorbed(TypedDict):
    """What is noted at the identity in a batch norm's place, so that `to_batch_norm_` can put it back there."""

    layer: Site  # itself, wherever it and the identity may be put together
    bias: bool  # whether the layer had one
    norm: _BatchNorm  # no submodule here: not in the state_dict, and not called


# A plain attribute of a plain nn.Identity: it survives copying and pickling, and the model needs nothing of varprop.
_NOTE = "absorbed_batch_norm"


def noted(note: Absorbed) -> nn.Identity:
    """An identity that says which batch norm stood in its place."""
    identity = nn.Identity()
    setattr(identity, _NOTE, note)
    return identity


def note_of(identity: nn.Identity) -> Absorbed:
    """The note at an identity that `find_seats` found."""
    note: Absorbed = getattr(identity, _NOTE)
    return note


def find_seats(model: nn.Module, layers: Mapping[str, Site]) -> dict[str, nn.Identity]:
    """The identities that batch norms of the model's own left behind, by the path of the layer before."""
    paths = {layer: path for path, layer in layers.items()}
    noted = [(m, getattr(m, _NOTE, None)) for m in model.modules() if isinstance(m, nn.Identity)]
    return {paths[note["layer"]]: module for module, note in noted if note and note["layer"] in paths}


def folded(layer: Site, norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Weight and bias of the plain layer that does what layer and batch norm do in evaluation mode.

    W' = W r and b' = (b - mean) r + beta, with r = gamma / sqrt(var + eps).
    """
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError("A batch norm without running statistics has no plain layer that does the same.")
    deviation = torch.sqrt(norm.running_var + norm.eps)
    rate = norm.weight / deviation if norm.affine else 1 / deviation
    bias = -norm.running_mean if layer.bias is None else layer.bias - norm.running_mean
    shifted = bias * rate + norm.bias if norm.affine else bias * rate
    return layer.weight * along_outputs(rate, layer.weight, layer), shifted


@torch.no_grad()
def absorb_(model: nn.Module, path: str, layer: Site, norm: _BatchNorm, keep_bias: bool) -> None:
    """Give the layer the weight and bias that do what it and the batch norm do in evaluation mode."""
    weight, bias = folded(layer, norm)
    if assign_weight_(model, layer, weight):
        warnings.warn(f"The weight of '{path}' is no longer tied: its batch norm scales it alone.", stacklevel=2)
    if layer.bias is not None:
        layer.bias.copy_(bias)
    elif keep_bias or bias.any():
        trainable = norm.bias.requires_grad if norm.affine else layer.weight.requires_grad
        layer.bias = nn.Parameter(bias.to(layer.weight.dtype), requires_grad=trainable)


def assign_weight_(model: nn.Module, layer: Site, weight: Tensor) -> bool:
    """Give a layer a new weight; one that others hold as well stays with them, which is told by True."""
    if torch.equal(weight, layer.weight):
        return False
    if len(owners(model)[layer.weight]) == 1:
        layer.weight.copy_(weight)
        return False
    layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    return True
