"""The fold as one operation of its own in torch.compile's graphs: nothing to trace, no graph break.

Inductor prefers channels_last for all that a convolution depends on, weights included, and would copy them there and,
for this operation, back again at every step. It leaves alone what is read by `as_strided`: so each weight comes with an
anchor, a view of its first element, which is used for nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd_node import by_parameter, fold_backward, fold_forward, working
from .backends import kept_forms
from .layout import Pair
from .together import known


def traced_fold(number: int, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> Pair:
    """Folded weights and biases of the layers known by a number."""
    weight, bias, *_ = _fold(parameters, _anchors(parameters), list(given or ()), number, dtype)
    return weight, bias


def _anchors(parameters: list[Tensor]) -> list[Tensor]:
    return [weight.detach().as_strided((1,), (1,)) for weight in parameters[: len(parameters) // 3]]


@torch.library.custom_op("varprop::fold", mutates_args=())
def _fold(
    parameters: list[Tensor], anchors: list[Tensor], given: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    pair = (given[0], given[1]) if given else None
    weight, bias, kept = fold_forward(known(number), dtype, pair, parameters)
    return _apart([weight, bias, *(part.flatten() for part in kept)])


def _apart(results: list[Tensor]) -> list[Tensor]:
    """Results of an operation must not share memory: copies of those that do."""
    seen: set[int] = set()
    found = []
    for result in results:
        place = result.untyped_storage().data_ptr()
        found.append(result.clone() if place in seen else result)
        seen.add(place)
    return found


@_fold.register_fake
def _(
    parameters: list[Tensor], anchors: list[Tensor], given: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    layout, like = known(number).layout, parameters[0]
    forms = kept_forms(layout, parameters[: len(parameters) // 3], working(like))
    results = [(layout.weight_count, dtype), (layout.row_count, dtype), *forms]
    return [like.new_empty(size, dtype=kind) for size, kind in results]


@torch.library.custom_op("varprop::fold_backward", mutates_args=())
def _fold_backward(
    grad_weight: Tensor,
    grad_bias: Tensor,
    kept: list[Tensor],
    parameters: list[Tensor],
    anchors: list[Tensor],
    number: int,
) -> list[Tensor]:
    return _apart(list(fold_backward(known(number), kept, grad_weight, grad_bias, parameters)))


@_fold_backward.register_fake
def _(
    grad_weight: Tensor,
    grad_bias: Tensor,
    kept: list[Tensor],
    parameters: list[Tensor],
    anchors: list[Tensor],
    number: int,
) -> list[Tensor]:
    layout, like = known(number).layout, parameters[0]
    given = [like.new_empty(layout.lanes.given, dtype=torch.float64) for _ in range(2)]
    by_source = like.new_empty(2, layout.row_count, dtype=working(like))
    return [like.new_empty(layout.weight_count), by_source, *given]


def _setup(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    parameters, _, given, ctx.number, _ = inputs
    ctx.count, ctx.given = len(parameters), len(given)
    ctx.save_for_backward(*parameters, *output)


def _backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    saved = ctx.saved_tensors
    parameters, (weight, bias, *kept) = list(saved[: ctx.count]), saved[ctx.count :]
    pairs = zip(grads, (weight, bias), strict=False)
    grad_weight, grad_bias = (torch.zeros_like(t) if g is None else g for g, t in pairs)
    found = _fold_backward(grad_weight, grad_bias, kept, parameters, _anchors(parameters), ctx.number)
    d_mean, d_var, *by = by_parameter(tuple(found), parameters, known(ctx.number).layout)
    return by, [None] * (ctx.count // 3), [d_mean, d_var][: ctx.given], None, None


_fold.register_autograd(_backward, setup_context=_setup)
