"""A captured program for another module of the same structure, so that a model need not be captured again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from .capture import Program
from .leaf import Leaf
from .node import Node, resolve


def transferred(
    program: Program,
    model: nn.Module,
    bypassed: Mapping[Node, Node] | None = None,
    replaced: Mapping[Node, tuple[Any, tuple[Any, ...]]] | None = None,
) -> Program:
    """The same operations on the parameters of another model.

    Args:
        program: A captured model.
        model: A copy of it, or the model itself.
        bypassed: Operations to leave out, each with the earlier node whose value takes the place of its result.
        replaced: Operations to replace, each by another with its arguments.
    """
    bypassed, replaced = bypassed or {}, replaced or {}
    made = {node: _copied(node, made={}, model=model) for node in (*program.inputs, *program.state, *program.constants)}
    for node in program.nodes:
        made[node] = made[bypassed[node]] if node in bypassed else _copied(node, made, model, *replaced.get(node, ()))
    return replace(
        program,
        model=model,
        nodes=[made[node] for node in program.nodes if node not in bypassed],
        inputs=[made[node] for node in program.inputs],
        state={made[node]: name for node, name in program.state.items() if made[node].users},
        constants={made[node]: value for node, value in program.constants.items()},
        outputs=resolve(program.outputs, made.__getitem__),
        several=resolve(program.several, made.__getitem__),
        facts={},
    )


def _copied(node: Node, made: dict[Node, Node], model: nn.Module, target: Any = None, args: Any = ()) -> Node:
    found, kwargs = resolve((node.args, node.kwargs) if target is None else (args, {}), made.__getitem__)
    return Node(node.name, _target(target or node.target, model), found, kwargs, node.form, node.stack, node.line)


def _target(target: Any, model: nn.Module) -> Any:
    if not isinstance(target, Leaf):
        return target
    module = model.get_submodule(target.path)
    return replace(target, module=module, forward=module.forward)
