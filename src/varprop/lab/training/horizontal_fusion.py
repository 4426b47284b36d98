"""Horizontal fusion: equal small operations of a flat graph are stacked and run as one.

The statistics of a normalized network are the same few hundred operations on twenty numbers, once for every layer, and
once more in the backward pass: calling them takes longer than computing them. Where operations are equal in all but
their operands they are stacked and run as one operation. Nothing else changes.
"""

from __future__ import annotations

import heapq
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

Colours = dict[fx.Node, int]
Group = tuple[fx.Node, ...]


def fused(graph: fx.Graph, data: Iterable[fx.Node], batch_extents: set[int]) -> Callable[..., Any]:
    """The same function as a graph of ATen operations, with equal small operations stacked.

    Args:
        graph: Without mutation; its output is a list.
        data: The placeholders that hold samples.
        batch_extents: Extents that tell tensors with one entry a sample from others. Operations on such tensors depend
            on each other layer by layer and stay as they are.

    Returns:
        The function, to be traced again: it looks up everything by name as it runs.
    """
    groups = _schedule(graph, _colours(graph, set(data), batch_extents))
    constants = _constants(graph)
    return lambda *arguments: _Interpreter(constants).outputs(graph, groups, arguments)


def unfused(graph: fx.Graph) -> Callable[..., Any]:
    """The function of a graph as it is, but for values that depend on no argument: they are computed here, once."""
    groups: list[Group] = [(node,) for node in graph.nodes]
    constants = _constants(graph)
    return lambda *arguments: _Interpreter(constants).outputs(graph, groups, arguments)


def _colours(graph: fx.Graph, data: set[fx.Node], batch_extents: set[int]) -> Colours:
    """Equal numbers for nodes that do the same to operands of equal form; nodes that stay alone have their own."""
    table: dict[Hashable, int] = {}
    forms: Colours = {}
    colours: Colours = {}
    dependent = set(data)
    single = set[fx.Node]()
    for node in graph.nodes:
        operands = node.all_input_nodes
        if dependent.intersection(operands):
            dependent.add(node)
        per_sample = node in dependent and any(batch_extents & set(_shape(n)) for n in (node, *operands))
        part = node.target is operator.getitem and node.args[0] in single
        alone = node.op != "call_function" or per_sample or part or _is_random(node) or _is_split(node)
        single |= {node} if alone else set()
        key = ("leaf", str(node.target) if per_sample else "", _form(node)) if alone else _key(node, forms)
        forms[node] = table.setdefault(key, len(table))
        colours[node] = table.setdefault(node, len(table)) if alone else forms[node]
    return colours


def _key(node: fx.Node, forms: Colours) -> Hashable:
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    described = tuple(("node", forms[x]) if isinstance(x, fx.Node) else (type(x), str(x)) for x in leaves)
    return str(node.target), str(structure), described


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("tensor_meta"), "shape", ()))


def _form(node: fx.Node) -> Hashable:
    return _shape(node), str(getattr(node.meta.get("tensor_meta"), "dtype", ""))


def _is_split(node: fx.Node) -> bool:
    """Where all parameters come from one tensor, its parts take the place of placeholders."""
    return str(node.target).startswith("aten.split")


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _schedule(graph: fx.Graph, colours: Colours) -> list[Group]:
    """All nodes in an order that can be run, those of one colour together wherever none waits for another."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    missing = {node: len(node.all_input_nodes) for node in graph.nodes}
    open_, ready = defaultdict[int, int](int), defaultdict[int, list[fx.Node]](list)
    complete: list[tuple[int, int]] = []
    for node in graph.nodes:
        open_[colours[node]] += 1

    def admit(node: fx.Node) -> None:
        colour = colours[node]
        ready[colour].append(node)
        if len(ready[colour]) == open_[colour]:
            heapq.heappush(complete, (position[node], colour))

    for node in graph.nodes:
        if not missing[node]:
            admit(node)
    groups: list[Group] = []
    while ready:
        colour = heapq.heappop(complete)[1] if complete else max(ready, key=lambda c: len(ready[c]))
        chosen = sorted(ready.pop(colour), key=position.__getitem__)
        open_[colour] -= len(chosen)
        groups += [tuple(chosen)] if _can_be_stacked(chosen) else [(node,) for node in chosen]
        for node in chosen:
            for user in node.users:
                missing[user] -= 1
                if not missing[user]:
                    admit(user)
    return groups


def _can_be_stacked(nodes: Sequence[fx.Node]) -> bool:
    return len(nodes) > 1 and bool(nodes[0].all_input_nodes)


def _constants(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Values that depend on no argument: computed here, once."""
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            found[node] = operator.attrgetter(str(node.target))(graph.owning_module)
        elif node.op == "call_function" and not _is_random(node) and all(x in found for x in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = node.target(*args, **kwargs)
    return found


class _Interpreter:
    """One pass over the groups; the values of a group are stacked along a first axis."""

    def __init__(self, constants: dict[fx.Node, Any]) -> None:
        self.single: dict[fx.Node, Any] = dict(constants)
        self.stacked: dict[Group, Any] = {}
        self.place: dict[fx.Node, tuple[Group, int]] = {}
        self.parts: dict[Group, Any] = {}

    def outputs(self, graph: fx.Graph, groups: list[Group], arguments: tuple[Tensor, ...]) -> Any:
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.single.update(zip(placeholders, arguments, strict=True))
        for group in groups:
            if group[0].op == "call_function" and group[0] not in self.single:
                self.alone(group[0]) if len(group) == 1 else self.together(group)
        return fx.map_arg(next(node for node in graph.nodes if node.op == "output").args[0], self.value)

    def alone(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        self.single[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def value(self, node: fx.Node) -> Any:
        if node in self.single:
            return self.single[node]
        group, index = self.place[node]
        if group not in self.parts:
            whole = self.stacked[group]
            many = isinstance(whole, (tuple, list))
            self.parts[group] = list(zip(*(t.unbind(0) for t in whole), strict=True)) if many else whole.unbind(0)
        return self.parts[group][index]

    def together(self, group: Group) -> None:
        for index, node in enumerate(group):
            self.place[node] = group, index
        if group[0].target is operator.getitem:
            self.stacked[group] = self.items(group)
            return
        flat = [pytree.tree_flatten((node.args, node.kwargs))[0] for node in group]
        leaves, structure = pytree.tree_flatten((group[0].args, group[0].kwargs))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
        operands, axes = zip(*(self.operand([each[i] for each in flat]) for i in slots), strict=True)
        if not any(axis == 0 for axis in axes):
            self.alone(group[0])
            self.single.update(dict.fromkeys(group, self.single[group[0]]))
            return

        def call(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for slot, tensor in zip(slots, tensors, strict=True):
                filled[slot] = tensor
            args, kwargs = pytree.tree_unflatten(filled, structure)
            return group[0].target(*args, **kwargs)  # type: ignore[operator]

        self.stacked[group] = torch.vmap(call, in_dims=axes)(*operands)

    def operand(self, nodes: list[fx.Node]) -> tuple[Any, int | None]:
        """What the nodes of a group read in one place, and its stacked axis; none if they all read the same."""
        if all(node is nodes[0] for node in nodes):
            return self.value(nodes[0]), None
        whole = self.stacked.get(tuple(nodes))
        return (torch.stack([self.value(node) for node in nodes]) if whole is None else whole), 0

    def items(self, group: Group) -> Any:
        sources: list[Any] = [node.args[0] for node in group]
        whole, index = self.stacked.get(tuple(sources)), group[0].args[1]
        if whole is not None:
            return whole[index]
        return torch.stack([self.value(node)[index] for node in sources])
