"""Test rows for `varprop.rules.attention`."""

from __future__ import annotations

import torch

from varprop import Moments
from varprop.graph import ops

from .case import Case, normal, weight

aten = torch.ops.aten


def uniform(stored: tuple[int, ...], full: tuple[int, ...], **options: float) -> Moments:
    """Moments stored once along the axes whose extents differ."""
    x = normal(*stored, **options)
    return Moments(x.mean, x.var, full)


def bias(rows: int, columns: int) -> torch.Tensor:
    """A float mask that hides all but the first two keys of the first query."""
    mask = weight(rows, columns)
    mask[0, 2:] = -torch.inf
    return mask


def seen(rows: int, columns: int) -> torch.Tensor:
    """A boolean mask; the last query sees nothing."""
    mask = torch.ones(rows, columns, dtype=torch.bool).tril(1)
    mask[-1] = False
    return mask


rows = [
    Case(ops.token_average, lambda: (normal(2, 3, 1, 4), (2, 6, 5, 4))),
    Case(aten.softmax.int, lambda: (normal(3, 6), -1)),
    Case(aten.softmax.int, lambda: (normal(2, 4, 3, scale=3.0), 1, torch.float64), label="wide"),
    Case(aten.softmax.int, lambda: (uniform((2, 1), (2, 5)), -1), label="uniform"),
    Case(aten._softmax.default, lambda: (normal(3, 6), 1, False)),
    Case(ops.group_softmax, lambda: (normal(7, 2), torch.tensor([3, 0, 3, 1, 0, 3, 5]), 0, 6)),
    Case(ops.group_softmax, lambda: (normal(2, 5), torch.tensor([1, 0, 1, 1, 0]), 1, 2), label="second axis"),
    Case(aten.log_softmax.int, lambda: (normal(3, 6), -1)),
    Case(aten._log_softmax.default, lambda: (normal(3, 6), 1, False)),
    Case(aten.logsumexp.default, lambda: (normal(3, 6), [-1])),
    Case(aten.logsumexp.default, lambda: (uniform((3, 1, 2), (3, 4, 2)), [0, 1], True), label="uniform"),
    Case(aten.matmul.default, lambda: (normal(2, 3, 4), normal(4, 5))),
    Case(aten.matmul.default, lambda: (normal(2, 3, 4), weight(2, 4, 5)), label="constant-right"),
    Case(aten.matmul.default, lambda: (weight(3, 4), normal(2, 4, 5)), label="constant-left"),
    Case(aten.matmul.default, lambda: (normal(4), normal(2, 4, 3)), label="vector"),
    Case(aten.matmul.default, lambda: (uniform((1, 1, 1), (2, 3, 4)), normal(2, 4, 5)), label="uniform"),
    Case(aten.mm.default, lambda: (normal(3, 4), uniform((1, 5), (4, 5)))),
    Case(aten.bmm.default, lambda: (normal(2, 3, 4), uniform((1, 4, 5), (2, 4, 5)))),
    Case(aten.mv.default, lambda: (normal(3, 4), normal(4))),
    Case(aten.dot.default, lambda: (normal(4), weight(4))),
    Case(aten.vdot.default, lambda: (normal(4), normal(4))),
    Case(aten.addmm.default, lambda: (normal(5), normal(3, 4), weight(4, 5)), {"beta": 0.5, "alpha": -2}),
    Case(aten.addmm.default, lambda: (weight(5), weight(3, 4), normal(4, 5)), label="constant"),
    Case(aten.baddbmm.default, lambda: (weight(2, 3, 5), normal(2, 3, 4), normal(2, 4, 5)), {"alpha": 0.3}),
    Case(aten.addmv.default, lambda: (normal(3), normal(3, 4), normal(4))),
    Case(aten.outer.default, lambda: (normal(3), uniform((1,), (4,)))),
    Case(aten.tensordot.default, lambda: (normal(2, 1), weight(3, 8), [1], [-1]), label="broadcast"),
    Case(aten.tensordot.default, lambda: (normal(2, 3, 4), normal(4, 5, 3), [2, 1], [0, 2])),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(2, 3, 16), normal(2, 5, 16), normal(2, 5, 4)),
        mean_error=0.05,
        std_error=0.05,
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(4, 64, spread=0.0), normal(6, 64, spread=0.0), normal(6, 4, spread=0.0)),
        mean_error=0.01,
        std_error=0.02,
        label="initialization",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(4, 16), normal(6, 16, spread=0.0, shift=2.0), normal(6, 4)),
        mean_error=0.02,
        std_error=0.03,
        label="common-key-mean",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(2, 3, 16), normal(2, 5, 16), normal(2, 5, 4), None, 0.0, True),
        mean_error=0.03,
        std_error=0.03,
        label="causal",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(2, 3, 16), normal(2, 5, 16), normal(2, 5, 4), bias(3, 5)),
        {"scale": 0.1},
        mean_error=0.02,
        std_error=0.03,
        label="bias",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(2, 3, 16), weight(2, 5, 16), normal(2, 5, 4), seen(3, 5)),
        mean_error=0.05,
        std_error=0.08,
        label="mask",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (weight(3, 16), weight(5, 16), normal(5, 4), seen(3, 5)),
        label="random-values",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(3, 16), normal(5, 16), weight(5, 4), normal(3, 5)),
        mean_error=0.05,
        std_error=0.1,
        label="random-bias",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(1, 4, 3, 16), normal(1, 2, 5, 16), normal(1, 2, 5, 4)),
        {"enable_gqa": True},
        mean_error=0.05,
        std_error=0.04,
        label="grouped",
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (normal(2, 3, 16), normal(2, 5, 16), normal(2, 5, 4), None, 0.3),
        mean_error=0.03,
        std_error=0.04,
        label="dropout",
        op_is_random=True,
    ),
    Case(
        aten.scaled_dot_product_attention.default,
        lambda: (
            uniform((1, 1, 16), (2, 3, 16)),
            uniform((1, 1, 16), (2, 5, 16)),
            uniform((1, 1, 4), (2, 5, 4)),
        ),
        mean_error=0.02,
        std_error=0.03,
        label="uniform",
    ),
]
