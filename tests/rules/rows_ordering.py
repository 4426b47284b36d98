"""Rows for order statistics."""

from __future__ import annotations

import torch

from varprop import Moments

from .case import Case, normal

aten = torch.ops.aten


def uniform(stored: tuple[int, ...], full: tuple[int, ...]) -> Moments:
    x = normal(*stored)
    return Moments(x.mean, x.var, full)


rows = [
    Case(aten.topk.default, lambda: (normal(2, 6), 3)),
    Case(aten.topk.default, lambda: (normal(5, 2), 2, 0, False), label="smallest"),
    Case(aten.topk.default, lambda: (uniform((2, 1), (2, 7)), 4), label="uniform"),
    Case(aten.sort.default, lambda: (normal(2, 5), -1)),
    Case(aten.sort.stable, lambda: (normal(4, 2),), {"stable": True, "dim": 0, "descending": True}),
    Case(aten.msort.default, lambda: (normal(4, 2),)),
    Case(aten.kthvalue.default, lambda: (normal(2, 5), 2, 1, True)),
    Case(aten.median.dim, lambda: (normal(2, 6), 1)),
    Case(aten.median.default, lambda: (normal(3, 3),)),
    Case(aten.cummax.default, lambda: (normal(2, 4), 1)),
    Case(aten.cummin.default, lambda: (normal(4, 2), 0)),
    Case(aten.argmax.default, lambda: (normal(3, 5), 1, True)),
    Case(aten.argmax.default, lambda: (normal(2, 3),), label="all"),
    Case(aten.argmin.default, lambda: (normal(5, 2), 0)),
]
