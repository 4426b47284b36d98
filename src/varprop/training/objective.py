"""What a learning rate is worth: the loss of a short training run, as the paper measures it.

Shekhovtsov & Flach 2018: the running mean of the stochastic loss after five epochs, with exponential weights that
vanish to 0.1 in one epoch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .restore import preserved_rng, preserved_training

Objective = Callable[[float], float]
StepFunction = Callable[[nn.Module, Optimizer, Any], "Tensor | float"]


def supervised_step(loss_fn: Callable[[Any, Any], Tensor]) -> StepFunction:
    """The ordinary training step for batches `(input, target)`, as `training_objective` takes it."""

    def step(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
        if not (isinstance(batch, (tuple, list)) and [hasattr(part, "to") for part in batch] == [True, True]):
            raise TypeError(
                f"loss_fn is for batches (input, target) of two tensors, not for a {type(batch).__name__}: pass "
                f"`step`, a function of model, optimizer and batch, for any other."
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        inputs, target = (part.to(device) for part in batch)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def training_objective(
    model: nn.Module | Callable[[], nn.Module],
    optimizer: Optimizer | type[Optimizer] | Callable[[nn.Module], Optimizer],
    data: Iterable[Any],
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    epochs: int = 5,
    *,
    step: StepFunction | None = None,
    steps_per_epoch: int | None = None,
    schedule: Callable[[int], float] | None = None,
    loss_limit: float = math.inf,
) -> Objective:
    """The paper's objective: the running mean of the stochastic loss after `epochs` epochs, by learning rate.

    Every evaluation starts from the same model, optimizer state and random numbers. Afterwards, also after an
    exception, a model and optimizer that were passed in are as before to the last bit (parameters, buffers,
    gradients, modes, optimizer state and rates), and so are the generators of Python, torch, CUDA, numpy and
    the DataLoader. State that a module keeps elsewhere is not seen: pass a factory for such a model.

    Args:
        model: A module, or a function that builds one.
        optimizer: An optimizer of that module, or an optimizer class, or a function from model to optimizer.
            Its largest group's rate becomes the rate tried; the other groups keep their ratio to it.
        data: Batches that can be iterated once an epoch: a DataLoader or a list.
        loss_fn: Called as `loss_fn(model(input), target)` for batches `(input, target)`.
        epochs: The horizon.
        step: Instead of `loss_fn`, for any other batch structure, mixed precision or accumulation: makes one
            training step, called as `step(model, optimizer, batch)`, and returns the loss.
        steps_per_epoch: The number of batches an epoch, where `len(data)` does not tell.
        schedule: The rate's factor in each epoch counted from 0; the paper's is `lambda epoch: 0.96**epoch`.
        loss_limit: A running mean above it counts as divergence.

    Returns:
        A function from learning rate to loss, infinite as soon as training diverges.
    """
    take_step = _chosen_step(loss_fn, step)
    length = _checked_length(data, steps_per_epoch)
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}.")
    if isinstance(optimizer, Optimizer) and not isinstance(model, nn.Module):
        raise TypeError(
            "A model factory needs an optimizer factory: pass an optimizer class or a function of the model."
        )

    def objective(lr: float) -> float:
        with preserved_rng(data):
            network = model if isinstance(model, nn.Module) else model()
            with preserved_training(network, optimizer if isinstance(optimizer, Optimizer) else None):
                active = _built_optimizer(optimizer, network)
                rates = [lr * (schedule(epoch) if schedule else 1.0) for epoch in range(epochs)]
                losses = _training_losses(network, active, data, take_step, rates)
                return _mean_until_divergence(losses, length, loss_limit)

    return objective


def _checked_length(data: Iterable[Any], steps_per_epoch: int | None) -> int:
    if isinstance(data, Iterator):
        raise TypeError("data must be iterable once an epoch: pass a DataLoader or a list in place of an iterator.")
    if steps_per_epoch is None:
        try:
            steps_per_epoch = len(data)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError("data has no length: say how many batches make an epoch by steps_per_epoch.") from None
    if steps_per_epoch < 1:
        raise ValueError("data is empty: the objective needs at least one batch an epoch.")
    return steps_per_epoch


def _chosen_step(loss_fn: Callable[[Any, Any], Tensor] | None, step: StepFunction | None) -> StepFunction:
    if (loss_fn is None) == (step is None):
        raise TypeError("Pass either loss_fn, for batches (input, target), or step, for anything else.")
    return step if step is not None else supervised_step(loss_fn)  # type: ignore[arg-type]


def _training_losses(
    model: nn.Module, optimizer: Optimizer, data: Iterable[Any], step: StepFunction, rates: list[float]
) -> Iterator[float]:
    set_rate = rate_setter(optimizer)
    model.train()
    for rate in rates:
        set_rate(rate)
        for batch in data:
            yield as_loss(step(model, optimizer, batch), "step")


def as_loss(value: Any, source: str) -> float:
    """What a user's function returned, as a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise TypeError(
            f"The {source} must return the loss, one number, not a {type(value).__name__}{shape}."
        ) from None


def _mean_until_divergence(losses: Iterator[float], steps_per_epoch: int, loss_limit: float) -> float:
    """sum q^(n-i) l_i / sum q^(n-i) of the losses l_1 ... l_n, with q = 0.1^(1 / steps_per_epoch)."""
    decay, total, weight, mean = 0.1 ** (1.0 / steps_per_epoch), 0.0, 0.0, math.nan
    for loss in losses:
        total, weight = decay * total + loss, decay * weight + 1.0
        mean = total / weight
        # Written so that NaN fails it too.
        if not mean <= loss_limit or not math.isfinite(mean):
            return math.inf
    return mean


def _built_optimizer(
    optimizer: Optimizer | type[Optimizer] | Callable[[nn.Module], Optimizer], model: nn.Module
) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        return optimizer
    built: Callable[..., Optimizer] = optimizer
    origin = built.func if isinstance(built, functools.partial) else built
    if isinstance(origin, type) and issubclass(origin, Optimizer):
        return built(model.parameters())
    return built(model)


def rate_setter(optimizer: Optimizer) -> Callable[[float], None]:
    """Scales all groups from their present rates, so that a rate of 0 on the way loses no ratio."""
    groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups]
    initial = [float(group["initial_lr"]) if "initial_lr" in group else None for group in groups]
    largest = max(rates)
    if not largest > 0:
        raise ValueError("Every parameter group has learning rate 0, so their ratios are unknown: set them first.")

    def set_rate(lr: float) -> None:
        for group, rate, start in zip(groups, rates, initial, strict=True):
            _assign(group, "lr", rate * (lr / largest))
            if start is not None:
                _assign(group, "initial_lr", start * (lr / largest))

    return set_rate


def _assign(group: dict[str, Any], key: str, rate: float) -> None:
    # A rate held in a tensor is what a captured CUDA graph reads, so the tensor has to stay the same.
    if isinstance(group[key], Tensor):
        group[key].fill_(rate)
    else:
        group[key] = rate
