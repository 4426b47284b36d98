"""A record of the model that was normalized, by which changes of its modules and their settings are refused.

Statistics follow from the graph that was captured. Another module in the place of one, or another slope of a rectifier
or probability of dropout, would leave them as they were without a word. So would a copy of some of the modules, whose
statistics follow from layers that are not among them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .batchnorm import absorbing_layers
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
APART = (
    "This is a copy of modules of a normalized model without '{}', from which their statistics follow: copy the whole "
    "model and call these modules of the copy, or copy modules of vp.fold(model), which need no others."
)
SHARDED = (
    "Some parameters of the normalized model are sharded while a part of it runs that depends on them: call "
    "fully_shard on the whole model and, within it, on blocks that hold their own norms and whose layers are called on "
    "nothing that a later block computes, and call no block by itself; or train with DistributedDataParallel; and call "
    "parallelize_module on the plain model that vp.fold returns, not on the normalized one."
)
PLAIN = (bool, int, float, str, tuple, type(None))


class Link(NamedTuple):
    """A child module as it was recorded: `parent._modules[name]` has to be `child` still."""

    parent: nn.Module
    name: str
    child: nn.Module


class RecordedSetting(NamedTuple):
    """An attribute of a module as it was recorded: `getattr(module, name)` has to be `value` still."""

    module: nn.Module
    path: str
    name: str
    value: Any


class Intact:
    """A model as it is when it is normalized; copies and pickles of the model have a record of themselves.

    Args:
        root: The model.
        paths: The paths of its normalized layers, and of the modules between them.

    Attributes:
        apart: True for a copy of some modules alone, made without the model. It then holds a copy of all of the model,
            which nothing else refers to and which does not follow the model.
    """

    def __init__(self, root: nn.Module, paths: Iterable[str]) -> None:
        links: dict[tuple[int, str], Link] = {}
        self.root, self.apart = root, False
        self.settings: list[RecordedSetting] = []
        for path in sorted(paths):
            links_to_module = list(_links_to(root, path))
            links |= {(id(link.parent), link.name): link for link in links_to_module}
            module = links_to_module[-1].child if links_to_module else root
            self.settings += [RecordedSetting(module, path, name, value) for name, value in _settings(module).items()]
        self.links = list(links.values())
        self._in_use: set[str] = set()  # where it is apart: the paths of modules that were copied or called

    def __deepcopy__(self, memo: dict[int, Any]) -> Intact:
        copied = object.__new__(Intact)
        memo[id(self)] = copied
        copied.apart = id(self.root) not in memo  # which has the model first, where that is copied
        copied._in_use = _copied_before(self.root, memo) if copied.apart else set()
        copied.root, copied.links, copied.settings = copy.deepcopy((self.root, self.links, self.settings), memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "links": self.links, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A pickle of the model comes to its modules, and so to this, before the model's own attributes are set.
        self.apart, self._in_use = "_modules" in vars(self.root), set()

    def require(self) -> None:
        """Raise if the model has become another one.

        Raises:
            ValueError: That says what has changed.
        """
        if complaint := self._complaint():
            raise ValueError(complaint)
        # For Dynamo to read and to guard: a number of a module of which it has seen two values is a variable to it.
        if torch.compiler.is_compiling() and not all(
            [vars(module)[name] == value for module, _, name, value in self.settings if isinstance(value, float)]
        ):
            raise ValueError(self._complaint())

    def _complaint(self) -> str:
        """A sentence on the first change of the model; empty if there is none.

        Compiled graphs ask when they are made: they are made anew if modules change.
        """
        for parent, name, child in self.links:
            module = parent._modules.get(name)
            if module is not child and _unwrapped(module) is not child:
                wrapped = type(module).__name__ == "FullyShardedDataParallel"  # whose import would take a second
                return (WRAPPED if wrapped else REPLACED).format(name)
        for module, path, name, value in self.settings:
            if module.__dict__.get(name) != value:
                return CHANGED.format(name, path, value, module.__dict__.get(name))
        return ""

    # as torch.compiler.assume_constant_result would mark it, but for its import of Dynamo
    _complaint._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def require_in_use(self, paths: Iterable[str], called: Iterable[nn.Module | None]) -> None:
        """Raise if some modules that a layer's statistics follow from are not in use, but a copy that nobody knows.

        Args:
            paths: Those modules.
            called: Modules that are called now, and so are in use with all that they hold.

        Raises:
            ValueError: That names one of them.
        """
        if not self.apart:
            return
        if not torch.compiler.is_compiling():
            present = [module for module in called if module is not None]
            self._in_use |= {path for path, module in self.root.named_modules() if any(module is m for m in present)}
        for path in paths:
            if not any(path == used or not used or path.startswith(used + ".") for used in self._in_use):
                raise ValueError(APART.format(path))


def _copied_before(root: nn.Module, memo: dict[int, Any]) -> set[str]:
    """The paths of modules that a deepcopy has come to so far.

    A layer that it came to by the note of a batch norm, which the layer has absorbed, is not among them: the user has
    copied the batch norm's module and not the layer.
    """
    reached = {key: n for n, key in enumerate(memo)}
    by_note = {
        id(layer)
        for module, layer in absorbing_layers(root)
        if id(module) in reached and reached[id(module)] < reached.get(id(layer), 0)
    }
    named = root.named_modules(remove_duplicate=False)
    return {path for path, module in named if id(module) in reached and id(module) not in by_note}


def is_sharded(parameter: Tensor) -> bool:
    """True for a tensor of `torch.distributed.tensor`, of which every process holds a piece."""
    return hasattr(parameter, "full_tensor")


def refuse_sharded(parameters: Sequence[Tensor]) -> None:
    """Raise a RuntimeError where plain tensors are needed and some are sharded."""
    if any(is_sharded(parameter) for parameter in parameters):
        raise RuntimeError(SHARDED)


def _settings(module: nn.Module) -> dict[str, Any]:
    """The constants of a module, as torch lists them, but for `inplace`.

    Of batch norms there is nothing: those that stay normalize by data, and the others are gone. Nor is there of linear
    layers, whose borders may be made to count otherwise than they are computed.
    """
    left_out = isinstance(module, _NormBase) or is_linear_layer(module)
    listed = () if left_out else getattr(module, "__constants__", ())
    values = {name: vars(module)[name] for name in listed if name != "inplace" and name in vars(module)}
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def _links_to(root: nn.Module, path: str) -> Iterator[Link]:
    """The links from a model to one of its modules, as far as the path exists."""
    module = root
    for name in path.split(".") if path else ():
        child = _unwrapped(module._modules.get(name))
        if child is None:
            return
        yield Link(module, name, child)
        module = child


def _unwrapped(module: nn.Module | None) -> nn.Module | None:
    """The module inside wrappers of torch.compile and of gradient checkpoints, which compute the same."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = module._modules.get(name, module) if module is not None else None
    return module
