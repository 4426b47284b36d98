"""Recurrent operations on tensors without data: the form of what they return, without running them.

Torch finds it step by step, several times in a capture: seconds for a sequence of a hundred.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table

aten = torch.ops.aten


def _output(input: Tensor, state: Tensor, settings: tuple[Any, ...]) -> Tensor:
    bidirectional = settings[-2]
    return input.new_empty(*input.shape[:-1], state.shape[-1] * (2 if bidirectional else 1))


def _lstm_form(input: Tensor, states: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
    return _output(input, states[0], settings), *(torch.empty_like(state) for state in states)


def _form(input: Tensor, state: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return _output(input, state, settings), torch.empty_like(state)


FORMS: dict[Any, Any] = {
    aten.lstm.input: _lstm_form,
    aten.gru.input: _form,
    aten.rnn_tanh.input: _form,
    aten.rnn_relu.input: _form,
}


@contextlib.contextmanager
def recurrences_not_run() -> Iterator[None]:
    """Within, these operations take the form of their results from that of their arguments, where torch runs Python."""
    kernels, steps = {op: dict(op.py_kernels) for op in FORMS}, {op: decomposition_table.get(op) for op in FORMS}
    try:
        for op, form in FORMS.items():
            _set(op, dict.fromkeys(kernels[op], form), form if steps[op] is not None else None)
        yield
    finally:
        for op in FORMS:
            _set(op, kernels[op], steps[op])


def _set(op: Any, kernels: dict[Any, Any], steps: Any) -> None:
    """What Python does in an operation's place, and into what torch takes it apart."""
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
    if steps is not None:
        decomposition_table[op] = steps
