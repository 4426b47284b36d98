"""Batch norm into a plain model, with the statistics of one batch, and out of it again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from ..norm.batchnorm import (
    Absorbed,
    absorb_,
    batch_norms_after,
    computes_as_torch_batch_norm,
    find_notes,
    is_batch_norm,
    note_of,
    put_back_,
    take_out_,
)
from ..norm.checks import listed
from ..norm.linear_layers import LinearLayer, find_linear_layers, is_linear_layer, replace
from .batched import Batched
from .statistics import ChannelStatistics, measured_inputs, measured_outputs, pooled, run, set_statistics


def from_batch_norm_(model: nn.Module, example: Any = None) -> nn.Module:
    """Let the linear layers do the work of the batch norms directly after them, as in evaluation mode.

    A batch norm put in by `to_batch_norm_` goes with its wrapper; one of the model's own becomes an `nn.Identity`, or
    where its class does more than normalize, runs its forward without the batch norm in it. A layer without bias gains
    one where it is needed. A batch norm elsewhere (before a layer, after a sum) stays.

    Args:
        model: Changed in place, weights included; a weight tied to others is untied first, with a warning.
        example: An input, needed to find out which layers the model's own batch norms follow.

    Returns:
        The model, which is another module only where the model was itself a wrapped layer.
    """
    own = own_batch_norms(model)
    if own and example is None:
        raise ValueError(f"Batch norm '{next(iter(own))}' is the model's own: give `example`, to see what it follows.")
    following = batch_norms_after(model, example) if own else {}
    pairs = {layer: norm for layer, norm in following.items() if norm in own}
    _check_free_weights(model, pairs)
    for layer_path, norm_path in pairs.items():
        layer, norm = model.get_submodule(layer_path), model.get_submodule(norm_path)
        assert is_linear_layer(layer) and isinstance(norm, _BatchNorm)
        note = Absorbed(layer=layer, bias=layer.bias is not None, norm=norm)
        absorb_(model, layer_path, layer, norm, keep_bias=True)
        model = take_out_(model, note)
    for path, module in list(model.named_modules()):
        if isinstance(module, Batched):
            absorb_(model, path, module.layer, module.norm, keep_bias=module.had_bias)
            model = replace(model, module, module.layer)
    return model


def own_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a model that are not in a `Batched`."""
    wrapped = {module.norm for module in model.modules() if isinstance(module, Batched)}
    named = model.named_modules()
    return {path: m for path, m in named if is_batch_norm(m) and m not in wrapped}


def _check_free_weights(model: nn.Module, pairs: Mapping[str, str]) -> None:
    wrapped = {path: m.layer for path, m in model.named_modules() if isinstance(m, Batched)}
    for path, layer in {**{path: model.get_submodule(path) for path in pairs}, **wrapped}.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"The weight of '{path}' is parametrized and cannot take a factor: remove that first.")


def to_batch_norm_(model: nn.Module, batch: Any) -> nn.Module:
    """Put a batch norm after every linear layer that leaves the function as it is.

    gamma = sqrt(var + eps) and beta = mean + the layer's bias, with the mean and variance of the given batch. The
    running variance is set to the biased one, where torch would store the unbiased one, so that the function is the
    same in evaluation mode on every input and in training mode on this batch. (In training mode a layer called several
    times normalizes each call by itself: for such a layer only evaluation mode is exact, which is warned of.)
    Statistics are taken in evaluation mode, so without dropout. A layer the batch does not reach stays as it is. The
    model's own batch norms elsewhere take the statistics of this batch as well, and parameters that undo the change.

    Args:
        model: Changed in place; weights are not.
        batch: An input tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Returns:
        The model, which is another module only where the model was itself a linear layer.
    """
    layers = find_linear_layers(model)
    notes, staying = find_notes(model, layers), own_batch_norms(model)
    with (
        measured_outputs(layers) as measured,
        measured_inputs(staying) as entering,
        _directly_read(layers, notes) as direct,
    ):
        run(model, batch)
    several = [path for path, calls in {**measured, **entering}.items() if len(calls) > 1]
    if several:
        warnings.warn(
            f"These are called several times, and in training mode a batch norm normalizes each call by itself, so "
            f"that only evaluation mode computes the same: {listed([repr(path) for path in several])}.",
            stacklevel=4,
        )
    for path, found in pooled(entering).items():
        _move_to(staying[path], path, found)
    for path, found in pooled(measured).items():
        module = notes.get(path)
        if module is not None and path in direct and note_of(module)["norm"].affine:
            model = _returned(model, layers[path], module, found)
        else:
            model = _wrapped(model, layers[path], found)
    return model


@contextlib.contextmanager
def _directly_read(layers: Mapping[str, LinearLayer], notes: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Within, tells which notes read their layer's output: the paths noted may be out of date."""
    latest, direct, wrong = dict[str, Tensor](), set[str](), set[str]()

    def note(path: str, _layer: nn.Module, _args: Any, output: Tensor) -> None:
        latest[path] = output

    def compare(path: str, _module: nn.Module, args: Any) -> None:
        (direct if args[0] is latest.get(path) else wrong).add(path)

    with contextlib.ExitStack() as hooks:
        hooks.callback(direct.difference_update, wrong)
        for path, module in notes.items():
            hooks.enter_context(layers[path].register_forward_hook(partial(note, path), prepend=True))
            hooks.enter_context(module.register_forward_pre_hook(partial(compare, path)))
        yield direct


@torch.no_grad()
def _move_to(norm: _BatchNorm, path: str, found: ChannelStatistics) -> None:
    """Give a batch norm that stays other statistics, and parameters with which it computes the same."""
    if norm.running_mean is None or norm.running_var is None:
        return  # which normalizes by the batch in both modes
    if norm.weight is None or norm.bias is None or not computes_as_torch_batch_norm(norm):
        warnings.warn(
            f"Batch norm '{path}' has no parameters to undo other statistics, or a class of its own that may read them "
            f"otherwise: in training mode it computes something else than in evaluation mode.",
            stacklevel=5,
        )
        return
    rate = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    norm.bias.add_((found.mean - norm.running_mean) * rate)
    norm.weight.copy_(rate * torch.sqrt(found.var + norm.eps))
    set_statistics(norm, found)


@torch.no_grad()
def _fill(norm: _BatchNorm, layer: LinearLayer, found: ChannelStatistics, move_bias: bool) -> None:
    """Statistics and parameters that undo each other; on request the layer's bias goes over into the norm's."""
    bias = layer.bias if move_bias else None
    without = found if bias is None else ChannelStatistics(found.count, found.mean - bias, found.var)
    set_statistics(norm, without)
    norm.weight.copy_(torch.sqrt(without.var + norm.eps))
    norm.bias.copy_(found.mean)
    if bias is not None:
        norm.bias.requires_grad_(bias.requires_grad)
        layer.bias = None


def _wrapped(model: nn.Module, layer: LinearLayer, found: ChannelStatistics) -> nn.Module:
    batched = Batched(layer)
    _fill(batched.norm, layer, found, move_bias=True)
    return replace(model, layer, batched)


def _returned(model: nn.Module, layer: LinearLayer, module: nn.Module, found: ChannelStatistics) -> nn.Module:
    note = note_of(module)
    norm = note["norm"].to(device=layer.weight.device, dtype=layer.weight.dtype)
    _fill(norm, layer, found, move_bias=not note["bias"])
    return put_back_(model, module, norm)
