"""A captured model: its operations, where its inputs come from, and which nodes are the outputs of which modules."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .node import Call, Node, resolve
from .tracing import Leaf

aten = torch.ops.aten
Fact = TypeVar("Fact")


@dataclass
class ModuleCalls:
    """A module's class, and the node of its (first) output for every call."""

    class_name: str
    outputs: list[Node] = field(default_factory=list)


def _last_read(nodes: list[Node], finals: set[Node]) -> Node:
    """The last node of a call that others read; of several results of one operation the first."""
    inner = set(nodes)
    leaving = [node for node in nodes if node in finals or any(user not in inner for user in node.users)]
    leaving = leaving or nodes[-1:]
    siblings = all(node.args and node.args[0] is leaving[0].args[0] for node in leaving if leaving[0].args)
    return leaving[0] if siblings else leaving[-1]


@dataclass
class Program:
    """A captured model: its operations in order, and where each of its inputs comes from.

    Parameters and buffers are read from the live model at every use, so one capture serves as they change.

    Attributes:
        model: The module it was captured from.
        nodes: Every operation, in the order of execution.
        inputs: The user's tensor inputs.
        state: Parameters and buffers, by their dotted name.
        constants: Values fixed at capture.
        outputs: What the model returns, flattened: nodes or plain values.
        output_spec: The structure of what it returns.
        names: What the inputs are called, in their order: an argument, or a place inside one.
        several: The outputs, in their order, of every call of a module that returned several, by the key of the call.
        idle: The paths of modules that call a dropout which is not at work, as those of torch are in evaluation.

    Example:
        >>> program = vp.capture(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (1, 8))
        >>> [str(node.target) for node in program.nodes]
        ['aten.linear.default', 'aten.relu.default']
    """

    model: nn.Module
    nodes: list[Node]
    inputs: list[Node]
    state: dict[Node, str]
    constants: dict[Node, Any]
    outputs: list[Any]
    output_spec: Any
    facts: dict[Any, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    several: dict[str, list[Node]] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)

    def module_outputs(self, random: Callable[[Node], bool]) -> dict[str, ModuleCalls]:
        """The output of every call of every module, by path; of several outputs the first that is random."""
        inside: dict[str, list[Node]] = {}
        about: dict[str, Call] = {}
        for node in self.nodes:
            for call in node.stack:
                inside.setdefault(call.key, []).append(node)
                about[call.key] = call
        results = [output for output in self.outputs if isinstance(output, Node)]
        calls: dict[str, ModuleCalls] = {}
        for key, inner in inside.items():
            path, class_name = about[key].path, about[key].class_name.rpartition(".")[2]
            several = self.several.get(key) or (results if not path else [])
            output = next(filter(random, several), several[0]) if several else _last_read(inner, set(results))
            calls.setdefault(path, ModuleCalls(class_name)).outputs.append(output)
        return calls

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without facts, which follow from the graph; rules, among them, cannot be pickled."""
        return {**vars(self), "facts": {}}

    def once(self, key: Any, make: Callable[[], Fact]) -> Fact:
        """A fact that follows from the graph alone, worked out at the first asking."""
        if key not in self.facts:
            self.facts[key] = make()
        return self.facts[key]  # type: ignore[no-any-return]

    def module_of(self, node: Node) -> nn.Module | None:
        """The innermost module that a node was made in; None if the model has none of that path."""
        try:
            return self.model.get_submodule(node.module)
        except AttributeError:
            return None

    def tensors(self) -> dict[Node, Any]:
        """The current value of every parameter, buffer and constant."""
        return {node: tensor_at(self.model, name) for node, name in self.state.items()} | self.constants


def tensor_at(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by its dotted name."""
    tensor: Tensor = functools.reduce(getattr, name.split("."), model)  # type: ignore[assignment]
    return tensor


def transferred(
    program: Program,
    model: nn.Module,
    bypassed: Mapping[Node, Node] | None = None,
    replaced: Mapping[Node, tuple[Any, tuple[Any, ...]]] | None = None,
) -> Program:
    """A copy of a program that reads the parameters of a copy of its model, or of the model itself.

    Operations that are `bypassed` are left out, each for an earlier node whose value takes the place of its result;
    those that are `replaced` give way to another operation with its arguments.
    """
    bypassed, replaced = bypassed or {}, replaced or {}
    copies: dict[Node, Node] = {}
    for node in (*program.inputs, *program.state, *program.constants, *program.nodes):
        if node in bypassed:
            copies[node] = copies[bypassed[node]]
        else:
            copies[node] = _copied(node, copies, model, *replaced.get(node, ()))
    return replace(
        program,
        model=model,
        nodes=[copies[node] for node in program.nodes if node not in bypassed],
        inputs=[copies[node] for node in program.inputs],
        state={copies[node]: name for node, name in program.state.items() if copies[node].users},
        constants={copies[node]: value for node, value in program.constants.items()},
        outputs=resolve(program.outputs, copies.__getitem__),
        several=resolve(program.several, copies.__getitem__),
        facts={},
    )


def _copied(node: Node, copies: dict[Node, Node], model: nn.Module, target: Any = None, args: Any = ()) -> Node:
    arguments, kwargs = resolve((node.args, node.kwargs) if target is None else (args, {}), copies.__getitem__)
    target = target or node.target
    if isinstance(target, Leaf):
        module = model.get_submodule(target.path)
        target = replace(target, module=module, forward=module.forward)
    return Node(node.name, target, arguments, kwargs, node.info, node.stack, node.line)


@contextlib.contextmanager
def outputs_marked(model: nn.Module) -> Iterator[set[str]]:
    """Within, each of several tensors that a submodule returns goes through an ``alias``, which tells their order.

    Yields the paths of the submodules that returned several. `forward` is replaced rather than hooked: some modules
    take another way through torch where there are hooks. Whoever captures puts the attributes of modules back.
    """
    marked: set[str] = set()
    capturing = threading.get_ident()

    def marking(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if isinstance(output, Tensor) or threading.get_ident() != capturing:
                return output
            leaves, structure = pytree.tree_flatten(output)
            if sum(isinstance(leaf, Tensor) for leaf in leaves) < 2:
                return output
            marked.add(path)
            leaves = [aten.alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return pytree.tree_unflatten(leaves, structure)

        return run

    for path, module in list(model.named_modules()):
        if path and not isinstance(module, torch.jit.ScriptModule):
            module.forward = marking(path, module.forward)
    yield marked
