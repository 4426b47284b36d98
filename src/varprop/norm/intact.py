"""That a model is still the one that was normalized: its modules in their places, with the settings they had.

Statistics follow from the graph that was captured. Another module in the place of one, or another slope of a rectifier
or probability of dropout, would leave them as they were without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .linear_layers import is_linear_layer

REPLACED = (
    "Module '{}' was replaced after vp.normalize, which does not know the new one: take vp.fold(model) first, change "
    "that, and normalize again."
)
WRAPPED = (
    "Module '{}' is in a FullyShardedDataParallel of its own, which frees parameters that other modules read: put the "
    "whole model into one, or use torch.distributed.fsdp.fully_shard on the model and its blocks."
)
CHANGED = (
    "'{}' of module '{}' was {!r} when the model was normalized and is {!r} now, which its statistics do not know: "
    "set it back, take vp.fold(model), change that, and normalize again."
)
PLAIN = (bool, int, float, str, tuple, type(None))
Settings = dict[str, dict[str, Any]]  # of modules, by path


class Link(NamedTuple):
    """A module, and what has to be its child of a name."""

    parent: nn.Module
    name: str
    child: nn.Module


def settings_of(root: nn.Module, paths: Iterable[str]) -> Settings:
    """What torch lists as the constants of modules, but for whether they write in place.

    Of batch norms there is nothing: those that stay normalize by data, and the others are gone. Nor is there of linear
    layers, whose borders may be made to count otherwise than they are computed.
    """
    return {path: _settings([root, *(link.child for link in _way(root, path))][-1]) for path in sorted(paths)}


def _settings(module: nn.Module) -> dict[str, Any]:
    left_out = isinstance(module, _NormBase) or is_linear_layer(module)
    listed = () if left_out else getattr(module, "__constants__", ())
    own = {name: vars(module)[name] for name in listed if name != "inplace" and name in vars(module)}
    return {name: value for name, value in own.items() if isinstance(value, PLAIN)}


class Intact:
    """What is to be found in a model.

    Args:
        root: The model.
        layers: Its normalized layers, by path.
        settings: What the modules between them had when the model was normalized.

    Raises:
        ValueError: If a layer is in its place no more.
    """

    def __init__(self, root: nn.Module, layers: dict[str, nn.Module], settings: Settings) -> None:
        links: dict[tuple[int, str], Link] = {}
        self.settings: list[tuple[dict[str, Any], str, str, Any]] = []
        for path in (*layers, *settings):
            way = list(_way(root, path))
            links |= {(id(link.parent), link.name): link for link in way}
            module = way[-1].child if way else root
            if path in layers and module is not layers[path]:
                raise ValueError(_about(path, module))
            own = settings.get(path, {}).items()
            self.settings += [(vars(module), name, path, value) for name, value in own if name in vars(module)]
        self.links = list(links.values())
        self._floats = [(own, name, value) for own, name, _, value in self.settings if isinstance(value, float)]

    def complaint(self) -> str:
        """What is wrong with a model that has become another one; empty if nothing is."""
        for parent, name, child in self.links:
            found = parent._modules.get(name)
            if found is not child and _unwrapped(found) is not child:
                return _about(name, found)
        for own, name, path, value in self.settings:
            if own[name] != value:
                return CHANGED.format(name, path, value, own[name])
        return ""

    def floats_are_what_they_were(self) -> bool:
        """For Dynamo to read and to guard: a number of a module of which it has seen two values is a variable to it."""
        return all([own[name] == value for own, name, value in self._floats])


def _about(name: str, found: nn.Module | None) -> str:
    """What is wrong with a module that stands in the place of another one."""
    sharded = type(found).__name__ == "FullyShardedDataParallel"  # whose import would take a second
    return (WRAPPED if sharded else REPLACED).format(name)


def _way(root: nn.Module, path: str) -> Iterator[Link]:
    """From a model to one of its modules, as far as there are any."""
    module = root
    for name in path.split(".") if path else ():
        child = _unwrapped(module._modules.get(name))
        if child is None:
            return
        yield Link(module, name, child)
        module = child


def _unwrapped(module: nn.Module | None) -> nn.Module | None:
    """What torch.compile or torch's wrapper for gradient checkpoints calls, which change nothing of its function."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = module._modules.get(name, module) if module is not None else None
    return module
