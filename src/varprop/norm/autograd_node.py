"""The folded weights of all layers as results of one autograd node, with the way back derived by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .backends import Gradients
from .execution import capturing
from .layout import Layout, Pair
from .native import Kept
from .passes import flattened, in_memory_order

if TYPE_CHECKING:
    from .together import Together

STALE = (
    "A parameter of a normalized layer was changed in place between the forward and the backward pass; "
    "its gradient can no longer be computed."
)


def _split(parameters: Any) -> tuple[list[Tensor], Tensor]:
    """The weights, and the shifts and scales of all layers as two rows."""
    count = len(parameters) // 3
    weights = list(parameters[:count])
    return weights, torch.cat(parameters[count:]).to(working(weights[0])).view(2, -1)


def parted(weight: Tensor, bias: Tensor, parameters: Any, layout: Layout) -> list[Tensor]:
    """The folded weights of all layers and then their biases, from the flat buffers."""
    pieces = zip(weight.split_with_sizes([r.weights for r in layout.rows]), parameters, strict=False)
    biases = bias.split_with_sizes([r.outputs for r in layout.rows])
    return [in_memory_order(piece, w) for piece, w in pieces] + list(biases)


def fold_forward(together: Together, dtype: torch.dtype, given: Pair | None, parameters: Any) -> Any:
    """Folded weights and biases, flat, and what the backward needs."""
    weights, shift_scale = _split(parameters)
    return together.backend(weights).forward(weights, shift_scale, given, dtype)


@torch.no_grad()
def fold_backward(together: Together, kept: Any, grad_weight: Tensor, grad_bias: Tensor, parameters: Any) -> Gradients:
    """Derivatives by weights, by scales and shifts (flat), and by given moments."""
    weights, shift_scale = _split(parameters)
    return together.backend(weights).backward(weights, shift_scale, kept, grad_weight, grad_bias)


def working(weight: Tensor) -> torch.dtype:
    """The dtype of a weight's statistics."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class Fold(torch.autograd.Function):
    """Keeps nothing by `save_for_backward`: what it keeps are the parameters, whose versions it checks itself.

    So it can be run backwards again, and looks the same to a gradient checkpoint whether it ran there or before.
    """

    @staticmethod
    def forward(ctx: Any, together: Together, dtype: torch.dtype, mean: Any, var: Any, *parameters: Tensor) -> Any:
        """Folded weights of all layers, then their biases."""
        given = None if mean is None else (mean, var)
        ctx.together, ctx.parameters, ctx.versions = together, parameters, [p._version for p in parameters]
        ctx.recording = together.recording(dtype, parameters) if given is None else None
        if ctx.recording is not None:
            return tuple(ctx.recording.folded())
        parts, ctx.kept = fold_parts(together, dtype, given, parameters)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Derivatives by the given moments and the parameters."""
        if [p._version for p in ctx.parameters] != ctx.versions:
            raise RuntimeError(STALE)
        if torch.is_grad_enabled():  # a derivative of this derivative will be wanted
            return _differentiable_backward(ctx, grads)
        if ctx.recording is not None and not capturing(grads[0]):
            results = ctx.recording.derivatives(grads)
        else:
            kept = ctx.recording.kept if ctx.recording is not None else ctx.kept
            results = unfold_parts(ctx.together, kept, grads, ctx.parameters)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(r if need else None for r, need in zip(results, needed, strict=True))


def fold_parts(together: Together, dtype: torch.dtype, given: Pair | None, parameters: Any) -> tuple[list[Tensor], Any]:
    """Folded weights and biases, layer by layer, and what the backward needs."""
    native = together.native(parameters)
    if native is not None:
        return native.fold(parameters, given, dtype)
    weight, bias, kept = fold_forward(together, dtype, given, parameters)
    return parted(weight, bias, parameters, together.layout), kept


def unfold_parts(together: Together, kept: Any, grads: Sequence[Tensor], parameters: Any) -> list[Tensor]:
    """Derivatives by given moments and by parameters, from those by the parts."""
    if isinstance(kept, Kept):
        return kept.backend.unfold(parameters, kept, grads)
    count = len(together.layout.rows)
    grad_weight = torch.cat([flattened(g, w) for g, w in zip(grads[:count], parameters, strict=False)])
    found = fold_backward(together, kept, grad_weight, torch.cat(list(grads[count:])), parameters)
    return by_parameter(found, parameters, together.layout)


def by_parameter(found: Gradients, parameters: Any, layout: Layout) -> list[Tensor]:
    """One derivative for each given moment and each parameter, in their order."""
    flat, by_source, d_mean, d_var = found
    pieces = zip(flat.split_with_sizes([rows.weights for rows in layout.rows]), parameters, strict=False)
    sizes = [rows.outputs for rows in layout.rows]
    vectors = by_source.to(parameters[-1].dtype).view(-1).split_with_sizes(sizes * 2)
    return [d_mean, d_var, *(in_memory_order(piece, weight) for piece, weight in pieces), *vectors]


def _differentiable_backward(ctx: Any, grads: Sequence[Tensor]) -> Any:
    """The same by autograd through the layers' own formulas, which can be differentiated again."""
    folded = [layer.folded() for layer in ctx.together.layers]
    outputs = [weight for weight, _ in folded] + [bias for _, bias in folded]
    matching = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    wanted = [p for p in ctx.parameters if p.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, matching, create_graph=True, allow_unused=True))
    return None, None, None, None, *(next(found) if p.requires_grad else None for p in ctx.parameters)
