"""Test rows for `varprop.rules.recurrent`; weights as `torch.nn` draws them.

torch.vmap has no batching rule for most of them, so these are drawn one by one: few draws. The errors allowed are those
the rules state; `test_recurrent` holds them to their medians too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from varprop import Moments
from varprop.rules.recurrent import ERRORS

from .case import Case, normal

aten = torch.ops.aten
Sequence = partial(Case, draws=3_000, mean_error=0.1)


def params(
    gates: int, hidden: int = 6, layers: int = 1, ways: int = 1, bias: bool = True, out: int = 0
) -> list[Tensor]:
    """Weights of all layers and directions for five inputs, uniform in +-1/sqrt(hidden)."""
    made: list[tuple[int, ...]] = []
    for layer in range(layers):
        width = 5 if layer == 0 else (out or hidden) * ways
        shapes: list[tuple[int, ...]] = [(gates * hidden, width), (gates * hidden, out or hidden)]
        shapes += [(gates * hidden,)] * 2 if bias else []
        shapes += [(out, hidden)] if out else []
        made += shapes * ways
    return [(2 * torch.rand(*shape, dtype=torch.float64) - 1) * hidden**-0.5 for shape in made]


def settings(
    bias: bool = True, layers: int = 1, dropout: float = 0.0, both: bool = False, batch_first: bool = False
) -> tuple[Any, ...]:
    return bias, layers, dropout, dropout > 0, both, batch_first


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)


def state(*shape: int) -> Moments:
    return normal(*shape, scale=0.5)


def uniform_in_time() -> Moments:
    x = normal(1, 2, 5)
    return Moments(x.mean, x.var, (4, 2, 5))


rows = [
    Sequence(
        aten.lstm.input,
        lambda: (normal(3, 2, 5), [zeros(1, 2, 6), zeros(1, 2, 6)], params(4), *settings()),
        std_error=ERRORS["lstm"].most,
    ),
    Sequence(
        aten.lstm.input,
        lambda: (
            normal(2, 3, 5),
            [state(2, 2, 6), state(2, 2, 6)],
            params(4, ways=2),
            *settings(both=True, batch_first=True),
        ),
        std_error=ERRORS["lstm"].most,
        label="bidirectional-random-state",
    ),
    Sequence(
        aten.lstm.input,
        lambda: (
            normal(2, 2, 5),
            [zeros(2, 2, 6), zeros(2, 2, 6)],
            params(4, layers=2, bias=False),
            *settings(bias=False, layers=2),
        ),
        std_error=ERRORS["stack"].most,
        label="layers-no-bias",
    ),
    Sequence(
        aten.lstm.input,
        lambda: (normal(2, 2, 5), [zeros(1, 2, 3), zeros(1, 2, 6)], params(4, out=3), *settings()),
        std_error=ERRORS["stack"].most,
        label="projection",
    ),
    Sequence(
        aten.lstm.input,
        lambda: (uniform_in_time(), [zeros(1, 2, 6), zeros(1, 2, 6)], params(4), *settings()),
        std_error=ERRORS["lstm"].most,
        label="uniform-time",
    ),
    Sequence(
        aten.lstm_cell.default,
        lambda: (normal(3, 5), [state(3, 6), state(3, 6)], *params(4)),
        std_error=ERRORS["lstm"].most,
    ),
    Sequence(
        aten.gru.input,
        lambda: (normal(3, 2, 5), zeros(1, 2, 6), params(3), *settings()),
        std_error=ERRORS["gru"].most,
    ),
    Sequence(
        aten.gru.input,
        lambda: (normal(2, 3, 5), state(2, 2, 6), params(3, ways=2), *settings(both=True, batch_first=True)),
        std_error=ERRORS["gru"].most,
        label="bidirectional-random-state",
    ),
    Sequence(
        aten.gru.input,
        lambda: (normal(2, 2, 5), zeros(2, 2, 6), params(3, layers=2), *settings(layers=2, dropout=0.4)),
        std_error=ERRORS["stack"].most,
        label="layers-dropout",
        op_is_random=True,
    ),
    Case(
        aten.gru_cell.default,
        lambda: (normal(3, 5), state(3, 6), *params(3)),
        mean_error=0.02,
        std_error=ERRORS["gru"].most,
    ),
    Sequence(
        aten.rnn_tanh.input,
        lambda: (normal(3, 2, 5), zeros(1, 2, 6), params(1), *settings()),
        std_error=ERRORS["tanh"].most,
    ),
    Sequence(
        aten.rnn_relu.input,
        lambda: (normal(3, 2, 5), normal(1, 2, 6), params(1), *settings()),
        std_error=ERRORS["relu"].most,
    ),
    Case(aten.rnn_tanh_cell.default, lambda: (normal(3, 5), normal(3, 6), *params(1))),
    Case(aten.rnn_relu_cell.default, lambda: (normal(3, 5), zeros(3, 6), *params(1, bias=False))),
]
