"""Losses as a model may return them (a function of every element or row of logits, and a reduction), and distances."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..gaussian import activations
from ..gaussian import softmax as exact
from ..gaussian.normal import Pair
from ..gaussian.quadrature import expectation
from ..moments import Moments
from .arithmetic import add_independent, moments, mul_independent, sub_independent
from .axes import Value, dense, lift, moved, write_out
from .norm import unit_normalized, vector_norm
from .reduction import mean_dim, sum_dim
from .registry import RANDOM, SMOOTH_STEP, rule

aten = torch.ops.aten

GAMMA = "the squared distance is taken as a Gamma variable (std error up to 7 %, from 8 values on 4 %)"
COSINE = (
    "entries of a normalized vector count as independent (std error 0.5 %, at worst 4 %, over 64 values; 2 %, at worst "
    "40 %, over 16; over 4 it is useless where the means exceed the spread)"
)


def _euclidean(_x: Any, _y: Any, p: float = 2.0, *_: Any) -> bool:
    return p == 2


@rule(aten.cdist, handles=_euclidean, approximate=GAMMA, repeats=True, skews=True)
def cdist(x: Value, y: Value, p: float = 2.0, compute_mode: int | None = None) -> Moments:
    """|x_i - y_j| for all pairs of rows; of one value's own rows, zero from each to itself."""
    a, b = lift(x).dense(), lift(y).dense()
    gap = sub_independent(moved(a, lambda t: t.unsqueeze(-2)), moved(b, lambda t: t.unsqueeze(-3)))
    if x is y:
        apart = 1 - torch.eye(a.shape[-2], dtype=gap.dtype, device=gap.device).unsqueeze(-1)
        gap = Moments(gap.mean * apart, gap.var * apart)
    return vector_norm(gap, dim=[-1])


@rule(aten.pairwise_distance, handles=_euclidean, approximate=GAMMA, skews=True)
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


MEAN, SUM = 1, 2


def reduced(loss: Moments, reduction: int) -> Moments:
    """Every element, their average or their sum, the elements independent."""
    loss = loss.dense()
    return mean_dim(loss) if reduction == MEAN else sum_dim(loss) if reduction == SUM else loss


def _of_gap(moments_of: Callable[[Tensor, Tensor], Pair], x: Value, y: Value, reduction: int) -> Moments:
    """A function of x - y, given by its moments for means and standard deviations."""
    gap = sub_independent(dense(x), dense(y))
    return reduced(Moments(*moments_of(gap.mean, gap.std)), reduction)


@rule(aten.mse_loss, skews=True)
def mse_loss(x: Value, y: Value, reduction: int = MEAN) -> Moments:
    """(x - y)^2; exact for Gaussians."""
    return _of_gap(lambda mean, std: activations.power(mean, std, 2), x, y, reduction)


@rule(aten.l1_loss, skews=True)
def l1_loss(x: Value, y: Value, reduction: int = MEAN) -> Moments:
    """|x - y|; exact for Gaussians."""
    return _of_gap(activations.abs, x, y, reduction)


@rule(aten.smooth_l1_loss, skews=True)
def smooth_l1_loss(x: Value, y: Value, reduction: int = MEAN, beta: float = 1.0) -> Moments:
    """(x - y)^2 / 2 beta within beta, |x - y| - beta / 2 beyond; by quadrature."""

    def loss(gap: Tensor) -> Tensor:
        return torch.where(gap.abs() < beta, gap.square() / (2 * beta or 1), gap.abs() - beta / 2)

    return _of_gap(partial(expectation, loss, breaks=(-beta, beta)), x, y, reduction)


@rule(aten.huber_loss, skews=True)
def huber_loss(x: Value, y: Value, reduction: int = MEAN, delta: float = 1.0) -> Moments:
    """(x - y)^2 / 2 within delta, delta (|x - y| - delta / 2) beyond; by quadrature."""

    def loss(gap: Tensor) -> Tensor:
        return torch.where(gap.abs() < delta, gap.square() / 2, delta * (gap.abs() - delta / 2))

    return _of_gap(partial(expectation, loss, breaks=(-delta, delta)), x, y, reduction)


def _known_target(x: Any, target: Any, *_: Any, **__: Any) -> bool:
    return x is RANDOM and target is not RANDOM


@rule(aten.soft_margin_loss, handles=_known_target, skews=True)
def soft_margin_loss(x: Moments, target: Tensor, reduction: int = MEAN) -> Moments:
    """log(1 + exp(-t x)) for a constant target; exact for Gaussians."""
    x = x.dense()
    return reduced(Moments(*activations.softplus(-target * x.mean, target.abs() * x.std)), reduction)


@rule(aten.binary_cross_entropy_with_logits, handles=_known_target, skews=True)
def binary_cross_entropy_with_logits(
    x: Moments, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None, reduction: int = MEAN
) -> Moments:
    """w [(1 - t) x + (1 + (p - 1) t) log(1 + exp(-x))] for a constant target; by quadrature."""
    x, wide = x.dense(), target.double()
    factor = 1 + (pos_weight.double() - 1) * wide if pos_weight is not None else torch.ones_like(wide)

    def loss(z: Tensor) -> Tensor:
        return (1 - wide) * z + factor * torch.nn.functional.softplus(-z, threshold=50)

    result = Moments(*expectation(loss, x.mean, x.std, knots=SMOOTH_STEP))
    return reduced(result if weight is None else mul_independent(result, weight), reduction)


@rule(aten.kl_div, handles=_known_target)
def kl_div(x: Moments, target: Tensor, reduction: int = MEAN, *, log_target: bool = False) -> Moments:
    """t (log t - x): affine in x for a constant target; exact."""
    share = target.exp() if log_target else target
    entropy = share * target if log_target else torch.xlogy(target, target)
    return reduced(add_independent(entropy, mul_independent(x.dense(), share), alpha=-1), reduction)


def _target(target: Tensor, classes: int, ignore: int, like: Tensor) -> Tensor:
    """Probabilities of the classes along axis 1: given as they are, or one for the class named, none if ignored."""
    if target.is_floating_point():
        return target.to(like.dtype)
    counted = (target != ignore).to(like.dtype)
    named = torch.nn.functional.one_hot(target.clamp(0, classes - 1), classes).to(like.dtype) * counted[..., None]
    return named.movedim(-1, min(1, named.ndim - 1))


def _by_class(weight: Tensor | None, q: Tensor, axis: int) -> Tensor:
    weight = torch.ones(q.shape[axis], dtype=q.dtype, device=q.device) if weight is None else weight.to(q.dtype)
    return weight.view(-1, *[1] * (q.ndim - 1 - axis))


def _averaged(loss: Moments, total: Tensor, reduction: int) -> Moments:
    """The mean divides by the weights of the classes seen."""
    if reduction != MEAN:
        return reduced(loss, reduction)
    whole = sum_dim(loss)
    return Moments(whole.mean / total, whole.var / total.square())


@rule(aten.cross_entropy_loss, handles=_known_target, skews=True)
def cross_entropy_loss(
    x: Moments,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Moments:
    """sum_c q_c (LSE(x) - x_c) for constant weights q; exact for independent Gaussian logits.

    With Q = sum q, p = E softmax(x) and Stein's lemma, Var = Q^2 Var LSE + sum_c q_c^2 Var x_c - 2 Q sum_c q_c p_c Var
    x_c.
    """
    axis, x = min(1, x.ndim - 1), x.dense()
    named = _target(target, x.shape[axis], ignore_index, x.mean)
    scale = _by_class(weight, named, axis)
    smooth = (1 - label_smoothing) * named + label_smoothing / x.shape[axis] * named.sum(axis, keepdim=True)
    q = smooth * scale
    mean, var = exact.logsumexp(x.mean, x.var, axis)
    share, _ = exact.softmax(x.mean, x.var, axis)
    whole = q.sum(axis)
    spread = whole.square() * var + (q.square() * x.var).sum(axis) - 2 * whole * (q * share * x.var).sum(axis)
    loss = Moments(whole * mean - (q * x.mean).sum(axis), spread.clamp_min(0.0))
    samples = x.mean.numel() / x.shape[axis]
    total = torch.full_like(scale[..., 0], samples) if target.is_floating_point() else (named * scale).sum()
    return _averaged(loss, total.flatten()[0], reduction)


@rule(aten.nll_loss, aten.nll_loss_nd, aten.nll_loss2d, handles=_known_target)
def nll_loss(
    x: Moments, target: Tensor, weight: Tensor | None = None, reduction: int = MEAN, ignore_index: int = -100
) -> Moments:
    """-w_t x_t for the class t named by a constant target: one element a sample, exact."""
    axis, x = min(1, x.ndim - 1), write_out(x, *range(x.ndim))
    named = _target(target, x.shape[axis], ignore_index, x.mean)
    q = named * _by_class(weight, named, axis)
    return _averaged(moments(-(q * x.mean).sum(axis), (q.square() * x.var).sum(axis)), q.sum(), reduction)
