"""Contexts that restore what a trial run changes: model, optimizer, modes and random number generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..graph.tracing import preserved_modes


@contextmanager
def preserved_training(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Restore a model and its optimizer, if there is one, bit by bit."""
    tensors = [*model.parameters(), *model.buffers()]
    with ExitStack() as stack:
        stack.enter_context(preserved_modes(model))
        if optimizer is not None:
            tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
            stack.enter_context(_preserved_optimizer(optimizer))
        stack.enter_context(preserved_tensors(tensors))
        yield


@contextmanager
def preserved_rng(data: object = None) -> Iterator[None]:
    """Restore the generators of Python, torch, CUDA and numpy, and those that `data`, a DataLoader, holds itself."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        if torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        numpy = sys.modules.get("numpy")  # the core does not need numpy, the user's augmentations may
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        for generator in _generators_of(data):
            stack.callback(generator.set_state, generator.get_state())
        yield


@contextmanager
def preserved_tensors(tensors: list[Tensor]) -> Iterator[None]:
    """Restore the values and gradients of tensors."""
    saved = [
        (tensor, tensor.detach().clone(), tensor.grad, None if tensor.grad is None else tensor.grad.detach().clone())
        for tensor in dict.fromkeys(tensors)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value, grad, grad_value in saved:
                tensor.copy_(value)
                if grad is not None and grad_value is not None:
                    grad.copy_(grad_value)
                tensor.grad = grad


@contextmanager
def _preserved_optimizer(optimizer: Optimizer) -> Iterator[None]:
    # load_state_dict would cast the state to the parameters' dtype, which is not always what it had.
    state = {parameter: copy.deepcopy(entries) for parameter, entries in optimizer.state.items()}
    settings = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            for key in group.keys() - saved.keys() - {"params"}:
                del group[key]
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _generators_of(data: object) -> list[torch.Generator]:
    """The generators that a DataLoader holds: it does not draw from the global one then."""
    batch_sampler = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), getattr(batch_sampler, "sampler", None))
    generators = (getattr(owner, "generator", None) for owner in owners)
    return list(dict.fromkeys(x for x in generators if isinstance(x, torch.Generator)))
