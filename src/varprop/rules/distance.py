"""Distances and angles between random vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..moments import Moments
from .arithmetic import mul_independent, sub_independent
from .axes import Value, lift
from .norm import unit_normalized, vector_norm
from .reduction import sum_dim
from .registry import rule

aten = torch.ops.aten
GAMMA = "the squared distance is taken as a Gamma variable (std error up to 7 %, from 8 values on 4 %)"
COSINE = (
    "entries of a normalized vector count as independent (std error 0.5 %, at worst 4 %, over 64 values; 2 %, at worst "
    "40 %, over 16; over 4 it is useless where the means exceed the spread)"
)


def _euclidean(_x: Any, _y: Any, p: float = 2.0, *_: Any) -> bool:
    return p == 2


@rule(aten.cdist, handles=_euclidean, approximate=GAMMA, repeats=True)
def cdist(x: Value, y: Value, p: float = 2.0, compute_mode: int | None = None) -> Moments:
    """|x_i - y_j| for all pairs of rows; of one value's own rows, zero from each to itself."""
    a, b = lift(x).dense(), lift(y).dense()
    rows = Moments(a.mean.unsqueeze(-2), a.var.unsqueeze(-2))
    columns = Moments(b.mean.unsqueeze(-3), b.var.unsqueeze(-3))
    gap = sub_independent(rows, columns)
    if x is y:
        apart = 1 - torch.eye(a.shape[-2], dtype=gap.dtype, device=gap.device).unsqueeze(-1)
        gap = Moments(gap.mean * apart, gap.var * apart)
    return vector_norm(gap, dim=[-1])


@rule(aten.pairwise_distance, handles=_euclidean, approximate=GAMMA)
def pairwise_distance(x: Value, y: Value, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Moments:
    """|x - y + eps| along the last axis."""
    gap = sub_independent(lift(x).dense(), lift(y).dense())
    return vector_norm(Moments(gap.mean + eps, gap.var), dim=[-1], keepdim=keepdim)


def _unit(x: Value, dim: int, eps: float) -> Value:
    if isinstance(x, Tensor):
        length: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        return x / length.clamp_min(eps)
    return unit_normalized(x.dense(), [dim], eps)


@rule(aten.cosine_similarity, approximate=COSINE)
def cosine_similarity(x: Value, y: Value, dim: int = 1, eps: float = 1e-8) -> Moments:
    """The product of both vectors brought to length one, summed."""
    return sum_dim(mul_independent(_unit(x, dim, eps), _unit(y, dim, eps)), dim)


@rule(aten.linalg_vecdot)
def vecdot(x: Value, y: Value, *, dim: int = -1) -> Moments:
    """The sum of products of independent values, exact; a single one that meets several has their sum for a factor."""
    a, b = lift(x).dense(), lift(y).dense()
    if a.shape[dim] != b.shape[dim]:
        return mul_independent(sum_dim(a, dim), sum_dim(b, dim))
    return sum_dim(mul_independent(a, b), dim)
