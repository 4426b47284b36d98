"""Test rows for `varprop.rules.structural`."""

from typing import Any

import torch

from varprop import Tokens

from .case import Case, normal, weight

aten = torch.ops.aten


def tokens(*places: int) -> Tokens:
    """A random token at each of some places."""
    return Tokens(torch.rand(6, dtype=torch.float64), places)


def bags(mode: int, weights: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Two bags of three tokens."""
    return weight(6, 3), tokens(6), torch.tensor([0, 3]), False, mode, False, weights


rows = [
    Case(aten.embedding.default, lambda: (normal(6, 3), torch.tensor([[0, 5, 2], [1, 1, 4]]))),
    Case(aten.embedding.default, lambda: (weight(6, 3), tokens(2, 2)), label="tokens"),
    Case(aten.embedding_bag.default, lambda: bags(0), label="sum"),
    Case(aten.embedding_bag.default, lambda: bags(1), label="mean"),
    Case(aten.embedding_bag.default, lambda: bags(0, weight(6)), label="weights"),
    Case(aten.embedding_bag.default, lambda: bags(2), label="max"),
]
