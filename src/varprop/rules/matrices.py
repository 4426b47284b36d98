"""Further products of matrices and vectors, and running products and differences."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..moments import Moments
from .arithmetic import add_independent, mul_independent, sub_independent
from .attention import matmul, product
from .axes import Value, dense, write_out
from .einsum import CHAIN
from .registry import rule
from .structural import cat

aten = torch.ops.aten


@rule(aten.inner, multilinear=True, mixes_positions=True)
def inner(a: Value, b: Value) -> Moments:
    """Products of all pairs of rows; exact for independent entries."""
    return product(torch.inner, dense(a), dense(b))


@rule(aten.kron, multilinear=True, mixes_positions=True, entangles=True)
def kron(a: Value, b: Value) -> Moments:
    """Products of every entry of one with every entry of the other; exact for independent entries."""
    return product(torch.kron, dense(a), dense(b))


@rule(aten.addr, multilinear=True, mixes_positions=True)
def addr(base: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Moments:
    """beta base + alpha a b'; exact for independent entries."""
    return add_independent(mul_independent(base, beta), product(torch.outer, dense(a), dense(b)), alpha=alpha)


@rule(aten.addbmm, multilinear=True, mixes_positions=True, bias=0)
def addbmm(base: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Moments:
    """beta base + alpha sum_n a_n b_n; exact for independent entries."""
    total = product(lambda p, q: torch.einsum("nij,njk->ik", p, q), dense(a), dense(b))
    return add_independent(mul_independent(base, beta), total, alpha=alpha)


def _joined(a: Value, b: Value) -> Value:
    return a @ b if isinstance(a, Tensor) and isinstance(b, Tensor) else matmul(a, b)


@rule(aten.linalg_multi_dot, aten.chain_matmul, approximate=lambda matrices: CHAIN if len(matrices) > 2 else None)
def multi_dot(matrices: Sequence[Value]) -> Any:
    """Successive products; exact for two matrices of independent entries."""
    return reduce(_joined, (dense(x) for x in matrices))


@rule(aten.linalg_cross, multilinear=True, mixes_positions=True)
def cross(a: Value, b: Value, *, dim: int = -1) -> Moments:
    """a_j b_k - a_k b_j; exact for independent entries."""
    a, b = dense(a), dense(b)
    terms = [mul_independent(_rolled(a, -s, dim), _rolled(b, s, dim)) for s in (1, -1)]
    return sub_independent(*terms)


def _rolled(x: Value, shift: int, dim: int) -> Value:
    if isinstance(x, Tensor):
        return x.roll(shift, dim)
    return Moments(x.mean.roll(shift, dim), x.var.roll(shift, dim))


@rule(aten.cumprod, multilinear=True, mixes_positions=True, entangles=True)
def cumprod(x: Moments, dim: int, *, dtype: torch.dtype | None = None) -> Moments:
    """E = running products of E_i, Var by v <- v (m_i^2 + v_i) + m^2 v_i; exact for independent values."""
    x = write_out(x, dim).to(dtype or x.dtype)
    steps = [Moments(*pair) for pair in zip(x.mean.unbind(dim), x.var.unbind(dim), strict=True)]
    found = [steps[0]]
    for step in steps[1:]:
        found.append(mul_independent(found[-1], step))
    return Moments(torch.stack([s.mean for s in found], dim), torch.stack([s.var for s in found], dim))


@rule(aten.diff, handles=lambda _x, n=1, *_: n == 1, multilinear=True, mixes_positions=True, entangles=True)
def diff(x: Value, n: int = 1, dim: int = -1, prepend: Value | None = None, append: Value | None = None) -> Moments:
    """Differences of neighbours: means subtract, variances add."""
    joined = cat([dense(part) for part in (prepend, x, append) if part is not None], dim)
    count = joined.shape[dim] - 1
    later, earlier = (Moments(joined.mean.narrow(dim, k, count), joined.var.narrow(dim, k, count)) for k in (1, 0))
    return sub_independent(later, earlier)
