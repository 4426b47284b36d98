"""The engine's own picture of a captured graph: plain objects, which also torch.compile can follow.

Export leaves some extents open: how many elements a constant mask selects is known once the mask is looked at
(`fill_open_extents`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorInfo:
    """Extents, dtype and device of a tensor the model computes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def is_floating(self) -> bool:
        """True if it holds floating-point numbers."""
        return self.dtype.is_floating_point

    def empty(self) -> torch.Tensor:
        """Such a tensor without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Call:
    """One call of a module: a key that tells calls apart, the module's dotted path, and its class."""

    key: str
    path: str
    class_name: str


@dataclass(frozen=True)
class _MemoryFormat:
    """A memory format in a pickle: torch.save writes none of torch's own."""

    name: str


@dataclass(eq=False)
class Node:
    """One value in a model: an input, a parameter, or the result of an operation.

    Attributes:
        name: Unique within the program.
        target: The operation; None for inputs, parameters, buffers and constants.
        args: Its positional arguments, nodes among them.
        kwargs: Its keyword arguments.
        info: Extents, dtype and device of its result; a list of them (or None) where there are several.
        stack: The module calls it was made in, outermost first.
        line: The user's source line, as ``file:line in function: code``; empty if unknown.
        users: The nodes that read it.
        operands: The nodes it reads, each once.
    """

    name: str
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    info: Any = None
    stack: tuple[Call, ...] = ()
    line: str = ""
    users: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.operands = tuple(dict.fromkeys(self.reads))
        for operand in self.operands:
            operand.users.append(self)

    def __getstate__(self) -> tuple[Any, ...]:
        """For copies and pickles: an operation of torch by its name, and without users, who come back by themselves.

        So nodes that are listed in the order of execution refer to earlier ones alone: otherwise they would do so in
        chains too long for pickle and deepcopy to follow.
        """
        overload = isinstance(self.target, torch._ops.OpOverload)
        target = str(self.target) if overload else self.target
        arguments = resolve((self.args, self.kwargs), lambda kept: _MemoryFormat(str(kept)), torch.memory_format)
        return self.name, target, *arguments, self.info, self.stack, self.line

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        name, target, args, kwargs, *fields = state
        args, kwargs = resolve((args, kwargs), lambda kept: getattr(torch, kept.name.split(".")[1]), _MemoryFormat)
        target = functools.reduce(getattr, target.split("."), torch.ops) if isinstance(target, str) else target
        self.__init__(name, target, args, kwargs, *fields)  # type: ignore[misc]

    @property
    def reads(self) -> list[Node]:
        """Every node among its arguments, as often as it is there."""
        return nodes_in((self.args, self.kwargs))

    @property
    def module(self) -> str:
        """Dotted path of the innermost module it was made in."""
        return self.stack[-1].path if self.stack else ""

    @property
    def packet(self) -> Any:
        """Its operation whatever the overload; None for what is none of torch's."""
        return getattr(self.target, "overloadpacket", None)

    @property
    def ndim(self) -> int:
        """Number of axes of its tensor."""
        return len(self.info.shape) if isinstance(self.info, TensorInfo) else 0

    def __repr__(self) -> str:
        return self.name


def resolve(tree: Any, value: Callable[[Any], Any], kind: type = Node) -> Any:
    """A nest of arguments, in plain tuples, lists and dicts, with every node replaced by its value."""
    if isinstance(tree, kind):
        return value(tree)
    if isinstance(tree, tuple):
        return tuple([resolve(item, value, kind) for item in tree])
    if isinstance(tree, list):
        return [resolve(item, value, kind) for item in tree]
    if isinstance(tree, dict):
        return {key: resolve(item, value, kind) for key, item in tree.items()}
    return tree


def nodes_in(tree: Any) -> list[Node]:
    """Every node in a nest of arguments, as often as it is there."""
    nodes: list[Node] = []
    resolve(tree, nodes.append)
    return nodes


def info_of(value: Any) -> Any:
    """Extents, dtype and device of a tensor, or a list of them for several; None for what is no tensor."""
    if isinstance(value, Tensor):
        return TensorInfo(torch.Size(value.shape), value.dtype, value.device)
    return [info_of(item) for item in value] if isinstance(value, (list, tuple)) else None


def fill_open_extents(nodes: list[Node], tensors: dict[Node, Any]) -> None:
    """Give nodes whose extents are symbols those they have, by running them on constants and zeros."""
    open_nodes = [node for node in nodes if _is_open(node.info)]
    if not open_nodes:
        return
    values = dict(tensors)
    with torch.no_grad():
        for node in open_nodes:
            node.info = info_of(_value(node, values))


def _is_open(info: Any) -> bool:
    if isinstance(info, list):
        return any(map(_is_open, info))
    return isinstance(info, TensorInfo) and not all(type(extent) is int for extent in info.shape)


def _value(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a node for the constants of the model, with zeros for values that depend on its input."""
    if node not in values:
        closed = isinstance(node.info, TensorInfo) and not _is_open(node.info)
        if closed and not _is_constant(node, values):
            values[node] = torch.zeros(node.info.shape, dtype=node.info.dtype, device=node.info.device)
        else:
            args, kwargs = resolve((node.args, node.kwargs), lambda operand: _value(operand, values))
            values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_constant(node: Node, values: dict[Node, Any]) -> bool:
    """True if a node follows from parameters, buffers and constants alone."""
    stored = node in values and node.target is None
    return stored or (node.target is not None and all(_is_constant(operand, values) for operand in node.operands))
