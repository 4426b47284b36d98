"""Where the rows of a report stand in the graph."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from ..engine.evaluation import Evaluation as Walk
from ..graph.node import Node
from ..moments import Moments
from ..rules.registry import Bend


@dataclass(frozen=True)
class Place:
    """Where a row stands in the graph: its result, its own nodes, and what it reads."""

    path: str
    kind: Literal["module", "operation"]
    name: str
    call: int
    depth: int
    leaf: bool
    output: Node
    nodes: tuple[Node, ...]

    @property
    def label(self) -> str:
        """How a person would call it."""
        return label(self.path, self.call, "" if self.kind == "module" else self.name)


def label(path: str, call: int, operation: str) -> str:
    """A module's path with the number of its call, and the operation in it if it is one."""
    name = (path or "(model)") + (f" #{call + 1}" if call else "")
    return f"{name} [{operation}]" if operation else name


def places(walk: Walk) -> list[Place]:
    """Module calls and operations with random results in the order of execution, containers first."""
    nodes = walk.plan.program.nodes
    counted = dict.fromkeys(node for node in nodes if _counts(walk, node))
    inside: dict[str, list[Node]] = {}
    for node in nodes:
        for call in node.stack:
            inside.setdefault(call.key, []).append(node)
    single = {key for key, within in inside.items() if sum(node in counted for node in within) == 1}
    numbering = _calls(walk)
    found: list[Place] = []
    seen: set[str] = set()
    for node in counted:
        for depth, call in enumerate(node.stack):
            if call.key not in seen and call.key in numbering:
                seen.add(call.key)
                index, output = numbering[call.key]
                name = call.class_name.rpartition(".")[2]
                leaf = call is node.stack[-1] and call.key in single
                found.append(Place(call.path, "module", name, index, depth, leaf, output, tuple(inside[call.key])))
        if not node.stack or node.stack[-1].key not in single:
            index = numbering.get(node.stack[-1].key, (0, node))[0] if node.stack else 0
            found.append(Place(node.module, "operation", op_name(node), index, len(node.stack), True, node, (node,)))
    return found


def _counts(walk: Walk, node: Node) -> bool:
    if not walk.plan.random(node) or node.target is operator.getitem:
        return False
    moments = first_moments(walk, node)
    return moments is not None and moments.mean.numel() > 0


def _calls(walk: Walk) -> dict[str, tuple[int, Node]]:
    """Which call of its module each key is, and its output, where that is random."""
    outputs = walk.plan.program.module_outputs(walk.plan.random)
    path_of = {call.key: call.path for node in walk.plan.program.nodes for call in node.stack}
    made: Counter[str] = Counter()
    calls: dict[str, tuple[int, Node]] = {}
    for key, path in path_of.items():
        index = made[path]
        made[path] += 1
        output = outputs[path].outputs[index]
        if walk.plan.random(output) and first_moments(walk, output) is not None:
            calls[key] = index, output
    return calls


def op_name(node: Node) -> str:
    """The operation without its namespace and overload."""
    packet = node.packet
    return str(packet).split(".")[-1] if packet else getattr(node.target, "__name__", str(node.target))


def first_moments(walk: Walk, node: Node) -> Moments | None:
    """The moments of a node's (first) result."""
    value = walk.value(node)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, Moments) else None


def moments_of(walk: Walk, node: Node) -> Moments:
    """The same of a node that is known to have some."""
    moments = first_moments(walk, node)
    assert moments is not None
    return moments


def bend_at(walk: Walk, place: Place) -> tuple[Bend, Node] | None:
    """The flat parts of the activation that makes a place's result, and its argument."""
    rule, node = walk.plan.rules.get(place.output), place.output
    bend = rule.bend(*node.args[1:], **node.kwargs) if rule is not None and place.leaf else None
    if bend is None:
        return None
    argument = node.args[0]
    return (bend, argument) if isinstance(argument, Node) and walk.plan.random(argument) else None
