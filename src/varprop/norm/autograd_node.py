"""The folded weights of all layers as results of one autograd node, with the way back derived by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .attached import keeps_graph
from .backends import Gradients
from .layout import Pair
from .memory import by_parameter, forms_of, forms_with, joined, joined_grads, parted
from .native import Kept
from .recording import Recording, Results, handed_out

if TYPE_CHECKING:
    from .executor import Executor

STALE = (
    "A parameter of a normalized layer was changed in place between the forward and the backward pass; "
    "its gradient can no longer be computed."
)
GONE = "Derivatives of derivatives go through the layers of a normalized model, which no longer exists; keep it."


def fold_forward(executor: Executor, dtype: torch.dtype, given: Pair | None, parameters: Any) -> Any:
    """Folded weights and biases, flat, and what the backward needs: first shifts and scales of all layers, two rows."""
    count = len(parameters) // 3
    weights = list(parameters[:count])
    shift_scale = joined(parameters[count:]).to(working(weights[0])).view(2, -1)
    weight, bias, kept = executor.backend(weights).forward(weights, shift_scale, given, dtype)
    return weight, bias, [shift_scale, *kept]


@torch.no_grad()
def fold_backward(executor: Executor, kept: Any, grad_weight: Tensor, grad_bias: Tensor, weights: Any) -> Gradients:
    """Derivatives by weights, by scales and shifts (flat), and by given moments."""
    weights = list(weights)
    shift_scale, *others = kept
    return executor.backend(weights).backward(weights, shift_scale.view(2, -1), others, grad_weight, grad_bias)


def working(weight: Tensor) -> torch.dtype:
    """The dtype of a weight's statistics."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class Pass(NamedTuple):
    """What a fold has to know besides the parameters."""

    executor: Executor
    together: Callable[[], Any]  # what knows the layers, as long as their model lives
    dtype: torch.dtype
    versions: list[int]  # of the parameters
    recording: Recording | None  # to be replayed


class Fold(torch.autograd.Function):
    """Keeps nothing by `save_for_backward`: what it keeps are the parameters, whose versions it checks itself.

    So it can be run backwards again, and looks the same to a gradient checkpoint whether it ran there or before.
    """

    @staticmethod
    def forward(ctx: Any, call: Pass, mean: Any, var: Any, *parameters: Tensor) -> Any:
        """Folded weights of all layers, then their biases."""
        ctx.executor, ctx.together, _, ctx.versions, ctx.recording = call
        ctx.parameters, ctx.is_over = parameters, False
        if ctx.recording is not None:
            ctx.set_materialize_grads(False)  # which are missing is to be seen
            return tuple(handed_out(ctx.recording.folded().parts))
        given = None if mean is None else (mean, var)
        parts, ctx.kept = fold_parts(call.executor, call.dtype, given, parameters)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Derivatives by the given moments and the parameters."""
        if [p._version for p in ctx.parameters] != ctx.versions:
            raise RuntimeError(STALE)
        if ctx.recording is not None:
            whole = all([grad is not None for grad in grads])
            ctx.is_over = whole and not keeps_graph()
            grads = grads if whole else _with_zeros(grads, ctx.recording.there.parts)
        if torch.is_grad_enabled():  # a derivative of this derivative will be wanted
            return _differentiable_backward(ctx, grads)
        found = zip(_derivatives(ctx, grads), ctx.needs_input_grad[1:], strict=True)
        return None, *[result if needed else None for result, needed in found]


def _with_zeros(grads: Sequence[Tensor | None], parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The derivatives by all parts, 0 where one is missing."""
    return tuple(torch.zeros_like(p) if grad is None else grad for grad, p in zip(grads, parts, strict=True))


def _derivatives(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor]:
    executor, parameters, recording = ctx.executor, ctx.parameters, ctx.recording
    if recording is None:
        return unfold_parts(executor, ctx.kept, grads, parameters)
    replayed = executor.replayed_back(recording, grads, parameters[: executor.count])
    if replayed is None:
        return unfold_parts(executor, recording.kept, grads, parameters)
    return handed_out(replayed.parts)


# `Function.apply` without what it does for torch.func, whose transforms never meet this node, argument by argument
apply_fold: Any = super(torch.autograd.Function, Fold).apply


def fold_parts(executor: Executor, dtype: torch.dtype, given: Pair | None, parameters: Any) -> tuple[list[Tensor], Any]:
    """Folded weights and biases, layer by layer, and what the backward needs."""
    native = executor.native(parameters)
    if native is not None:
        return native.fold(parameters, given, dtype)
    weight, bias, kept = fold_forward(executor, dtype, given, parameters)
    return parted(weight, bias, forms_of(parameters)), kept


def unfold_parts(executor: Executor, kept: Any, grads: Sequence[Tensor], parameters: Any) -> list[Tensor]:
    """Derivatives by given moments and by parameters, from those by the parts."""
    if isinstance(kept, Kept):
        return kept.backend.unfold(parameters, kept, grads)
    weights = parameters[: executor.count]
    return by_parameter(unfold_flat(executor, kept, grads, weights), forms_of(parameters))


def fold_flat(executor: Executor, dtype: torch.dtype, given: Pair | None, parameters: Any) -> list[Tensor]:
    """Folded weights and biases and all that is kept, each in a flat buffer of its own."""
    weight, bias, kept = fold_forward(executor, dtype, given, parameters)
    return _apart([weight, bias, *(part.flatten() for part in kept)])


def _apart(results: list[Tensor]) -> list[Tensor]:
    """Copies of those results that share memory with an earlier one."""
    seen: set[int] = set()
    found = []
    for result in results:
        place = result.untyped_storage().data_ptr()
        found.append(result.clone() if place in seen else result)
        seen.add(place)
    return found


def fold_to_record(executor: Executor, dtype: torch.dtype, parameters: Any) -> Results:
    """The fold in both forms."""
    flat = fold_flat(executor, dtype, None, parameters)
    return flat, parted(flat[0], flat[1], forms_of(parameters))


def unfold_flat(executor: Executor, kept: Any, grads: Sequence[Tensor], weights: Any) -> list[Tensor]:
    """Derivatives by weights, by scales and shifts, and by given moments, each in a flat buffer of its own."""
    sizes = executor.layout.weight_count, executor.layout.row_count
    grad_weight, grad_bias = joined_grads(grads, weights).split_with_sizes(sizes)
    return _apart(list(fold_backward(executor, kept, grad_weight, grad_bias, weights)))


def unfold_to_record(executor: Executor, weights: Any, kept: Any, grad_weight: Tensor, grad_bias: Tensor) -> Results:
    """The way back in both forms."""
    flat = _apart(list(fold_backward(executor, kept, grad_weight, grad_bias, weights)))
    return flat, by_parameter(flat, forms_with(weights, 2 * [rows.outputs for rows in executor.layout.rows]))


def _differentiable_backward(ctx: Any, grads: Sequence[Tensor]) -> Any:
    """The same by autograd through the layers' own formulas, which can be differentiated again."""
    together = ctx.together()
    if together is None:
        raise RuntimeError(GONE)
    folded = [layer.folded() for layer in together.layers]
    outputs = [weight for weight, _ in folded] + [bias for _, bias in folded]
    matching = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    wanted = [p for p in ctx.parameters if p.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, matching, create_graph=True, allow_unused=True))
    return None, None, None, *(next(found) if p.requires_grad else None for p in ctx.parameters)
