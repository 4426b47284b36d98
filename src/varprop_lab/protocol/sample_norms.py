"""Layer and group norm behind the linear layers of a network: normalizations over each sample by itself.

They take the mean over channels away from every sample and divide it by a number of its own, so that no affine map
gives the plain network's function back. They begin from the nearest that least squares on one batch finds, layer by
layer: outputs of every layer are mixed so that they make up for what the norms before it changed, then its norm gets
scale and shift for every channel. How far that is from the plain network is kept as the start gap.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .watching import watch

ROWS_FIRST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # the output channels are the first axis of their weight
_SMALLEST_GROUP = 4  # channels; a group of one would leave nothing of a linear layer's output
_MOST_GROUPS = 32  # as Wu & He 2018
_RIDGE = 0.01  # of the mean square of a channel
_MOST_MIXED = 4096  # channels; of more, such as the words of a language, the matrix of their products is too large


class SampleNorm(nn.GroupNorm):
    """Group norm over the channels of a layer's output; layer norm with one group.

    Behind a linear layer channels are the last axis and all before are samples (`last`), otherwise the second.
    """

    def __init__(self, groups: int, channels: int, last: bool) -> None:
        super().__init__(groups, channels)
        self.last = last

    def forward(self, input: Tensor) -> Tensor:
        """The normalized output."""
        values = input.reshape(-1, input.shape[-1]) if self.last else input
        return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps).reshape(input.shape)


def with_sample_norms(plain: nn.Module, method: str, batch: Tensor) -> nn.Module:
    """A copy of a plain network with a norm behind every linear layer that the batch calls but the last.

    It is fitted to the plain network's function on the batch.
    """
    model = add_sample_norms_(copy.deepcopy(plain), method, batch)
    for path in _called(plain, batch):  # in the order of the calls: what is fitted already changes what follows
        layer: Any = model.get_submodule(path)
        last = isinstance(layer, nn.Linear)
        wanted = _outputs(plain, path, batch, last)
        if getattr(layer, "groups", 1) == 1 and wanted.shape[1] <= _MOST_MIXED:
            _mix_(layer, _outputs(model, path, batch, last), wanted)
        if hasattr(layer, "norm"):
            _fit_(layer.norm, _outputs(model, f"{path}.norm", batch, last), wanted)
    return model


def add_sample_norms_(model: nn.Module, method: str, batch: Tensor) -> nn.Module:
    """The norms alone, with scale 1 and shift 0, in place; each is the `norm` of its layer and runs as a hook of it.

    A hook leaves the layer where it was, with its weight, for code that reads it by hand.
    """
    for path in _called(model, batch)[:-1]:
        layer: Any = model.get_submodule(path)
        channels = int(layer.weight.shape[0])
        norm = SampleNorm(1 if method == "layer" else _groups(channels), channels, isinstance(layer, nn.Linear))
        layer.norm = norm.to(layer.weight.device, layer.weight.dtype)
        layer.register_forward_hook(_normalize)
    return model


def _normalize(layer: Any, _: Any, output: Tensor) -> Tensor:
    normalized: Tensor = layer.norm(output)
    return normalized


def _groups(channels: int) -> int:
    """The largest number that divides the channels into groups of at least four, 32 at most."""
    most = max(1, min(_MOST_GROUPS, channels // _SMALLEST_GROUP))
    return next(count for count in range(most, 0, -1) if channels % count == 0)


def _called(model: nn.Module, batch: Tensor) -> list[str]:
    """The paths of linear layers in the order of their first calls."""
    found: dict[str, None] = {}
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, ROWS_FIRST)}
    watch(model, batch, layers, lambda path, _: found.setdefault(path))
    return list(found)


def _outputs(model: nn.Module, path: str, batch: Tensor, last: bool) -> Tensor:
    """What a layer gives in all its calls: a column for every channel."""
    found: list[Tensor] = []
    watch(model, batch, {path: model.get_submodule(path)}, lambda _, output: found.append(output))
    return torch.cat([(y if last else y.movedim(1, -1)).flatten(0, -2) for y in found]).double()


@torch.no_grad()
def _mix_(layer: Any, found: Tensor, wanted: Tensor) -> None:
    """Replace a layer by a mixture of its outputs that is nearest to the wanted ones; nothing changes if it is there.

    Ridge regression of what is missing: with fewer samples than channels it would follow the batch, not the function.
    """
    centred, missing = found - found.mean(0), wanted - found
    gram = centred.t() @ centred
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-12)
    change = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), centred.t() @ missing).t()
    weight = layer.weight.double().flatten(1)
    layer.weight.add_((change @ weight).view_as(layer.weight))
    if layer.bias is not None:
        shift = missing.mean(0) - change @ found.mean(0)
        layer.bias.add_(change @ layer.bias.double() + shift)


@torch.no_grad()
def _fit_(norm: SampleNorm, found: Tensor, wanted: Tensor) -> None:
    """Scale and shift of every channel by least squares."""
    centred = found - found.mean(0)
    slope = (centred * (wanted - wanted.mean(0))).mean(0) / centred.square().mean(0).clamp_min(1e-12)
    norm.weight.copy_(slope)
    norm.bias.copy_(wanted.mean(0) - slope * found.mean(0))
