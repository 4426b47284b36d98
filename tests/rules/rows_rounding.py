"""Test rows for `varprop.rules.elementwise`."""

from __future__ import annotations

from typing import Any

import torch

from varprop import Moments

from .case import Case, normal, weight

aten = torch.ops.aten


def beside_a_step(size: float) -> Moments:
    """Narrow Gaussians two or three standard deviations from a step: further off no draw would ever pass it."""
    mean = size * (torch.randint(-3, 4, (3, 4)) + 0.3).double()
    return Moments(mean, (size * (0.1 + 0.05 * torch.rand(3, 4, dtype=torch.float64))).square())


def rounded(op: Any, *constants: Any) -> list[Case]:
    """Narrow, moderate and wide Gaussians."""
    size = constants[0] if constants else 1.0
    return [
        Case(op, lambda: (normal(3, 4), *constants)),
        Case(op, lambda: (normal(3, 4, scale=5.0), *constants), label="wide"),
        Case(op, lambda: (beside_a_step(size), *constants), label="narrow"),
    ]


rows = [
    *rounded(aten.floor.default),
    *rounded(aten.ceil.default),
    *rounded(aten.round.default),
    *rounded(aten.frac.default),
    Case(aten.trunc.default, lambda: (normal(3, 4),)),
    Case(aten.fix.default, lambda: (normal(3, 4, scale=0.3),)),
    *rounded(aten.remainder.Scalar, 0.7),
    Case(aten.remainder.Scalar, lambda: (normal(3, 4), -1.3), label="negative"),
    *rounded(aten.floor_divide.Scalar, 0.7),
    Case(aten.floor_divide.default, lambda: (normal(3, 4), weight(3, 4)), label="tensor", differentiable=False),
    *(
        Case(op, lambda divisor=divisor: (normal(3, 4), divisor()), {"rounding_mode": mode}, label=f"{mode}")
        for op, divisor in ((aten.div.Scalar_mode, lambda: -0.7), (aten.div.Tensor_mode, lambda: 0.5 + weight(4).abs()))
        for mode in ("floor", "trunc", None)
    ),
]
