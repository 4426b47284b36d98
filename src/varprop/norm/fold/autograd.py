"""The folded weights of all layers as results of one autograd node, with its backward derived by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...gaussian.normal import Pair
from . import reference
from .cuda_replay import Recording, handed_out
from .dispatch import Executor
from .layout import Layout, layouts_of, split_folded, split_gradients

STALE = (
    "A parameter of a normalized layer was changed in place between the forward and the backward pass; "
    "its gradient can no longer be computed."
)

FREED = (
    "The memory of a parameter of a normalized layer was freed (offloaded, or sharded and not gathered): "
    "bring it back before the model runs."
)


def fold_parts(executor: Executor, dtype: torch.dtype, external: Pair | None, parameters: list[Tensor]) -> list[Tensor]:
    """Folded weights of all layers, then their biases."""
    recording = None if external else executor.recording(dtype, parameters)
    return list(_apply(executor, dtype, recording, *(external or (None, None)), *parameters))


class Fold(torch.autograd.Function):
    """The fold as one node of autograd.

    It saves nothing by `save_for_backward`, but holds the parameters and checks their versions itself. So it can be run
    backwards again, and looks the same to a gradient checkpoint whether it ran within it or before.
    """

    @staticmethod
    def forward(ctx: Any, executor: Executor, dtype: torch.dtype, recording: Recording | None, *inputs: Any) -> Any:
        """Folded weights of all layers, then their biases."""
        mean, var, *parameters = inputs
        ctx.executor, ctx.recording, ctx.inputs = executor, recording, inputs
        ctx.versions = _versions(parameters)
        if recording is not None:
            return tuple(recording.folded())
        external, ctx.layouts = None if mean is None else (mean, var), layouts_of(parameters)
        weight, bias, ctx.saved = executor.forward(dtype, external, parameters, any(ctx.needs_input_grad))
        return tuple(split_folded(weight, bias, ctx.layouts))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Derivatives by the external moments and by the parameters."""
        parameters = ctx.inputs[2:]
        if _versions(parameters) != ctx.versions:
            raise RuntimeError(STALE)
        if torch.is_grad_enabled() or any(map(_is_batched, grads)):
            return None, None, None, *_backward_by_reference(ctx.executor.layout, ctx.inputs, grads)
        results = zip(_derivatives(ctx, grads, parameters), ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *[result if needed else None for result, needed in results]


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    """The versions of parameters; raises if the memory of one was freed, which torch itself would read."""
    if not all(map(Tensor.data_ptr, parameters)) and any(p.numel() and not p.data_ptr() for p in parameters):
        raise RuntimeError(FREED)
    return [p._version for p in parameters]


# `Function.apply` without what it does for torch.func, whose transforms never meet this node, argument by argument
_apply: Any = super(torch.autograd.Function, Fold).apply


def _derivatives(ctx: Any, grads: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    executor, recording = ctx.executor, ctx.recording
    weights = parameters[: executor.count]
    replayed = executor.replayed_backward(recording, grads, weights)
    if replayed is not None:
        return handed_out(replayed.views)
    saved, layouts = (ctx.saved, ctx.layouts) if recording is None else (recording.saved, layouts_of(parameters))
    return split_gradients(executor.backward_flat(saved, grads, weights), layouts)


def _is_batched(grad: Tensor) -> bool:
    """True if a tensor stands for a batch of them, as in `torch.autograd.grad(..., is_grads_batched=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad)


def _backward_by_reference(layout: Layout, inputs: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Derivatives by autograd through the reference, which can be differentiated again and takes any tensors."""
    again = torch.is_grad_enabled()  # a derivative of this derivative will be wanted
    with torch.enable_grad():
        # views, so that external moments count as inputs, however they depend on the parameters
        inputs = [t if t is None else t.view_as(t) for t in inputs]
        outputs = reference_parts(layout, None if inputs[0] is None else (inputs[0], inputs[1]), inputs[2:])
    matching = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    results = iter(torch.autograd.grad(outputs, wanted, matching, create_graph=again, allow_unused=True))
    return [next(results) if t is not None and t.requires_grad else None for t in inputs]


def reference_parts(layout: Layout, external: Pair | None, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Folded weights of all layers, then their biases, by the reference.

    Args:
        layout: The network, or a layout restricted to some of its layers.
        external: Mean and variance of the external channels, if there are any.
        parameters: The weights of these layers, then the shifts and then the scales of all layers of the network.
    """
    weights = len(layout.rows)
    shifts_end = (weights + len(parameters)) // 2
    vectors = parameters[weights:shifts_end], parameters[shifts_end:]
    folded, biases = reference.fold(layout, parameters[:weights], *vectors, external)
    return [*folded, *biases]


def own_saved_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context within which tensors that autograd saves are hidden from hooks of callers.

    A gradient checkpoint counts what is saved within it, and must find the same number when it computes again. A fold
    may run before it the first time and within it the second.
    """
    if torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(STALE)
    return tensor
