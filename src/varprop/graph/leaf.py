"""Modules kept whole: one graph node for a module class that has a rule of its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

# While tracing, a call of such a module ends in this marker; its inner operations are dropped afterwards.
_library = torch.library.Library("varprop", "DEF")
_library.define("leaf(Tensor[] inputs, Tensor[] outputs, int index) -> Tensor[]")


def _copy(inputs: list[Tensor], outputs: list[Tensor], index: int) -> list[Tensor]:
    return [output.clone() for output in outputs]


_library.impl("leaf", _copy, "CompositeExplicitAutograd")


@dataclass(eq=False)
class Leaf:
    """One call of a module kept whole; calling it runs the module and returns its outputs as a flat list."""

    module: nn.Module
    path: str
    arguments: Any  # the tree of (args, kwargs), tensors replaced by their position
    forward: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """The class of the module, as reports show it."""
        return f"{type(self.module).__name__}"

    def fill(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The module's arguments with `values` in the places of its tensors."""
        args, kwargs = pytree.tree_map(
            lambda leaf: values[leaf.index] if isinstance(leaf, _Slot) else leaf, self.arguments
        )
        return args, kwargs

    def __call__(self, *values: Any) -> list[Any]:
        """Run the module on plain tensors."""
        args, kwargs = self.fill(values)
        return pytree.tree_leaves(self.forward(*args, **kwargs))


@dataclass(frozen=True)
class _Slot:
    index: int


@contextlib.contextmanager
def keep_whole(
    model: nn.Module, classes: tuple[type[nn.Module], ...], inputs: tuple[Any, Any], leaves: list[Leaf]
) -> Iterator[None]:
    """Within, every call of a module of `classes` leaves a marker in the trace and an entry in `leaves`.

    The module itself is not traced (it may hold what cannot be): one real run tells the form of its outputs.
    """
    patched = {path: module for path, module in model.named_modules() if isinstance(module, classes)}
    forms = _output_forms(model, patched, inputs) if patched else {}
    for path, module in patched.items():
        module.forward = _marked(module, path, forms[path], leaves)
    try:
        yield
    finally:
        for module in patched.values():
            del module.forward


def _output_forms(model: nn.Module, modules: dict[str, nn.Module], inputs: tuple[Any, Any]) -> dict[str, list[Any]]:
    forms: dict[str, list[Any]] = {path: [] for path in modules}

    def recorder(path: str) -> Callable[..., None]:
        return lambda _module, _args, output: forms[path].append(
            pytree.tree_map_only(Tensor, lambda t: t.to("meta"), output)
        )

    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad(), contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(module.register_forward_hook(recorder(path)))
        model(*inputs[0], **inputs[1])
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return forms


def _marked(module: nn.Module, path: str, forms: list[Any], leaves: list[Leaf]) -> Callable[..., Any]:
    forward = module.forward
    turn = itertools.cycle(forms)  # export may trace more than once

    def marked(*args: Any, **kwargs: Any) -> Any:
        tensors: list[Tensor] = []

        def slot(tensor: Tensor) -> _Slot:
            tensors.append(tensor)
            return _Slot(len(tensors) - 1)

        leaves.append(Leaf(module, path, pytree.tree_map_only(Tensor, slot, (args, kwargs)), forward))
        forms_now, structure = pytree.tree_flatten(next(turn))
        outputs = [torch.empty(form.shape, dtype=form.dtype, device=tensors[0].device) for form in forms_now]
        return pytree.tree_unflatten(torch.ops.varprop.leaf(tensors, outputs, len(leaves) - 1), structure)

    return marked


def restore_leaves(graph: fx.Graph, leaves: list[Leaf]) -> None:
    """Replace every marker by a node that calls the module, and drop the operations it was traced into."""
    for node in list(graph.nodes):
        if node.target is torch.ops.varprop.leaf.default:
            inputs, _, index = node.args
            with graph.inserting_before(node):
                call = graph.call_function(leaves[index], tuple(inputs))
            call.meta.update(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    if leaves:
        graph.eliminate_dead_code()
