"""Layer and group norm behind the linear layers of a network: normalizations over each sample by itself.

No affine map behind them gives the plain network's function back, since they divide every sample by a number of its
own. They begin from the nearest: scale and shift of every channel are those of the least squares fit to the plain
layer's outputs on one batch. How far that is from the plain network is kept as the start gap.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SMALLEST_GROUP = 4  # channels; a group of one would leave nothing of a linear layer's output
_MOST_GROUPS = 32  # as Wu & He 2018


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

    Scales and shifts are fitted to its function on the batch.
    """
    model = add_sample_norms_(copy.deepcopy(plain), method, batch)
    norms = {path: m for path, m in model.named_modules() if isinstance(m, SampleNorm)}
    wanted = _outputs(plain, [path.rpartition(".")[0] for path in norms], batch)
    for path, norm in norms.items():  # in the order of the calls: what is fitted already changes what follows
        _fit_(norm, model, path, wanted[path.rpartition(".")[0]], batch)
    return model


def add_sample_norms_(model: nn.Module, method: str, batch: Tensor) -> nn.Module:
    """The norms alone, with scale 1 and shift 0, in place; each is the `norm` of its layer and runs as a hook of it.

    A hook leaves the layer where it was, with its weight, for code that reads it by hand.
    """
    called: dict[nn.Module, None] = {}
    handles = [
        layer.register_forward_hook(lambda layer, _, __: called.setdefault(layer))
        for layer in model.modules()
        if isinstance(layer, _LAYERS)
    ]
    _evaluate(model, batch)
    for handle in handles:
        handle.remove()
    for layer in list(called)[:-1]:
        channels, last = layer.weight.shape[0], isinstance(layer, nn.Linear)  # type: ignore[index]
        norm = SampleNorm(1 if method == "layer" else _groups(int(channels)), int(channels), last)
        layer.norm = norm.to(layer.weight.device, layer.weight.dtype)  # type: ignore[arg-type]
        layer.register_forward_hook(_normalize)
    return model


def _normalize(layer: Any, _: Any, output: Tensor) -> Tensor:
    normalized: Tensor = layer.norm(output)
    return normalized


def _groups(channels: int) -> int:
    """The largest number that divides the channels into groups of at least four, 32 at most."""
    most = max(1, min(_MOST_GROUPS, channels // _SMALLEST_GROUP))
    return next(count for count in range(most, 0, -1) if channels % count == 0)


@torch.no_grad()
def _evaluate(model: nn.Module, batch: Tensor) -> None:
    training = {module: module.training for module in model.modules()}
    model.eval()(batch)
    for module, mode in training.items():
        module.training = mode


def _outputs(model: nn.Module, paths: list[str], batch: Tensor) -> dict[str, Tensor]:
    """What layers give, all their calls one after another."""
    found: dict[str, list[Tensor]] = {path: [] for path in paths}
    handles = [
        model.get_submodule(path).register_forward_hook(lambda _, __, y, path=path: found[path].append(y))
        for path in paths
    ]
    _evaluate(model, batch)
    for handle in handles:
        handle.remove()
    return {path: torch.cat([output.reshape(-1, *output.shape[1:]) for output in each]) for path, each in found.items()}


@torch.no_grad()
def _fit_(norm: SampleNorm, model: nn.Module, path: str, wanted: Tensor, batch: Tensor) -> None:
    found = _by_channel(_outputs(model, [path], batch)[path], norm.last)
    target = _by_channel(wanted, norm.last)
    centred = found - found.mean(0)
    slope = (centred * (target - target.mean(0))).mean(0) / centred.square().mean(0).clamp_min(1e-12)
    norm.weight.copy_(slope)
    norm.bias.copy_(target.mean(0) - slope * found.mean(0))


def _by_channel(output: Tensor, last: bool) -> Tensor:
    return (output if last else output.movedim(1, -1)).flatten(0, -2).double()
