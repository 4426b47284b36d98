"""Rows for arithmetic with constants and with independent random values."""

from __future__ import annotations

from typing import Any

import torch

from .case import Case, normal, weight

aten = torch.ops.aten


def both(op: Any, **settings: Any) -> list[Case]:
    """With a constant, with a second random value, and broadcast."""
    return [
        Case(op, lambda: (normal(3, 4), weight(3, 4)), label="constant", **settings),
        Case(op, lambda: (normal(3, 4), normal(3, 4)), label="random", **settings),
        Case(op, lambda: (normal(3, 1), normal(4)), label="broadcast", **settings),
    ]


def mask() -> torch.Tensor:
    return torch.tensor([[True, False, True, True]] * 3)


rows = [
    *both(aten.add.Tensor),
    Case(aten.add.Tensor, lambda: (normal(3, 4), normal(3, 4)), {"alpha": -2.0}, label="alpha"),
    Case(aten.add.Tensor, lambda: (weight(3, 4), normal(3, 4)), label="reversed"),
    *both(aten.sub.Tensor),
    Case(aten.rsub.Scalar, lambda: (normal(3, 4), 2.0)),
    *both(aten.mul.Tensor),
    Case(aten.mul.Tensor, lambda: (weight(3, 4), normal(3, 4)), label="reversed"),
    Case(aten.div.Tensor, lambda: (normal(3, 4), weight(3, 4).abs() + 0.5)),
    Case(
        aten.div.Tensor,
        lambda: (normal(3, 4), normal(3, 4, spread=0.3, shift=4.0, scale=0.3)),
        label="random",
        mean_error=2e-2,
        std_error=3e-2,
    ),
    Case(aten.neg.default, lambda: (normal(3, 4),)),
    Case(aten.deg2rad.default, lambda: (normal(3, 4),)),
    Case(aten.rad2deg.default, lambda: (normal(3, 4),)),
    Case(aten.addcmul.default, lambda: (normal(3, 4), normal(3, 4), weight(3, 4)), {"value": 0.5}),
    Case(aten.addcmul.default, lambda: (normal(3, 4), weight(3, 4), weight(3, 4)), label="constant"),
    Case(aten.lerp.Scalar, lambda: (normal(3, 4), normal(3, 4), 0.3)),
    Case(aten.lerp.Tensor, lambda: (normal(3, 4), normal(3, 4), normal(3, 4)), label="random weight"),
    Case(aten.lerp.Tensor, lambda: (weight(3, 4), normal(3, 4), normal(3, 4)), label="random weight and end"),
    Case(aten.lerp.Tensor, lambda: (normal(3, 4), weight(3, 4), weight(3, 4)), label="constant"),
    Case(aten.addcdiv.default, lambda: (normal(3, 4), weight(3, 4), weight(3, 4).abs() + 1)),
    Case(aten.hypot.default, lambda: (normal(3, 4), weight(3, 4))),
    Case(aten.hypot.default, lambda: (normal(3, 4), normal(3, 4)), mean_error=0.03, std_error=0.07, label="random"),
    *both(aten.logaddexp.default),
    *both(aten.max.other),
    *both(aten.min.other),
    Case(aten.true_divide.Tensor, lambda: (normal(3, 4), weight(3, 4).abs() + 0.5)),
    Case(aten.glu.default, lambda: (normal(3, 4), 1)),
    *both(aten.fmax.default),
    *both(aten.fmin.default),
    *both(aten.maximum.default),
    *both(aten.minimum.default),
    Case(aten.where.self, lambda: (mask(), normal(3, 4), normal(3, 4))),
    Case(aten.where.self, lambda: (mask(), normal(3, 4), weight(3, 4)), label="constant"),
    Case(aten.masked_fill.Scalar, lambda: (normal(3, 4), mask(), -3.0)),
    *(
        Case(op, args, label=label)
        for op in (aten.gt, aten.ge, aten.lt, aten.le)
        for op, args, label in (
            (op.Scalar, lambda: (normal(3, 4), 0.3), "scalar"),
            (op.Tensor, lambda: (normal(3, 4), normal(3, 4)), "random"),
        )
    ),
    Case(aten.eq.Scalar, lambda: (normal(3, 4), 0.3), differentiable=False),
    Case(aten.ne.Scalar, lambda: (normal(3, 4), 0.3), differentiable=False),
    *(
        Case(op.default, lambda: (normal(3, 4), mask()), differentiable=False)
        for op in (aten.logical_and, aten.logical_or)
    ),
    Case(aten.logical_not.default, lambda: (normal(3, 4),), differentiable=False),
]
