"""Which graph nodes are the outputs of which module calls."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .node import Node

aten = torch.ops.aten


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

    modules = [(path, module) for path, module in model.named_modules() if path]
    modules = [(path, module) for path, module in modules if not isinstance(module, torch.jit.ScriptModule)]
    for path, module in modules:
        module.forward = marking(path, module.forward)
    yield marked


@dataclass
class ModuleCalls:
    """A module's class, and the node of its (first) output for every call."""

    class_name: str
    outputs: list[Node] = field(default_factory=list)


def module_outputs(
    nodes: list[Node], results: list[Any], marked: dict[str, list[Node]], random: Callable[[Node], bool]
) -> dict[str, ModuleCalls]:
    """The output of every call of every module, by path, in the order of execution.

    Args:
        nodes: All operations of a program.
        results: What the program returns.
        marked: The outputs of calls that returned several tensors, by the key of the call.
        random: Tells whether a node is random: of several outputs the first that is random counts.
    """
    inside: dict[str, list[Node]] = {}
    about: dict[str, tuple[str, str]] = {}
    for node in nodes:
        for call in node.stack:
            inside.setdefault(call.key, []).append(node)
            about[call.key] = call.path, call.class_name.rpartition(".")[2]
    finals = {result for result in results if isinstance(result, Node)}
    calls: dict[str, ModuleCalls] = {}
    for key, own in inside.items():
        path, class_name = about[key]
        several = marked.get(key) or ([result for result in results if isinstance(result, Node)] if not path else [])
        output = next(filter(random, several), several[0]) if several else _last_read(own, finals)
        calls.setdefault(path, ModuleCalls(class_name)).outputs.append(output)
    return calls


def _last_read(nodes: list[Node], finals: set[Node]) -> Node:
    """The last node of a call that others read; of several results of one operation the first."""
    inner = set(nodes)
    leaving = [node for node in nodes if node in finals or any(user not in inner for user in node.users)]
    leaving = leaving or nodes[-1:]
    siblings = all(node.args and node.args[0] is leaving[0].args[0] for node in leaving if leaving[0].args)
    return leaving[0] if siblings else leaving[-1]
