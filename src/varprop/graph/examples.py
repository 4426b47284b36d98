"""The arguments of a model, by position and by name, and examples to capture it with: a shape will do for one."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..moments import Moments, Tokens

Kinds = tuple[type, ...]


def as_example(model: nn.Module, example: Any, inputs: Any = None) -> Any:
    """The example, with zeros where it has a shape: ``(1, 3, 32, 32)``, or several of these in a tuple or a dict.

    Flags and whatever else is no shape may stand among them.

    Args:
        model: Gives dtype and device of the zeros, unless it has no parameters.
        example: An input tensor, a tuple or dict of them, or shapes instead.
        inputs: Moments and `Tokens` in the same structure, where they are known: `Tokens` are whole numbers.
    """
    require_module(model)
    if is_shape(example):
        return _zeros(model, example, inputs)
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(example)):
        return example  # beside a tensor whole numbers are an argument of their own, the size of an output say
    if isinstance(example, dict):
        named = inputs if isinstance(inputs, dict) else {}
        return {name: _filled(model, item, named.get(name)) for name, item in example.items()}
    if isinstance(example, (tuple, list)) and any(map(is_shape, example)):
        items = inputs if isinstance(inputs, (tuple, list)) and len(inputs) == len(example) else [None] * len(example)
        return tuple(_filled(model, item, named) for item, named in zip(example, items, strict=True))
    return example


def require_module(model: Any) -> None:
    """Refuse functions and classes: a model is a module that can be called."""
    if not isinstance(model, nn.Module):
        description = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(
            f"A model is a torch.nn.Module, not {description}: write functions as the forward of a module."
        )


def require_values(model: nn.Module) -> None:
    """Refuse parameters on the meta device."""
    empty = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if empty is not None:
        raise ValueError(
            f"Parameter '{empty}' is on the meta device and has no values: use model.to_empty and load it."
        )


def of_fixed_sizes(example: Any) -> Any:
    """The example, as tensors on which torch has noted nothing about their sizes.

    torch.export makes symbols of axes that are marked as dynamic, for which no moments can be computed. It is not only
    the user who marks them: torch 2.11 does so with inputs that a model compiled with `dynamic=True` keeps for its
    backward pass.
    """
    return pytree.tree_map_only(Tensor, _without_marks, example)


@torch.enable_grad()
def _without_marks(x: Tensor) -> Tensor:
    again = x.detach().requires_grad_(x.requires_grad)
    return again if x.is_leaf else again.clone()  # a model may write into what is no leaf


def is_shape(value: Any) -> bool:
    """True if a value is a sequence of whole numbers."""
    return isinstance(value, (tuple, list)) and len(value) > 0 and all(type(extent) is int for extent in value)


def _filled(model: nn.Module, item: Any, input: Any) -> Any:
    return _zeros(model, item, input) if is_shape(item) else item


def _zeros(model: nn.Module, shape: Any, input: Any) -> Tensor:
    if min(shape) < 1:
        raise CaptureError(f"The example has the shape {tuple(shape)}: every extent must be 1 or more.")
    values = input.mean if isinstance(input, Moments) else torch.empty(0)
    like = next((p for p in model.parameters() if p.is_floating_point()), values)
    dtype = torch.long if isinstance(input, Tokens) else like.dtype
    return torch.zeros(tuple(shape), dtype=dtype, device=like.device)


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from one value, a tuple or list of them, or a dict by name."""
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def named_leaves(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
    """The leaves of a model's arguments by name: that of the argument, and the way to a place inside it.

    Values of the given types are kept whole.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names += [f"argument {position}" for position in range(len(names), len(args))]
    tree = dict(zip(names, args, strict=False)) | kwargs
    named: dict[str, Any] = {}
    for name, value in tree.items():
        leaves, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda value: isinstance(value, kinds))
        named |= {name + pytree.keystr(path): leaf for path, leaf in leaves}
    return named


def leaves_of(tree: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The leaves of a nest of arguments, values of the given types kept whole."""
    return pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, kinds))
