"""A training step of many networks as one flat graph of operations, without Python in between."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx

from .horizontal_fusion import fused, unfused

Flat = Callable[..., list[Tensor]]
_WORTHWHILE = 0.8  # of the operations may be left, or stacking them is not worth its copies


def flat_step(function: Flat, arguments: list[Tensor], samples: int, batch_extents: set[int]) -> Flat:
    """The function as a graph of ATen operations, equal ones stacked.

    Args:
        function: Takes tensors and returns tensors; may change copies of its arguments, but not these.
        arguments: Tensors of the shapes it will be called with; the graph is good for no others.
        samples: How many of the last arguments hold samples.
        batch_extents: Extents that tell which tensors have an entry for every sample.
    """
    with _without_collection():
        return _flat_step(function, arguments, samples, batch_extents)


def _flat_step(function: Flat, arguments: list[Tensor], samples: int, batch_extents: set[int]) -> Flat:
    plain = _without_mutation(function, arguments)
    placeholders = [node for node in plain.graph.nodes if node.op == "placeholder"]
    whole = _reduced(_graph_of(unfused(plain.graph), arguments))
    if any("batch_norm" in str(node.target) for node in plain.graph.nodes):
        return torch.no_grad()(whole)  # it changes running statistics unseen: the order has to stay
    stacked = _reduced(_graph_of(fused(plain.graph, placeholders[-samples:], batch_extents), arguments))
    fewer = len(stacked.graph.nodes) <= _WORTHWHILE * len(whole.graph.nodes)
    return torch.no_grad()(stacked if fewer else whole)


def _without_mutation(function: Flat, arguments: list[Tensor]) -> fx.GraphModule:
    # In two passes: torch cannot yet do it while a function with a derivative of its own is being differentiated.
    found = _graph_of(function, arguments)
    if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in found.graph.nodes):
        found = _graph_of(torch.func.functionalize(found), arguments)
    return _reduced(found)


def _graph_of(function: Callable[..., Any], arguments: list[Tensor]) -> fx.GraphModule:
    with torch.no_grad(), _without_notes():
        return make_fx(lambda *tensors: function(*tensors))(*arguments)


def _reduced(found: fx.GraphModule) -> fx.GraphModule:
    found.graph.eliminate_dead_code()
    return fx.GraphModule(found, fx_graph_cse(found.graph))


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        yield


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
