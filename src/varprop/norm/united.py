"""Which layers of a model are folded together, and the hooks that tell them when the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..graph.capture import Program
from ..graph.node import Node
from .blueprint import Site, fits
from .layers import CLASSES, Normalized, Use
from .statistics import Statistics
from .together import Folding, Together


@dataclass(frozen=True)
class Captured:
    """A model in one mode: its graph, the calls of its normalized layers, and the moments of its inputs."""

    program: Program
    calls: dict[Node, str]
    inputs: dict[Node, Any]


def fold_together_(model: nn.Module, captured: dict[bool, Captured], layers: dict[str, Normalized]) -> None:
    """Let all layers that are called once be folded together."""
    made: dict[int, Together | None] = {}
    by_mode = {}
    for mode, graph in captured.items():
        if id(graph) not in made:
            made[id(graph)] = _together(model, graph, layers)
        together = made[id(graph)]
        if together is None:
            return
        by_mode[mode] = together
    for mode, together in by_mode.items():
        for place, layer in enumerate(together.layers):
            layer.place = {**layer.place, mode: (together, place)}
    folding, joined = Folding(by_mode), {id(layer) for together in by_mode.values() for layer in together.layers}
    for module in model.modules():
        if id(module) not in joined and any(id(inner) in joined for inner in module.modules()):
            module.register_forward_pre_hook(folding.begin)
            module.register_forward_hook(folding.end, always_call=True)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[nn.Module]:
    """A promise that the parameters stay as they are within: the normalization is computed once for all passes.

    For the passes of a gradient accumulation or of an evaluation on CUDA; elsewhere it is noticed without. Every call
    of a model is right without this promise, and no call is right that breaks it.

    Args:
        model: A normalized model.
    """
    found = {id(t): t for m in model.modules() if isinstance(m, Normalized) for t, _ in m.place.values()}
    for together in found.values():
        together.forget()
        together.promised = True
    try:
        yield model
    finally:
        for together in found.values():
            together.promised = False


def _together(model: nn.Module, graph: Captured, layers: dict[str, Normalized]) -> Together | None:
    sites = [site for path, layer in layers.items() if (site := _site(graph, path, layer)) is not None]
    sites = sorted((site for site in sites if fits(site)), key=lambda site: site.shape)  # equal ones side by side
    if not sites:
        return None
    targets = [site.target for site in sites]
    joint = Statistics(model, graph.program, graph.calls, targets, graph.inputs)
    return Together(joint, sites, [layers[site.path] for site in sites])


def _site(graph: Captured, path: str, layer: Normalized) -> Site | None:
    calls = [node for node, owner in graph.calls.items() if owner == path]
    if len(calls) != 1 or not layer.center or not isinstance(layer, tuple(CLASSES.values())):
        return None
    transposed = bool(getattr(layer, "transposed", False))
    return Site(
        path, Use.of(calls[0]), calls[0].args[0], tuple(layer.weight.shape), getattr(layer, "groups", 1), transposed
    )


def remove_hooks_(model: nn.Module) -> None:
    """Take away what `fold_together_` put on the model."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Folding)]
            for key in ours:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
