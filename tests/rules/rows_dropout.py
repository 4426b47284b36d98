"""Test rows for `varprop.rules.dropout`."""

from typing import Any

import torch

from .case import Case, normal, weight

aten = torch.ops.aten
F64 = {"dtype": torch.float64}
SOURCE: Any = {"differentiable": False, "draws": 10_000, "op_is_random": True}


def chance(*shape: int) -> torch.Tensor:
    """Probabilities."""
    return torch.rand(*shape, dtype=torch.float64)


rows = [
    Case(aten.dropout.default, lambda: (normal(3, 4), 0.3, True), op_is_random=True),
    Case(aten.dropout.default, lambda: (normal(3, 4), 0.3, False), label="eval"),
    Case(aten.dropout.default, lambda: (normal(3, 4), 1.0, True), label="all", op_is_random=True),
    Case(aten.native_dropout.default, lambda: (normal(3, 4), 0.3, True), op_is_random=True),
    Case(aten.native_dropout.default, lambda: (normal(3, 4), 0.3, False), label="eval"),
    Case(aten.feature_dropout.default, lambda: (normal(2, 3, 4), 0.4, True), op_is_random=True),
    Case(aten.alpha_dropout.default, lambda: (normal(3, 4), 0.3, True), op_is_random=True),
    Case(aten.alpha_dropout.default, lambda: (normal(3, 4), 0.3, False), label="eval"),
    Case(aten.feature_alpha_dropout.default, lambda: (normal(2, 3, 4), 0.2, True), op_is_random=True),
    Case(aten.rrelu.default, lambda: (normal(3, 4), 0.1, 0.6, True), op_is_random=True, draws=10_000),
    Case(aten.rrelu.default, lambda: (normal(3, 4), 0.1, 0.6), label="eval", draws=10_000),
    Case(
        aten.rrelu_with_noise_functional.default,
        lambda: (normal(3, 4), chance(3, 4), 0.1, 0.6, True),
        op_is_random=True,
    ),
    Case(aten.rand.default, lambda: ([3, 4],), F64, **SOURCE),
    Case(aten.rand_like.default, lambda: (weight(3, 4),), **SOURCE),
    Case(aten.uniform.default, lambda: (weight(3, 4), -1.0, 2.0), **SOURCE),
    Case(aten.randn.default, lambda: ([3, 4],), F64, **SOURCE),
    Case(aten.randn_like.default, lambda: (weight(3, 4),), **SOURCE),
    Case(aten.normal_functional.default, lambda: (weight(3, 4), 0.5, 2.0), **SOURCE),
    Case(aten.normal.float_float, lambda: (0.5, 2.0, [3, 4]), F64, **SOURCE),
    Case(aten.normal.Tensor_float, lambda: (weight(3, 4), 2.0), **SOURCE),
    Case(aten.normal.Tensor_float, lambda: (normal(3, 4), 2.0), label="random", op_is_random=True),
    Case(aten.normal.float_Tensor, lambda: (0.5, chance(3, 4)), **SOURCE),
    Case(aten.normal.Tensor_Tensor, lambda: (weight(3, 4), chance(3, 4)), **SOURCE),
    Case(aten.exponential.default, lambda: (weight(3, 4), 2.0), **SOURCE),
    Case(aten.randint.default, lambda: (5, [3, 4]), F64, **SOURCE),
    Case(aten.randint.low, lambda: (-2, 5, [3, 4]), F64, **SOURCE),
    Case(aten.randint_like.default, lambda: (weight(3, 4), 5), **SOURCE),
    Case(aten.randint_like.low_dtype, lambda: (weight(3, 4), -2, 5), **SOURCE),
    Case(aten.bernoulli.default, lambda: (chance(3, 4),), **SOURCE),
    Case(aten.bernoulli.p, lambda: (weight(3, 4), 0.3), **SOURCE),
    Case(aten.bernoulli.Tensor, lambda: (weight(3, 4), chance(3, 4)), **SOURCE),
]
