"""A training step of many networks as one flat graph of operations, without Python in between."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from .merging import merge, unmerged

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
    whole = _reduced(_graph_of(unmerged(plain.graph), arguments))
    if any("batch_norm" in str(node.target) for node in plain.graph.nodes):
        return torch.no_grad()(whole)  # it changes running statistics unseen: the order has to stay
    stacked = _reduced(_graph_of(merge(plain.graph, placeholders[-samples:], batch_extents), arguments))
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


def with_plain_norms_(model: nn.Module, batch_norm: bool) -> nn.Module:
    """Let normalizations compute in ordinary operations, in place; parameters, buffers and function stay.

    torch's own weight norm would run network by network. Its batch norm is cuDNN's on a GPU, which is made for one
    network; on a CPU it is faster than ordinary operations.

    Args:
        model: Changed in place.
        batch_norm: Whether batch norms are replaced too.
    """
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for index, part in enumerate(module):
                if type(part).__name__ == "_WeightNorm":
                    module[index] = _PlainWeightNorm(int(part.dim))  # type: ignore[arg-type]
        if batch_norm and type(module) in _BATCH_NORMS and module.momentum is not None and module.track_running_stats:
            module.__class__ = _PlainBatchNorm
    return model


class _PlainBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over all axes but the second."""

    def forward(self, input: Tensor) -> Tensor:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None and self.momentum is not None
        if self.training:
            var, mean = torch.var_mean(input, axes, correction=0)
            count = input.numel() // input.shape[1]
            self._remember(mean.detach(), var.detach() * (count / max(count - 1, 1)), self.momentum)
        normalized = (input - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        return torch.addcmul(self.bias.view(shape), normalized, self.weight.view(shape)) if self.affine else normalized

    def _remember(self, mean: Tensor, var: Tensor, share: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        self.running_mean.lerp_(mean, share)
        self.running_var.lerp_(var, share)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _PlainWeightNorm(nn.Module):
    """w = g v / |v| in ordinary operations: torch's fused one would run network by network."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        axes = [axis for axis in range(direction.ndim) if axis != self.dim % direction.ndim]
        return direction * (length / direction.square().sum(axes, keepdim=True).sqrt())
