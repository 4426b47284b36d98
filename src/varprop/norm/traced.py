"""The fold as one operation of its own in torch.compile's graphs: nothing to trace, no graph break."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends import kept_forms
from .layout import Pair
from .together import by_parameter, fold_backward, fold_forward, known


def traced_fold(number: int, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> Pair:
    """Folded weights and biases of the layers known by a number."""
    weight, bias, *_ = _fold(parameters, list(given or ()), number, dtype)
    return weight, bias


@torch.library.custom_op("varprop::fold", mutates_args=())
def _fold(parameters: list[Tensor], given: list[Tensor], number: int, dtype: torch.dtype) -> list[Tensor]:
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
def _(parameters: list[Tensor], given: list[Tensor], number: int, dtype: torch.dtype) -> list[Tensor]:
    layout, like = known(number).layout, parameters[0]
    working = torch.float64 if like.dtype == torch.float64 else torch.float32
    forms = kept_forms(layout, parameters[: len(parameters) // 3], working)
    results = [(layout.weight_count, dtype), (layout.row_count, dtype), *forms]
    return [like.new_empty(size, dtype=kind) for size, kind in results]


@torch.library.custom_op("varprop::fold_backward", mutates_args=())
def _fold_backward(
    grad_weight: Tensor, grad_bias: Tensor, kept: list[Tensor], parameters: list[Tensor], number: int
) -> list[Tensor]:
    return _apart(list(fold_backward(known(number), kept, grad_weight, grad_bias, parameters)))


@_fold_backward.register_fake
def _(
    grad_weight: Tensor, grad_bias: Tensor, kept: list[Tensor], parameters: list[Tensor], number: int
) -> list[Tensor]:
    layout, like = known(number).layout, parameters[0]
    working = torch.float64 if like.dtype == torch.float64 else torch.float32
    given = [like.new_empty(layout.lanes.given, dtype=torch.float64) for _ in range(2)]
    by_source = like.new_empty(2, layout.row_count, dtype=working)
    return [like.new_empty(layout.weight_count), by_source, *given]


def _setup(ctx: Any, inputs: Any, output: list[Tensor]) -> None:
    parameters, given, ctx.number, _ = inputs
    ctx.count, ctx.given = len(parameters), len(given)
    ctx.save_for_backward(*parameters, *output)


def _backward(ctx: Any, grads: list[Tensor | None]) -> Any:
    saved = ctx.saved_tensors
    parameters, (weight, bias, *kept) = list(saved[: ctx.count]), saved[ctx.count :]
    grad_weight, grad_bias = (
        torch.zeros_like(t) if g is None else g for g, t in zip(grads, (weight, bias), strict=False)
    )
    found = _fold_backward(grad_weight, grad_bias, kept, parameters, ctx.number)
    d_mean, d_var, *by = by_parameter(tuple(found), parameters, known(ctx.number).layout)
    return by, [d_mean, d_var][: ctx.given], None, None


_fold.register_autograd(_backward, setup_context=_setup)
