"""A training step of many networks as one flat graph of operations, without Python in between."""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

Flat = Callable[..., list[Tensor]]


def flat_step(function: Flat, arguments: list[Tensor]) -> Flat:
    """The function as a graph of ATen operations for tensors of these shapes; what depends on none is computed here.

    The function may change copies of its arguments, but not these.
    """
    with _without_collection():
        return torch.no_grad()(_reduced(_with_constants(_without_mutation(function, arguments))))


def _without_mutation(function: Flat, arguments: list[Tensor]) -> fx.GraphModule:
    # In two passes: torch cannot yet do it while a function with a derivative of its own is being differentiated.
    found = _graph_of(function, arguments)
    if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in found.graph.nodes):
        found = _graph_of(torch.func.functionalize(found), arguments)
    return _reduced(found)


def _graph_of(function: Callable[..., Any], arguments: list[Tensor]) -> fx.GraphModule:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        return make_fx(lambda *tensors: function(*tensors))(*arguments)


def _reduced(found: fx.GraphModule) -> fx.GraphModule:
    found.graph.eliminate_dead_code()
    return fx.GraphModule(found, fx_graph_cse(found.graph))


def _with_constants(found: fx.GraphModule) -> fx.GraphModule:
    """Tensors that depend on no argument become attributes, in place."""
    for index, (node, value) in enumerate(_constants(found).items()):
        if node.op == "call_function" and isinstance(value, Tensor):
            found.register_buffer(f"_constant{index}", value)
            with found.graph.inserting_before(node):
                node.replace_all_uses_with(found.graph.get_attr(f"_constant{index}"))
    return found


def _constants(found: fx.GraphModule) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    for node in found.graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(found)
        elif node.op == "call_function" and not random and all(x in values for x in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return values


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Tracing makes millions of small objects and frees few: searching them for garbage takes a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
