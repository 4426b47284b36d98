"""Adam for many networks at once, each with a learning rate of its own, and what else happens to weights in a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp

BETAS = (0.9, 0.999)
EPS = 1e-8


def adam_(parameters: Tensor, gradients: Tensor, mean: Tensor, square: Tensor, rates: Tensor, step: Tensor) -> None:
    """One step of Adam (Kingma & Ba 2015) in place, the same for every row as `torch.optim.Adam` makes it.

    A network is a row and has a rate of its own. `mean` and `square` are the running means of gradients and of their
    squares, zero before the first step. `step` is the number of this step, from 1, as a float64 tensor: nothing here
    waits for the device.
    """
    first, second = BETAS
    mean.lerp_(gradients, 1 - first)
    square.mul_(second).addcmul_(gradients, gradients, value=1 - second)
    size = (rates / (1 - first**step)).to(parameters.dtype)
    root = (1 - second**step).sqrt().to(parameters.dtype)
    parameters.sub_((mean / (square.sqrt() / root).add_(EPS)).mul_(size[:, None]))


def started_optimizer(
    make: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], rate: Callable[[], Any] = float
) -> torch.optim.Optimizer:
    """An optimizer with its state in place, as before its first step; `rate` makes a learning rate of 0.

    Raises:
        VarpropError: If it keeps something between steps that a checkpoint could not hold.
    """
    optimizer = make([{**group, "lr": rate()} for group in groups], lr=rate())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()  # at rate 0 and without gradients: it has no effect but to make the state
    except TypeError as error:
        raise vp.VarpropError(f"{type(optimizer).__name__} needs more than gradients in a step ({error}).") from error
    for values in optimizer.state.values():
        for name, value in values.items():
            if value is not None and not isinstance(value, Tensor):
                kind = f"{type(optimizer).__name__} keeps {name!r}, a {type(value).__name__}"
                raise vp.VarpropError(f"{kind}, which is no tensor: a run could not be resumed with it.")
        if isinstance(values.get("step"), Tensor):
            values["step"].zero_()
    return optimizer


def decaying_names(model: nn.Module) -> list[str]:
    """The weights that decay in the variant with decay: all with several axes but the lengths of weight norm."""
    return [n for n, p in model.named_parameters() if p.ndim > 1 and not n.endswith(".original0")]


def invariant_names(model: nn.Module) -> list[str]:
    """The weights whose scale does not matter, as `vp.unit_norm_` knows them: it is asked on a copy."""
    longer = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in longer.parameters():
            parameter.mul_(3)
    before = {name: parameter.detach().clone() for name, parameter in longer.named_parameters()}
    vp.unit_norm_(longer)
    return [name for name, parameter in longer.named_parameters() if not torch.equal(parameter, before[name])]


def project_(weight: Tensor, chosen: Tensor) -> None:
    """Scale the output channels (axis 1) of stacked weights to norm 1 in place, in the networks (axis 0) chosen."""
    norms = torch.linalg.vector_norm(weight.flatten(2), dim=2)
    factor = torch.where(chosen[:, None] & (norms > 0), norms, torch.ones_like(norms))
    weight.div_(factor.reshape(*factor.shape, *[1] * (weight.ndim - 2)))
