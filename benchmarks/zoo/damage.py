"""Twelve kinds of damage, made by code on models that are known to train: the inspector has to see every one of them.

A damage is found if the damaged model gets an error or a warning of an expected kind that the sound one does not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import varprop as vp

from .inputs import drawn, moments
from .models import build

Record = dict[str, Any]
CHAIN, RESNET, TRANSFORMER = "torchvision/squeezenet1_0", "torchvision/resnet18", "timm/vit_tiny_patch16_224"
GATED, TOKENS, RECURRENT = "torchvision/mobilenet_v3_small", "hf/gpt2", "basic/nn_lstm"
NORM_BEHIND, NORM_BEFORE = "hf/bert", "hf/vit"  # transformers with small branches: a norm behind every sum, or before


@dataclass(frozen=True)
class Damage:
    """What is done to a model, on which models that makes sense, and what has to be found."""

    does: Callable[[nn.Module], None]
    models: tuple[str, ...]
    kinds: frozenset[str]


def _layers(model: nn.Module) -> list[nn.Module]:
    """Linear layers and convolutions, those of transformers' own kind too, in the order of their names."""
    return [one for one in model.modules() if isinstance(getattr(one, "weight", None), nn.Parameter) and _is_layer(one)]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Conv2d)) or type(module).__name__ == "Conv1D"


def scale_weights(factor: float) -> Callable[[nn.Module], None]:
    def does(model: nn.Module) -> None:
        for layer in _layers(model):
            layer.weight.mul_(factor)  # type: ignore[operator]

    return does


def unscaled_branches(model: nn.Module) -> None:
    """What ends a branch is 1000 times too large: a scale of the branches was forgotten."""
    for name, module in model.named_modules():
        if name.endswith((".bn2", ".attn.proj", ".mlp.fc2", ".c_proj")):
            module.weight.mul_(1e3)  # type: ignore[operator]


def large_branches(model: nn.Module) -> None:
    """What ends a branch is 100 times too large, which leaves small branches a few times as large as their stream."""
    for name, module in model.named_modules():
        if name.endswith((".output.dense", ".o_proj", ".fc2")):
            module.weight.mul_(1e2)  # type: ignore[operator]


def dead_rectifiers(model: nn.Module) -> None:
    """Shifts far below zero in the middle of the network."""
    shifted = [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)] or _layers(model)
    shifted[len(shifted) // 2].bias.fill_(-100.0)  # type: ignore[operator]


def saturated_gates(model: nn.Module) -> None:
    """Gates pushed far to one side."""
    for name, parameter in model.named_parameters():
        if name.endswith("fc2.bias") or "bias_ih" in name:
            parameter.fill_(100.0)


def zeroed_branch(model: nn.Module) -> None:
    """All weights of one branch are zero: none of them gets a gradient."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("layer2.1.conv", "layer2.1.bn", "blocks.1.mlp.", "h.1.mlp.")):
            parameter.zero_()


def exploding_head(model: nn.Module) -> None:
    _layers(model)[-1].weight.mul_(1e4)  # type: ignore[operator]


def large_embedding(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.mul_(1e3)


def layer_of_zeros(model: nn.Module) -> None:
    layer = _layers(model)[0]
    for parameter in layer.parameters():
        parameter.zero_()


def large_bias(model: nn.Module) -> None:
    """One shift that drowns what varies."""
    layers = [layer for layer in _layers(model) if getattr(layer, "bias", None) is not None]
    layers[-2].bias.fill_(1e3)  # type: ignore[operator]


def stale_statistics(model: nn.Module) -> None:
    """A batch norm that was fed with constants: its stored variance is next to nothing."""
    norm = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)][-1]
    norm.running_var.fill_(1e-8)  # type: ignore[union-attr, operator]
    norm.num_batches_tracked.fill_(1)  # type: ignore[union-attr, operator]


GROWTH = frozenset({"growth", "explode"})
DAMAGES = {
    "weights too large": Damage(scale_weights(10.0), (CHAIN,), GROWTH),
    "weights too small": Damage(scale_weights(0.1), (CHAIN,), frozenset({"decay", "vanish"})),
    "branches without their scale": Damage(unscaled_branches, (RESNET, TRANSFORMER, TOKENS), GROWTH),
    "branches 100 times too large": Damage(large_branches, (NORM_BEHIND, NORM_BEFORE), frozenset({"branch"})),
    "dead rectifiers": Damage(dead_rectifiers, (CHAIN, RESNET), frozenset({"dead"})),
    "saturated gates": Damage(saturated_gates, (GATED, RECURRENT), frozenset({"saturated", "shift", "constant"})),
    "a branch of zeros": Damage(zeroed_branch, (RESNET, TRANSFORMER, TOKENS), frozenset({"constant"})),
    "an exploding head": Damage(exploding_head, (CHAIN, RESNET, TRANSFORMER, GATED), GROWTH),
    "embeddings too large": Damage(large_embedding, (TOKENS,), frozenset({"growth"})),
    "a layer of zeros": Damage(layer_of_zeros, (CHAIN, RESNET, TRANSFORMER, GATED), frozenset({"constant"})),
    "a shift that drowns the signal": Damage(large_bias, (CHAIN, GATED), frozenset({"shift", "always_on"})),
    "statistics of constant batches": Damage(stale_statistics, (RESNET,), GROWTH),
}


def study(model_name: str) -> Iterator[Record]:
    """What is found on one model, sound and with every damage that fits it."""
    sound = _kinds(model_name, lambda _: None)
    found = {
        name: sorted((_kinds(model_name, damage.does) - sound) & damage.kinds)
        for name, damage in DAMAGES.items()
        if model_name in damage.models
    }
    yield {"model": model_name, "status": "done", "damages": found}


def _kinds(model_name: str, damage: Callable[[nn.Module], None]) -> set[str]:
    model, inputs = build(model_name)
    with torch.no_grad():
        damage(model)
    report = vp.inspect(model, moments(inputs), example=drawn(inputs))
    return {finding.kind for finding in report.findings if finding.severity != "note"}


def models() -> list[str]:
    """The models that get damaged."""
    return list(dict.fromkeys(itertools.chain.from_iterable(damage.models for damage in DAMAGES.values())))


def said(record: Record) -> str:
    """A record in a few words."""
    return "; ".join(f"{name}: {', '.join(kinds) or 'NOT FOUND'}" for name, kinds in record["damages"].items())
