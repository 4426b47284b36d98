"""Test rows for `varprop.rules.matrices`."""

from __future__ import annotations

import torch

from varprop import Moments

from .case import Case, normal, weight

aten = torch.ops.aten


def uniform(stored: tuple[int, ...], full: tuple[int, ...]) -> Moments:
    """Moments stored once along the axes whose extents differ."""
    x = normal(*stored)
    return Moments(x.mean, x.var, full)


rows = [
    Case(aten.einsum.default, lambda: ("bij,bkj->bik", [normal(2, 3, 4), normal(2, 5, 4)])),
    Case(aten.einsum.default, lambda: ("...hd, hde -> ...he", [normal(2, 3, 4), weight(3, 4, 2)]), label="constant"),
    Case(aten.einsum.default, lambda: ("bij,j", [uniform((2, 1, 1), (2, 3, 4)), normal(4)]), label="uniform"),
    Case(aten.einsum.default, lambda: ("bi,bi->b", [normal(3, 1), weight(3, 8)]), label="broadcast"),
    Case(aten.einsum.default, lambda: ("bi,...i->b...", [normal(3, 1), normal(2, 8)]), label="broadcast-random"),
    Case(aten.einsum.default, lambda: ("bii->b", [normal(2, 3, 3)]), label="one"),
    Case(aten.einsum.default, lambda: ("bij->jb", [normal(2, 3, 4)]), label="transposed"),
    Case(aten.einsum.default, lambda: ("bij,jk->b", [normal(2, 3, 4), weight(4, 2)]), label="summed-alone"),
    Case(aten.einsum.default, lambda: ("bij,bkl->b", [normal(2, 3, 2), normal(2, 2, 3)]), label="both-summed-alone"),
    Case(aten.einsum.default, lambda: ("bi,ij,jk->bk", [normal(2, 3), weight(3, 4), weight(4, 2)]), label="chain"),
    Case(aten.einsum.default, lambda: ("...i,...i,...i->...", [normal(2, 3) for _ in range(3)]), label="three"),
    Case(aten.einsum.default, lambda: ("i,j,k->ijk", [normal(2), normal(3), normal(2)]), label="outer"),
    Case(
        aten.einsum.default,
        lambda: ("bi,ij,jk->bk", [normal(2, 16), normal(16, 16), normal(16, 2)]),
        std_error=0.05,
        label="random-chain",
    ),
]
