"""Test rows for `varprop.rules.norm`."""

from __future__ import annotations

import torch

from varprop import Moments
from varprop.graph import ops

from .case import Case, normal, weight

aten = torch.ops.aten


def positive(*shape: int) -> torch.Tensor:
    return 0.5 + torch.rand(*shape, dtype=torch.float64)


def stored(channels: int) -> tuple[torch.Tensor, ...]:
    """Weight, bias, running mean and running variance."""
    return weight(channels), weight(channels), weight(channels), positive(channels)


def uniform(stored_shape: tuple[int, ...], full: tuple[int, ...]) -> Moments:
    """Moments stored once along the axes whose extents differ."""
    x = normal(*stored_shape)
    return Moments(x.mean, x.var, full)


rows = [
    # stored statistics: exact
    Case(aten._native_batch_norm_legit_no_training.default, lambda: (normal(2, 3, 2, 2), *stored(3), 0.1, 1e-5)),
    Case(
        aten._native_batch_norm_legit_no_training.default,
        lambda: (uniform((1, 3, 1, 1), (2, 3, 4, 4)), None, weight(3), weight(3), positive(3), 0.1, 1e-5),
        label="uniform",
    ),
    Case(
        aten._native_batch_norm_legit_no_training.default,
        lambda: (uniform((1, 1), (2, 3)), *stored(3), 0.1, 1e-5),
        label="uniform-channels",
    ),
    Case(aten.batch_norm.default, lambda: (normal(4, 3), *stored(3), False, 0.1, 1e-5, True)),
    Case(
        aten.batch_norm.default,
        lambda: (normal(4, 3), normal(3), normal(3), weight(3), positive(3), False, 0.1, 1e-5, True),
        label="random-weight",
    ),
    Case(aten.native_batch_norm.default, lambda: (normal(2, 3, 2), *stored(3), False, 0.1, 1e-5)),
    Case(aten._native_batch_norm_legit.default, lambda: (normal(2, 3, 2), *stored(3), False, 0.1, 1e-5)),
    Case(aten._native_batch_norm_legit_functional.default, lambda: (normal(2, 3, 2), *stored(3), False, 0.1, 1e-5)),
    Case(
        aten.instance_norm.default,
        lambda: (normal(2, 3, 4), *stored(3), False, 0.1, 1e-5, True),
        label="stored",
    ),
    # statistics of the input: second order
    Case(
        aten.layer_norm.default, lambda: (normal(3, 16), [16], weight(16), weight(16)), mean_error=0.01, std_error=0.03
    ),
    Case(
        aten.layer_norm.default,
        lambda: (normal(3, 4), [4], weight(4), weight(4)),
        mean_error=0.03,
        std_error=0.08,
        label="few",
    ),
    Case(
        aten.layer_norm.default,
        lambda: (normal(2, 4, 6, spread=0.0), [4, 6], None, None, 1e-3),
        mean_error=0.01,
        std_error=0.02,
        label="centred",
    ),
    Case(
        aten.layer_norm.default,
        lambda: (uniform((1, 5, 1), (2, 5, 6)), [5, 6], weight(5, 6), weight(5, 6)),
        mean_error=0.01,
        std_error=0.03,
        label="uniform",
    ),
    Case(
        aten.native_layer_norm.default,
        lambda: (normal(3, 16), [16], weight(16), weight(16), 1e-5),
        mean_error=0.01,
        std_error=0.03,
    ),
    Case(aten.rms_norm.default, lambda: (normal(3, 16), [16], weight(16)), mean_error=0.01, std_error=0.03),
    Case(
        aten.rms_norm.default,
        lambda: (uniform((1, 1), (2, 12)), [12], None, 1e-6),
        mean_error=0.01,
        std_error=0.03,
        label="uniform",
    ),
    Case(
        aten.group_norm.default,
        lambda: (normal(2, 4, 3, 3), 2, weight(4), weight(4)),
        mean_error=0.01,
        std_error=0.03,
    ),
    Case(
        aten.group_norm.default,
        lambda: (uniform((2, 4, 1, 1), (2, 4, 3, 3)), 2, weight(4), weight(4)),
        mean_error=0.01,
        std_error=0.03,
        label="uniform",
    ),
    Case(
        aten.group_norm.default,
        lambda: (uniform((1, 1, 1), (2, 4, 6)), 2, None, None),
        mean_error=0.01,
        std_error=0.03,
        label="uniform-channels",
    ),
    Case(
        aten.native_group_norm.default,
        lambda: (normal(2, 4, 6), weight(4), weight(4), 2, 4, 6, 2, 1e-5),
        mean_error=0.01,
        std_error=0.03,
    ),
    Case(
        aten.instance_norm.default,
        lambda: (normal(2, 3, 4, 4), weight(3), weight(3), None, None, True, 0.1, 1e-5, False),
        mean_error=0.01,
        std_error=0.03,
    ),
    Case(
        aten.instance_norm.default,
        lambda: (uniform((2, 3, 1, 1), (2, 3, 4, 4)), None, None, None, None, True, 0.1, 1e-5, False),
        mean_error=0.01,
        std_error=0.03,
        label="uniform",
    ),
    Case(ops.standardize, lambda: (normal(2, 16, 3), [1], 1e-5), mean_error=0.01, std_error=0.03),
    Case(ops.rms_normalize, lambda: (normal(2, 16, 3), [1], 1e-5), mean_error=0.01, std_error=0.03),
    Case(ops.unit_normalize, lambda: (normal(2, 16, 3), [1], 1e-12), mean_error=0.01, std_error=0.03),
    Case(aten.linalg_vector_norm.default, lambda: (normal(3, 8), 2, [-1]), mean_error=0.02, std_error=0.04),
    Case(
        aten.linalg_vector_norm.default,
        lambda: (normal(3, 2), 2, [-1], True),
        mean_error=0.03,
        std_error=0.07,
        label="few",
    ),
    Case(
        aten.linalg_vector_norm.default,
        lambda: (uniform((2, 1, 3), (2, 5, 3)), 2, [1, 2]),
        mean_error=0.02,
        std_error=0.04,
        label="uniform",
    ),
    Case(aten.linalg_vector_norm.default, lambda: (normal(4, 5), 1, [-1], True), label="sum"),
    Case(aten.linalg_vector_norm.default, lambda: (normal(4, 5),), mean_error=0.02, std_error=0.04, label="all"),
]
