"""The fold as one operation of its own in torch.compile's graphs: nothing to trace, no graph break.

Inductor prefers channels_last for all that a convolution depends on, weights included, and would copy them there and,
for this operation, back again at every step. It leaves alone what is read by `as_strided`: so each weight in
another format comes with an anchor, a view of its first element, which is used for nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...gaussian.normal import Pair
from .cuda_replay import handed_out
from .dispatch import executor_known_as, saved_sizes, statistics_dtype
from .memory_format import by_parameter, formats_of, parted

# not `custom_op`, which at each call compares every result with every input
_library = torch.library.Library("varprop", "FRAGMENT")


def compiled_fold(number: int, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> list[Tensor]:
    """Folded weights by the executor known by a number, then biases."""
    _allow_instance_of_function()
    apply: Any = _CompiledFold.apply
    return list(apply(number, dtype, *(given or (None, None)), *_each_its_own(parameters)))


def _allow_instance_of_function() -> None:
    """Let Dynamo do, at each graph that it makes of an autograd function, what torch itself has deprecated.

    Where warnings are errors (``python -W error``), nothing with an autograd function could be compiled.
    """
    message = r"<class 'torch\.autograd\.function\.Function'> should not be instantiated"
    warnings.filterwarnings("ignore", message, DeprecationWarning)


# as torch.compiler.assume_constant_result: it runs while a graph is made, and leaves no trace in it
_allow_instance_of_function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _each_its_own(parameters: list[Tensor]) -> list[Tensor]:
    """The same tensors, and a view of each that comes again (tied weights), which Dynamo asks for."""
    seen: set[Tensor] = set()
    found = []
    for parameter in parameters:
        found.append(parameter.view_as(parameter) if parameter in seen else parameter)
        seen.add(parameter)
    return found


class _CompiledFold(torch.autograd.Function):
    """The fold with its backward from the derivatives of all parts, which autograd would first copy into one tensor.

    The backward must not ask for the strides of a tensor: then Dynamo would give it contiguous copies of all of them.
    """

    @staticmethod
    def forward(ctx: Any, number: int, dtype: torch.dtype, mean: Any, var: Any, *parameters: Tensor) -> Any:
        given = [] if mean is None else [mean, var]
        weights = parameters[: len(parameters) // 3]
        ctx.number, ctx.formats, ctx.anchored = number, formats_of(parameters), _to_anchor(weights)
        anchors = _anchors(weights, ctx.anchored)
        weight, bias, *kept = torch.ops.varprop.fold(list(parameters), anchors, given, number, dtype)
        ctx.save_for_backward(*weights, *kept)
        return tuple(parted(weight, bias, ctx.formats))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        saved, count = ctx.saved_tensors, len(ctx.formats.weights)
        weights, kept = list(saved[:count]), list(saved[count:])
        anchors = _anchors(weights, ctx.anchored)
        found = torch.ops.varprop.fold_backward(list(grads), kept, weights, anchors, ctx.number)
        return None, None, *by_parameter(found, ctx.formats)


def _to_anchor(weights: Sequence[Tensor]) -> list[int]:
    """The weights that Inductor would copy: kernels of two or three dimensions that do not lie as it prefers."""
    preferred = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = [(n, weight) for n, weight in enumerate(weights) if weight.ndim in preferred]
    return [n for n, weight in kernels if not weight.is_contiguous(memory_format=preferred[weight.ndim])]


def _anchors(weights: Sequence[Tensor], chosen: list[int]) -> list[Tensor]:
    return [weights[n].detach().as_strided((1,), (1,)) for n in chosen]


def _define(schema: str, work: Callable[..., list[Tensor]], form: Callable[..., list[Tensor]]) -> None:
    """An operation, what it does, and the form of its results, none of which may share memory with another tensor."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"varprop::{name}", form, lib=_library)


def _fold(
    parameters: list[Tensor], _anchors: list[Tensor], given: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    executor = executor_known_as(number, parameters[0])
    recording = None if given else executor.recording(dtype, parameters, compiled=True)
    if recording is not None:
        return recording.folded(flat=True)
    return executor.forward_flat(dtype, (given[0], given[1]) if given else None, parameters)


def _fold_form(
    parameters: list[Tensor], _anchors: list[Tensor], _given: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    layout, like = executor_known_as(number).layout, parameters[0]
    kept = saved_sizes(layout, parameters[: len(parameters) // 3], statistics_dtype(like))
    vectors = 2 * layout.row_count, statistics_dtype(like)
    results = [(layout.weight_count, dtype), (layout.row_count, dtype), vectors, *kept]
    return [like.new_empty(size, dtype=kind) for size, kind in results]


def _fold_backward(
    grads: list[Tensor], kept: list[Tensor], weights: list[Tensor], _anchors: list[Tensor], number: int
) -> list[Tensor]:
    executor = executor_known_as(number, weights[0])
    recording = executor.recorders[True].recording_with(kept)
    replayed = executor.replayed_backward(recording, grads, weights, compiled=True)
    if replayed is None:
        return executor.backward_flat(kept, grads, weights)
    return handed_out(replayed.flat)


def _fold_backward_form(
    _grads: list[Tensor], _kept: list[Tensor], weights: list[Tensor], _anchors: list[Tensor], number: int
) -> list[Tensor]:
    layout, like = executor_known_as(number).layout, weights[0]
    given = [like.new_empty(layout.lanes.given, dtype=torch.float64) for _ in range(2)]
    by_source = like.new_empty(2, layout.row_count, dtype=statistics_dtype(like))
    return [like.new_empty(layout.weight_count), by_source, *given]


_define(
    "fold(Tensor[] parameters, Tensor[] anchors, Tensor[] given, int number, ScalarType dtype) -> Tensor[]",
    _fold,
    _fold_form,
)
_define(
    "fold_backward(Tensor[] grads, Tensor[] kept, Tensor[] weights, Tensor[] anchors, int number) -> Tensor[]",
    _fold_backward,
    _fold_backward_form,
)
