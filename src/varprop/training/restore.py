"""Puts back what a trial run changes: model, optimizer, modes and random number generators, to the last bit."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@contextmanager
def preserved_training(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Puts model and optimizer back bit by bit; a model from a factory loses nothing by it."""
    restorers = [_restorer_of_modes(model), _restorer_of_tensors(_training_tensors(model, optimizer))]
    if optimizer is not None:
        restorers.append(_restorer_of_optimizer(optimizer))
    try:
        yield
    finally:
        for restore in restorers:
            restore()


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Puts back which modules are in training mode."""
    restore = _restorer_of_modes(model)
    try:
        yield
    finally:
        restore()


@contextmanager
def preserved_rng(data: object = None) -> Iterator[None]:
    """Puts back the generators of Python, torch, CUDA and numpy, and those a DataLoader holds itself."""
    restorers = [*_global_rng_restorers(), *(_generator_restorer(g) for g in _generators_of(data))]
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def _training_tensors(model: nn.Module, optimizer: Optimizer | None) -> list[Tensor]:
    groups = optimizer.param_groups if optimizer is not None else []
    extra = [parameter for group in groups for parameter in group["params"]]
    unique = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers(), *extra]}
    return list(unique.values())


def _restorer_of_modes(model: nn.Module) -> Callable[[], None]:
    modes = [(module, module.training) for module in model.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    return restore


def _restorer_of_tensors(tensors: list[Tensor]) -> Callable[[], None]:
    saved = [(tensor, tensor.detach().clone(), tensor.grad, _clone(tensor.grad)) for tensor in tensors]

    @torch.no_grad()
    def restore() -> None:
        for tensor, value, grad, grad_value in saved:
            tensor.copy_(value)
            if grad is not None and grad_value is not None:
                grad.copy_(grad_value)
            tensor.grad = grad

    return restore


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _restorer_of_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    # load_state_dict would cast the state to the parameters' dtype, which is not always what it had.
    state = {parameter: copy.deepcopy(entries) for parameter, entries in optimizer.state.items()}
    settings = [_settings_of(group) for group in optimizer.param_groups]

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            _restore_settings(group, saved)

    return restore


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def _restore_settings(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for key in group.keys() - saved.keys() - {"params"}:
        del group[key]
    for key, value in saved.items():
        if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _global_rng_restorers() -> list[Callable[[], object]]:
    restorers: list[Callable[[], object]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_initialized():
        restorers.append(functools.partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")  # the core does not need numpy, the user's augmentations may
    if numpy is not None:
        restorers.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))
    return restorers


def _generators_of(data: object) -> list[torch.Generator]:
    """A DataLoader with a generator of its own does not draw from the global one."""
    samplers = [
        getattr(data, "sampler", None),
        getattr(getattr(data, "batch_sampler", None), "sampler", None),
    ]
    found = [getattr(owner, "generator", None) for owner in [data, *samplers]]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _generator_restorer(generator: torch.Generator) -> Callable[[], object]:
    return functools.partial(generator.set_state, generator.get_state())
