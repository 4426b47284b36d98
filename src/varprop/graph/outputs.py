"""Which graph nodes are the outputs of which module calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from .capture import Program
from .node import Node


@dataclass
class ModuleCalls:
    """A module's class, and the node of its (first) output for every call."""

    class_name: str
    outputs: list[Node] = field(default_factory=list)


def module_outputs(program: Program) -> dict[str, ModuleCalls]:
    """The output of every call of every module, by path, in the order of execution."""
    inside: dict[str, list[Node]] = {}
    about: dict[str, tuple[str, str]] = {}
    for node in program.nodes:
        for call in node.stack:
            inside.setdefault(call.key, []).append(node)
            about[call.key] = call.path, call.class_name.rpartition(".")[2]
    calls: dict[str, ModuleCalls] = {}
    for key, nodes in inside.items():
        path, class_name = about[key]
        calls.setdefault(path, ModuleCalls(class_name)).outputs.append(_output(nodes, program))
    return calls


def _output(nodes: list[Node], program: Program) -> Node:
    """The node others read; of several outputs of one operation the first, otherwise the last."""
    own, finals = set(nodes), {out for out in program.outputs if isinstance(out, Node)}
    leaving = [node for node in nodes if node in finals or any(user not in own for user in node.users)]
    leaving = leaving or nodes[-1:]
    siblings = all(node.args and node.args[0] is leaving[0].args[0] for node in leaving if leaving[0].args)
    return leaving[0] if siblings else leaving[-1]
