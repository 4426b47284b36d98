"""Test rows for `varprop.rules.structural`."""

from __future__ import annotations

import torch

from .case import Case, normal, weight

aten = torch.ops.aten


def places() -> torch.Tensor:
    return torch.tensor([[0, 0, 2], [1, 1, 1]])


rows = [
    Case(aten.scatter.src, lambda: (weight(2, 3), 1, torch.tensor([[0, 2], [1, 0]]), normal(2, 2)), draws=4_000),
    Case(aten.scatter.value, lambda: (normal(2, 3), 1, torch.tensor([[0], [1]]), 0.7), draws=4_000),
    Case(aten.index_fill.int_Scalar, lambda: (normal(2, 3), 1, torch.tensor([0, 2]), 0.7), draws=4_000),
    Case(aten.diagonal_scatter.default, lambda: (normal(3, 3), normal(3)), draws=4_000),
    Case(
        aten.masked_scatter.default,
        lambda: (normal(2, 3), torch.tensor([[True, False, True]] * 2), normal(4)),
        draws=4_000,
    ),
    Case(aten.unsafe_split.Tensor, lambda: (normal(2, 6), 2, 1), draws=4_000),
    Case(aten.unsafe_split_with_sizes.default, lambda: (normal(2, 6), [1, 5], 1), draws=4_000),
    Case(aten.index_add.default, lambda: (normal(3, 2), 0, torch.tensor([0, 0, 2]), normal(3, 2)), {"alpha": -0.5}),
    Case(aten.scatter_reduce.two, lambda: (normal(2, 3), 1, places(), normal(2, 3), "sum"), label="sum"),
    Case(aten.scatter_reduce.two, lambda: (normal(2, 3), 1, places(), normal(2, 3), "mean"), label="mean"),
    Case(
        aten.scatter_reduce.two,
        lambda: (weight(2, 3), 1, places(), normal(2, 3), "mean"),
        {"include_self": False},
        label="without-self",
    ),
    Case(aten.scatter_reduce.two, lambda: (normal(2, 3), 1, places(), normal(2, 3), "amax"), label="amax"),
    Case(
        aten.scatter_reduce.two,
        lambda: (weight(2, 3), 1, places(), normal(2, 4), "amin"),
        {"include_self": False},
        label="amin-without-self",
    ),
]
