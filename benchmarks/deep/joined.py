"""Several networks as one, and the parts of a training in which each becomes what it would alone (`side_by_side`).

`joined` puts networks of one architecture into one network with as many groups of channels; convolutions, batch and
group norms and the analytic normalization keep groups apart.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MOMENTUM = 0.9
JUDGED_TOGETHER = 1000  # images of all networks together
WIDER: dict[type[nn.Module], Callable[[Any, int], nn.Module]] = {  # a layer as wide as so many of them
    nn.Conv2d: lambda conv, count: type(conv)(
        count * conv.in_channels,
        count * conv.out_channels,
        kernel_size=conv.kernel_size,
        stride=conv.stride,
        padding=conv.padding,
        groups=count * conv.groups,
        bias=conv.bias is not None,
    ),
    # behind a global average, which has left one position
    nn.Linear: lambda linear, count: nn.Conv2d(
        count * linear.in_features, count * linear.out_features, 1, groups=count
    ),
    nn.BatchNorm2d: lambda norm, count: nn.BatchNorm2d(count * norm.num_features, norm.eps, norm.momentum),
    nn.GroupNorm: lambda norm, count: nn.GroupNorm(count * norm.num_groups, count * norm.num_channels, norm.eps),
}


def joined(models: Sequence[nn.Module]) -> nn.Module:
    """One network whose groups of channels are the networks: inputs (N, K * C, H, W), outputs (N, K * classes)."""
    return nn.Sequential(_joined(models), nn.Flatten())


def _joined(modules: Sequence[Any]) -> nn.Module:
    first = modules[0]
    if isinstance(first, nn.Flatten):
        return nn.Identity()
    new: nn.Module
    for kind, wider in WIDER.items():
        if isinstance(first, kind):
            new = wider(first, len(modules))
            with torch.no_grad():
                for name, parameter in new.named_parameters():
                    values = torch.cat([module.get_parameter(name) for module in modules])
                    parameter.copy_(values.view_as(parameter))
            return new
    new = copy.deepcopy(first)
    for name, _ in first.named_children():
        setattr(new, name, _joined([getattr(module, name) for module in modules]))
    return new


def member_losses(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean cross entropy of every network, of outputs (N, K * classes) and labels (K, N)."""
    logits = outputs.unflatten(1, (len(labels), -1)).transpose(0, 1).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=smoothing)
    return losses.view(len(labels), -1).mean(1)


@torch.no_grad()
def move_(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rates: Tensor,
    weight_decay: float,
    clip_: Callable[[int, list[Tensor], list[Tensor]], None] = lambda number, parameters, gradients: None,
) -> None:
    """Move every network for itself: its rows are a part of all parameters.

    `clip_` may change the gradients of a network, which it gets with its number and its parameters.
    """
    count = len(rates)
    networks = [
        [tensor.unflatten(0, (count, -1)).unbind() for tensor in tensors]
        for tensors in (parameters, [_gradient(p) for p in parameters], momenta)
    ]
    for number in range(count):
        mine = [[tensor[number] for tensor in tensors] for tensors in networks]
        clip_(number, mine[0], mine[1])
        for decayed in (True, False):  # matrices and kernels, not scales, which may have the axes of a kernel
            chosen = [n for n, p in enumerate(parameters) if (p.numel() > len(p)) == decayed]
            torch._fused_sgd_(
                *([tensors[n] for n in chosen] for tensors in mine),
                weight_decay=weight_decay if decayed else 0.0,
                momentum=MOMENTUM,
                lr=rates[number],
                dampening=0.0,
                nesterov=True,
                maximize=False,
                is_first_step=False,
            )


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides, which fused optimizers ask for: axes of one have any in torch."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() == parameter.stride():
        return gradient
    strides = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    if all(size == 1 or here == there for size, here, there in strides):
        return gradient.as_strided(parameter.shape, parameter.stride())
    return torch.empty_like(parameter).copy_(gradient)


@torch.no_grad()
def accuracies(model: nn.Module, count: int, images: Tensor, labels: Tensor) -> list[float]:
    """The share of these images that every one of so many `joined` networks gets right."""
    model.eval()
    right = torch.zeros(count, device=images.device)
    together = JUDGED_TOGETHER // count
    for x, y in zip(images.split(together), labels.split(together), strict=True):
        logits = model(x.repeat(1, count, 1, 1).contiguous(memory_format=torch.channels_last)).unflatten(1, (count, -1))
        right += (logits.argmax(2) == y[:, None]).sum(0)
    model.train()
    return [float(value) / len(images) for value in right]
