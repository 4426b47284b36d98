"""Softmax, products of matrices, and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gaussian import softmax as exact
from ..gaussian.normal import differentiated, readable
from ..graph import ops
from ..moments import Moments
from .arithmetic import add_independent, moments, mul_independent
from .axes import Value, at_random_place, dense, lift, write_out
from .reduction import joined_last, reduced_axes, restored
from .registry import rule, structural

aten = torch.ops.aten
LARGE, SMALL = 0.3, 1e-5  # a weight; a part of a variance that is rounding
COARSE = (
    f"above {exact.FEW} logits a series, or interpolated integrals: mean within 1e-6, std within 0.2 %; "
    f"where they differ too much, or on a GPU, coarser integrals above {exact.LIMIT} logits: mean within 0.001, "
    "std within 3 %"
)
ATTENTION = (
    "scores are taken as independent Gaussian (std error 0.5 %, at worst 3 %, for heads of 64; 2 %, at worst 9 %, for "
    "heads of 8; mean within 0.1 std)"
)


def _along(function: Callable[..., tuple[Tensor, Tensor]], x: Moments, dim: int) -> Moments:
    """A function of the distribution along one axis; where the axis is uniform, so is the result."""
    line = write_out(x, dim)
    mean, var = function(line.mean, line.var, dim)
    stored = x.shape[dim]
    return Moments(mean.narrow(dim, 0, stored), var.narrow(dim, 0, stored))


def _cast(x: Moments, dtype: torch.dtype | bool | None) -> Moments:
    """Statistics are never kept in half precision."""
    return x.to(dtype) if dtype in (torch.float32, torch.float64) else x


def _coarse(x: Moments, dim: int, *_: Any, **__: Any) -> str | None:
    count = x.mean.numel() * x.full[dim] // x.shape[dim]
    return COARSE if count > exact.FEW else None


_SOFTMAX: dict[str, Any] = {"bounds": (0.0, 1.0), "entangles": True, "skews": True}


@rule(aten.softmax.int, aten._softmax, operation="softmax", approximate=_coarse, **_SOFTMAX)
def softmax(x: Moments, dim: int, dtype: torch.dtype | bool | None = None) -> Moments:
    """Moments of every probability by integrals over one variable (mathematics.md, 8); exact for independent logits."""
    return _along(exact.softmax, _cast(x, dtype), dim)


def _coarse_groups(x: Moments, index: Tensor, *_: Any) -> str | None:
    return COARSE if x.mean.numel() // x.shape[0] * len(index) > exact.FEW else None


@rule(ops.group_softmax, approximate=_coarse_groups, mixes_positions=True, **_SOFTMAX)
def group_softmax(x: Moments, index: Tensor, dim: int, groups: int) -> Moments:
    """`softmax` over the elements of equal index; groups of one size together."""
    x = write_out(x, dim)
    mean, var = (values.movedim(dim, 0) for values in (x.mean, x.var))
    order, sizes = index.argsort(stable=True), index.bincount(minlength=groups)
    first = sizes.cumsum(0) - sizes
    chosen, moments_of = [], []
    for size in sizes.unique().tolist():
        if size:
            members = order[first[sizes == size, None] + torch.arange(size, device=order.device)]
            chosen.append(members.flatten())
            moments_of.append([values.flatten(0, 1) for values in exact.softmax(mean[members], var[members], 1)])
    back = torch.cat(chosen).argsort()
    mean, var = (torch.cat(values)[back].movedim(0, dim) for values in zip(*moments_of, strict=True))
    return Moments(mean, var, x.full)


@rule(aten.log_softmax.int, aten._log_softmax, approximate=_coarse, entangles=True, skews=True)
def log_softmax(x: Moments, dim: int, dtype: torch.dtype | bool | None = None) -> Moments:
    """x_y - LSE(x): Var = Var x_y + Var LSE - 2 Var x_y E softmax_y (Stein); exact for independent Gaussians."""
    return _along(exact.log_softmax, _cast(x, dtype), dim)


@rule(aten.logsumexp, skews=True)
def logsumexp(x: Moments, dim: int | Sequence[int], keepdim: bool = False) -> Moments:
    """log sum exp over the given axes by the same integrals; exact for independent Gaussians."""
    axes = reduced_axes(x, dim)
    x = write_out(x, *axes)
    mean, var = exact.logsumexp(joined_last(x.mean, axes), joined_last(x.var, axes), -1)
    return restored(Moments(mean, var), axes, keepdim)


def product(multiply: Callable[[Tensor, Tensor], Tensor], a: Value, b: Value) -> Moments:
    """Moments of a bilinear map each of whose outputs sums distinct products of independent entries; exact.

    E = M1 M2,  Var = V1 V2 + M1^2 V2 + V1 M2^2 = (V1 + M1^2) V2 + V1 M2^2, with `multiply` for the product.
    """
    if isinstance(a, Moments) and isinstance(b, Moments):
        var = multiply(a.var + a.mean.square(), b.var) + multiply(a.var, b.mean.square())
        return Moments(multiply(a.mean, b.mean), var)
    if isinstance(b, Moments):
        return product(lambda p, q: multiply(q, p), b, a)
    assert isinstance(a, Moments)
    fixed = b.to(a.dtype)
    return Moments(multiply(a.mean, fixed), multiply(a.var, fixed.square()))


@rule(aten.matmul, aten.mm, aten.bmm, aten.mv, aten.dot, aten.vdot, operation="matmul", multilinear=True, product=True)
def matmul(a: Value, b: Value) -> Moments:
    """`product` with the matrix product; the summed axis is written out, other uniform axes stay uniform."""
    a = write_out(a, -1) if isinstance(a, Moments) else a
    b = write_out(b, -min(b.ndim, 2)) if isinstance(b, Moments) else b
    return product(torch.matmul, a, b)


@rule(aten.addmm, aten.baddbmm, aten.addmv, multilinear=True, product=True, weighted=True, bias=0)
def add_matmul(base: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Moments:
    """beta base + alpha (a b); exact for independent entries."""
    base = base * beta if isinstance(base, Tensor) else mul_independent(base, beta)  # a constant mask may be -infinity
    return add_independent(base, matmul(a, b), alpha=alpha)


@rule(aten.outer, multilinear=True, product=True, entangles=True, skews=True)
def outer(a: Value, b: Value) -> Moments:
    """`product` of every entry of one vector with every entry of the other."""
    return product(torch.outer, dense(a), dense(b))


def _repeated(x: Moments, heads: int) -> Moments:
    """Keys or values of grouped-query attention, one a query head."""
    if x.shape[-3] in (1, heads):
        return x
    mean, var = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (x.mean, x.var))
    return Moments(mean, var, (*x.full[:-3], heads, *x.full[-2:]))


def _scores(q: Moments, k: Moments, scale: float) -> Moments:
    """Moments of scale q_i k_j by the product rule, with the keys' common mean taken out of the variance.

    All scores of one query share q_i, and softmax ignores what they have in common: k_j = kbar + (k_j - kbar)
    leaves Var = E[q^2] Var k + Var q (E k - kbar)^2. The last term counts as independent between keys.
    """
    apart = k.mean - k.mean.mean(-2, keepdim=True)
    left = torch.cat([torch.addcmul(q.var, q.mean, q.mean), q.var], -1)
    var = (scale**2 * left) @ torch.cat([k.var, apart.square()], -1).mT
    return Moments((scale * q.mean) @ k.mean.mT, var)


def _hidden(attn_mask: Value | None, is_causal: bool, rows: int, columns: int, like: Tensor) -> Tensor | None:
    """Which keys each query may not see; None if it sees all."""
    if is_causal:
        return torch.ones(rows, columns, dtype=torch.bool, device=like.device).triu(1)
    if isinstance(attn_mask, Tensor):
        return ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
    return None


def _masked(scores: Moments, attn_mask: Value | None, hidden: Tensor | None) -> Moments:
    """Scores with a bias added, and hidden ones constant and so far below that their weight is zero."""
    if isinstance(attn_mask, Moments):
        scores = add_independent(scores, attn_mask)
    elif attn_mask is not None and attn_mask.dtype != torch.bool and hidden is not None:
        scores = add_independent(scores, attn_mask.masked_fill(hidden, 0.0))
    if hidden is None:
        return scores
    floor = scores.mean.detach().amin(-1, keepdim=True) - 1e4
    return moments(torch.where(hidden, floor, scores.mean), scores.var.masked_fill(hidden, 0.0))


def noise(p: Tensor, var: Tensor, logit_var: Tensor) -> Tensor:
    """Variances a of independent noise e such that e - p sum(e), which sums to zero, has the given variances.

    First order: Cov(softmax) = J diag(logit_var) J' with J = diag(p) - p p', that is a = p^2 logit_var. Three
    rescalings by (wanted / present) variance keep that form and meet the exact diagonal a (1 - 2p) + p^2 sum(a), which
    can be solved for a where no weight is large:
    std of sum_j p_j m_j to 1 % (at worst 22 %) for 2 to 64 logits of std 0.3 to 4; first order alone: up to 4 times.
    """
    if readable(p) and (solved := _solved(p, var)) is not None:
        return solved
    tiny, most = torch.finfo(p.dtype).tiny ** 0.4, p / (1 - p).clamp_min(0.1)  # for var <= p (1 - p), a <= p / (1 - p)
    a = torch.minimum(p.square() * logit_var, most)
    for _ in range(3):
        present = (a * (1 - 2 * p) + p.square() * a.sum(-1, keepdim=True)).clamp_min(0.0)
        a = torch.minimum(a * ((var + tiny) / (present + tiny)).clamp_max(1e6), most)
    return a


def _solved(p: Tensor, var: Tensor) -> Tensor | None:
    """The variances that meet the diagonal at once, where no weight is large and none comes out negative."""
    if not bool(p.amax() < LARGE):
        return None
    inverse = 1 / (1 - 2 * p)
    variances, squares = var * inverse, p * p * inverse
    total = variances.sum(-1, keepdim=True) / (1 + squares.sum(-1, keepdim=True))
    result = torch.addcmul(variances, squares, total, value=-1.0)
    if bool(result.amin() >= 0):
        return result
    return result.clamp_min(0.0) if bool((result >= -SMALL * var).all()) else None


def _mixed(p: Tensor, var: Tensor, a: Tensor, value: Moments, dropout_p: float) -> Moments:
    """sum_j p_j v_j for weights that sum to one, independent of the values.

    Var = sum_j E[p_j^2] Var v_j + Var[sum_j p_j E v_j], the last with `noise` a: sum_j a_j (E v_j - out)^2, where
    out = sum_k p_k E v_k. Dropout of the weights multiplies E[p_j^2] by 1/(1 - d) and leaves means and covariances.
    """
    square = torch.addcmul(var, p, p)
    center = value.mean.mean(-2, keepdim=True)
    apart = value.mean - center
    mixed = p @ apart
    squares, products = (a @ torch.cat([apart.square(), apart], -1)).chunk(2, -1)
    between = squares - 2 * products * mixed + a.sum(-1, keepdim=True) * mixed.square()
    within = (value.var + dropout_p * value.mean.square()) / (1 - dropout_p)
    return Moments(mixed + p.sum(-1, keepdim=True) * center, square @ within + between.clamp_min(0.0))


def _reason(query: Value, key: Value, _: Value, attn_mask: Value | None = None, *__: Any, **___: Any) -> str | None:
    return ATTENTION if any(isinstance(x, Moments) for x in (query, key, attn_mask)) else None


def _drops(_q: Any, _k: Any, _v: Any, _mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    return dropout_p > 0


@rule(aten.scaled_dot_product_attention, operation="attention", approximate=_reason, draws=_drops)
def attention(
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Moments:
    """softmax(scale q k' + mask) v: `_scores` by the product rule, weights by the softmax integrals, `_mixed`."""
    q, k, v = write_out(lift(query), -1), write_out(lift(key), -2, -1), write_out(lift(value), -2)
    if enable_gqa:
        k, v = _repeated(k, q.full[-3]), _repeated(v, q.full[-3])
    hidden = _hidden(attn_mask, is_causal, q.full[-2], k.full[-2], q.mean)
    factor = q.full[-1] ** -0.5 if scale is None else scale
    random = _reason(query, key, value, attn_mask) is not None

    def attend(q: Moments, k: Moments, v: Moments) -> Moments:
        return _attended(_masked(_scores(q, k, factor), attn_mask, hidden), hidden, v, dropout_p, random)

    heads = max(x.mean.shape[:-2].numel() for x in (q, k, v))
    may_split = heads > 1 and readable(q.mean) and not any(differentiated(x.mean, x.var) for x in (q, k, v))
    if attn_mask is None and hidden is None and may_split:  # rows that see few keys share integrals of all heads
        return _heads_at_a_time(attend, q, k, v)
    return attend(q, k, v)


def _attended(scores: Moments, hidden: Tensor | None, v: Moments, dropout_p: float, random: bool) -> Moments:
    """The values, mixed by softmax of scores that are random, or constants."""
    p, var = exact.softmax(scores.mean, scores.var, -1) if random else (torch.softmax(scores.mean, -1), None)
    p = p if hidden is None else p.masked_fill(hidden, 0.0)
    if var is None:
        return _mixed(p, torch.zeros_like(p), torch.zeros_like(p), v, dropout_p)
    var = var if hidden is None else var.masked_fill(hidden, 0.0)
    return _mixed(p, var, noise(p, var, scores.var), v, dropout_p)


def _heads_at_a_time(attend: Callable[..., Moments], *given: Moments) -> Moments:
    """Attention of blocks of heads or samples, as large as their scores stay in the cache of a processor."""
    heads = torch.broadcast_shapes(*(x.mean.shape[:-2] for x in given))
    count = max(1, exact.CACHED // (given[0].shape[-2] * given[1].shape[-2]))
    means, variances = (
        zip(*(t.expand(*heads, *t.shape[-2:]).flatten(0, -3).split(count) for t in tensors), strict=True)
        for tensors in ([x.mean for x in given], [x.var for x in given])
    )
    parts = [attend(*map(Moments, mean, var)) for mean, var in zip(means, variances, strict=True)]
    mean, var = (torch.cat(part) for part in zip(*((part.mean, part.var) for part in parts), strict=True))
    return Moments(mean.unflatten(0, heads), var.unflatten(0, heads))


@structural(ops.token_average)
def token_average(value: Moments, shape: Sequence[int]) -> Moments:
    """Mean and variance of a value at a random token: those of an average of tokens that all vary together.

    Independent tokens would average out, and real ones do not: this is what attention counts as between normalized
    layers (`norm.modes`); `propagate` takes the tokens as independent (`attention`).
    """
    mean, var = at_random_place(value, [-2])
    if len(shape) > 2 and mean.shape[-3] not in (1, shape[-3]):  # grouped queries
        mean, var = (x.repeat_interleave(shape[-3] // x.shape[-3], -3) for x in (mean, var))
    return Moments(mean, var, shape)
