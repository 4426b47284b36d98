"""The fold as one operation of its own in torch.compile's graphs: nothing to trace, no graph break.

Inductor prefers channels_last for all that a convolution depends on, weights included, and would copy them there and,
for this operation, back again at every step. It leaves alone what is read by `as_strided`: so each weight comes with an
anchor, a view of its first element, which is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autograd_node import by_parameter, fold_flat, unfold_flat, working
from .backends import kept_forms
from .layout import Pair
from .recording import handed_out
from .together import known

# not `custom_op`, which at each call compares every result with every input
_library = torch.library.Library("varprop", "FRAGMENT")


def traced_fold(number: int, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> Pair:
    """Folded weights and biases of the layers known by a number."""
    results = torch.ops.varprop.fold(parameters, _anchors(parameters), list(given or ()), number, dtype)
    return results[0], results[1]


def _anchors(parameters: list[Tensor]) -> list[Tensor]:
    return [weight.detach().as_strided((1,), (1,)) for weight in parameters[: len(parameters) // 3]]


def _define(schema: str, work: Callable[..., list[Tensor]], form: Callable[..., list[Tensor]]) -> None:
    """An operation, what it does, and the form of its results, none of which may share memory with another tensor."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, work, "CompositeExplicitAutograd")
    torch.library.register_fake(f"varprop::{name}", form, lib=_library)


def _fold(
    parameters: list[Tensor], _anchors: list[Tensor], given: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    together = known(number)
    recording = None if given else together.recording(dtype, parameters, compiled=True)
    if recording is not None:
        return handed_out(recording.folded().flat)
    return fold_flat(together, dtype, (given[0], given[1]) if given else None, parameters)


def _fold_form(
    parameters: list[Tensor], _anchors: list[Tensor], _given: list[Tensor], number: int, dtype: torch.dtype
) -> list[Tensor]:
    layout, like = known(number).layout, parameters[0]
    forms = kept_forms(layout, parameters[: len(parameters) // 3], working(like))
    results = [(layout.weight_count, dtype), (layout.row_count, dtype), *forms]
    return [like.new_empty(size, dtype=kind) for size, kind in results]


def _fold_backward(
    grads: list[Tensor], kept: list[Tensor], parameters: list[Tensor], _anchors: list[Tensor], number: int
) -> list[Tensor]:
    together = known(number)
    recording = together.recorders[True].recording_with(kept)
    replayed = together.replayed_back(recording, grads, parameters, compiled=True)
    if replayed is None:
        return unfold_flat(together, kept, grads[0], grads[1], parameters)
    return handed_out(replayed.flat)


def _fold_backward_form(
    _grads: list[Tensor], _kept: list[Tensor], parameters: list[Tensor], _anchors: list[Tensor], number: int
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
    by_parts = [torch.zeros_like(t) if g is None else g for g, t in pairs]
    found = torch.ops.varprop.fold_backward(by_parts, kept, parameters, _anchors(parameters), ctx.number)
    d_mean, d_var, *by = by_parameter(tuple(found), parameters)
    return by, [None] * (ctx.count // 3), [d_mean, d_var][: ctx.given], None, None


_define(
    "fold(Tensor[] parameters, Tensor[] anchors, Tensor[] given, int number, ScalarType dtype) -> Tensor[]",
    _fold,
    _fold_form,
)
_define(
    "fold_backward(Tensor[] grads, Tensor[] kept, Tensor[] parameters, Tensor[] anchors, int number) -> Tensor[]",
    _fold_backward,
    _fold_backward_form,
)
torch.library.register_autograd("varprop::fold", _backward, setup_context=_setup, lib=_library)
