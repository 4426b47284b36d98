"""The fold as one custom operation in the graphs of torch.compile: nothing to trace, no graph break.

Inductor prefers channels_last for all that a convolution depends on, weights included, and would copy them there and,
for this operation, back again at every step. It leaves alone what is read by `as_strided`: so each weight of another
memory layout is passed with an anchor, a view of its first element, which is used for nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...gaussian.normal import Pair
from .cuda_replay import handed_out
from .dispatch import executor_known_as, layouts_with, saved_sizes, split_gradients, split_parts, statistics_dtype

# not `custom_op`, which at each call compares every result with every input
_library = torch.library.Library("varprop", "FRAGMENT")


def compiled_fold(number: int, dtype: torch.dtype, external: Pair | None, parameters: list[Tensor]) -> list[Tensor]:
    """Folded weights of all layers, then their biases, by the executor of the layout with a number."""
    _allow_instance_of_function()
    apply: Any = _CompiledFold.apply
    return list(apply(number, dtype, *(external or (None, None)), *_distinct(parameters)))


def _allow_instance_of_function() -> None:
    """Ignore a warning that Dynamo causes for every autograd function; it would stop ``python -W error``."""
    message = r"<class 'torch\.autograd\.function\.Function'> should not be instantiated"
    warnings.filterwarnings("ignore", message, DeprecationWarning)


# as torch.compiler.assume_constant_result: it runs while a graph is made, and leaves no trace in it
_allow_instance_of_function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _distinct(parameters: list[Tensor]) -> list[Tensor]:
    """The parameters, those that come again (tied weights) as views, which Dynamo asks for."""
    seen: set[Tensor] = set()
    result = []
    for parameter in parameters:
        result.append(parameter.view_as(parameter) if parameter in seen else parameter)
        seen.add(parameter)
    return result


class _CompiledFold(torch.autograd.Function):
    """The fold with its backward from the derivatives by all results, which autograd would first copy into one tensor.

    The backward must not ask for the strides of a tensor: then Dynamo would give it contiguous copies of all of them.
    """

    @staticmethod
    def forward(ctx: Any, number: int, dtype: torch.dtype, mean: Any, var: Any, *parameters: Tensor) -> Any:
        external = [] if mean is None else [mean, var]
        weights = parameters[: len(parameters) // 3]
        ctx.number, ctx.anchored = number, _to_anchor(weights)
        ctx.layouts = layouts_with(weights, [vector.numel() for vector in parameters[len(weights) :]])
        anchors = _anchors(weights, ctx.anchored)
        weight, bias, *saved = torch.ops.varprop.fold(list(parameters), anchors, external, number, dtype)
        ctx.save_for_backward(*weights, *saved)
        return tuple(split_parts(weight, bias, ctx.layouts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        tensors, count = ctx.saved_tensors, len(ctx.layouts.weights)
        weights, saved = list(tensors[:count]), list(tensors[count:])
        anchors = _anchors(weights, ctx.anchored)
        gradients = torch.ops.varprop.fold_backward(list(grads), saved, weights, anchors, ctx.number)
        return None, None, *split_gradients(gradients, ctx.layouts)


def _to_anchor(weights: Sequence[Tensor]) -> list[int]:
    """The weights that Inductor would copy: convolution kernels that are not channels_last."""
    preferred = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = [(n, weight) for n, weight in enumerate(weights) if weight.ndim in preferred]
    return [n for n, weight in kernels if not weight.is_contiguous(memory_format=preferred[weight.ndim])]


def _anchors(weights: Sequence[Tensor], chosen: list[int]) -> list[Tensor]:
    return [weights[n].detach().as_strided((1,), (1,)) for n in chosen]


def _define(schema: str, work: Callable[..., list[Tensor]], fake: Callable[..., list[Tensor]]) -> None:
    """Define an operation and its fake kernel; none of its results may share memory with another tensor."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"varprop::{name}", fake, lib=_library)


def _fold(
    parameters: list[Tensor], _anchors: list[Tensor], external: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    executor = executor_known_as(number, parameters[0])
    recording = None if external else executor.recording(dtype, parameters, compiled=True)
    if recording is not None:
        return recording.folded(flat=True)
    return executor.forward_flat(dtype, (external[0], external[1]) if external else None, parameters)


def _fold_fake(
    parameters: list[Tensor], _anchors: list[Tensor], _external: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    layout, like = executor_known_as(number).layout, parameters[0]
    saved = saved_sizes(layout, parameters[: len(parameters) // 3], statistics_dtype(like))
    results = [(layout.weight_count, dtype), (layout.row_count, dtype), *saved]
    return [like.new_empty(size, dtype=kind) for size, kind in results]


def _fold_backward(
    grads: list[Tensor], saved: list[Tensor], weights: list[Tensor], _anchors: list[Tensor], number: int
) -> list[Tensor]:
    executor = executor_known_as(number, weights[0])
    recording = executor.recorders[True].recording_with(saved)
    replayed = executor.replayed_backward(recording, grads, weights, compiled=True)
    if replayed is None:
        return executor.backward_flat(saved, grads, weights)
    return handed_out(replayed.flat)


def _fold_backward_fake(
    _grads: list[Tensor], _saved: list[Tensor], weights: list[Tensor], _anchors: list[Tensor], number: int
) -> list[Tensor]:
    layout, like = executor_known_as(number).layout, weights[0]
    external = [like.new_empty(layout.channels.external, dtype=torch.float64) for _ in range(2)]
    by_source = like.new_empty(2, layout.row_count, dtype=statistics_dtype(like))
    return [like.new_empty(layout.weight_count), by_source, *external]


FOLD = "fold(Tensor[] parameters, Tensor[] anchors, Tensor[] external, int number, ScalarType dtype) -> Tensor[]"
BACKWARD = "fold_backward(Tensor[] grads, Tensor[] saved, Tensor[] weights, Tensor[] anchors, int number) -> Tensor[]"
_define(FOLD, _fold, _fold_fake)
_define(BACKWARD, _fold_backward, _fold_backward_fake)
