"""Moments of softmax of many logits of which none has much of the weight: series in the spread of their sum.

With S = sum_k e^{X_k}, E s_y = E e^{X_y} / S = mu_y E_y[1 / S], where mu_y = E e^{X_y} and E_y has the mean of X_y
raised by its variance; E s_y^2 = E e^{2 X_y} E_yy[1 / S^2] with twice the rise. S is a sum of independent log-normal
numbers, whose cumulants are known, and varies little around its mean M, so that with eps = Var S / M^2 and
kappa = k_3(S) / M^3

    M E[1/S]   = 1 +   eps -   kappa +  3 eps^2 + ...
    M^2 E[1/S^2] = 1 + 3 eps - 4 kappa + 15 eps^2 + ...

The terms of third order, k_4 - 10 eps kappa + 15 eps^3, say how far the series can be trusted, row by row. Where those
of second order are as small as that, they are left out too, which takes a quarter of the operations.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .normal import Pair, differentiated

CLOSE = 2e-7  # what terms of third order may add to a probability
SHARE = 1e-5  # and what they may be of the whole: of the variance, a difference, they are then up to some 0.2 %
WIDEST = 2.0  # variance of a logit above which higher terms may be larger than those looked at
BLOCK = 1 << 16  # logits whose temporaries stay in the cache of a processor


class SoftmaxSeries(NamedTuple):
    """Mean and variance of softmax along the last axis, and the rows in which the series can be trusted."""

    mean: Tensor
    var: Tensor
    close: Tensor


class Exponentials(NamedTuple):
    """Shares mu_y / M of the logits, exp(var) - 1 of each, their product, Var S / M^2, and the largest of a row."""

    share: Tensor
    spread: Tensor
    product: Tensor
    eps: Tensor
    most: Tensor  # share
    widest: Tensor  # spread


def _exponentials(mean: Tensor, var: Tensor) -> Exponentials:
    p, d = torch.softmax(torch.add(mean, var, alpha=0.5), -1), torch.expm1(var)
    pd = p * d
    eps, most = (p * pd).sum(-1, keepdim=True), p.detach().amax(-1, keepdim=True)
    return Exponentials(p, d, pd, eps, most, torch.expm1(var.detach().amax(-1, keepdim=True)))


def _left_out(x: Exponentials, kappa: Tensor) -> Tensor:
    """The size of the terms of third order; k_4 = mu^4 (w - 1)^2 (w^4 + 2 w^3 + 3 w^2 - 6) from its ratio to k_3."""
    w, eps = x.widest + 1.0, x.eps.detach()
    fourth = x.most * (w * w * (w * (w + 2.0) + 3.0) - 6.0) / (w + 2.0)
    return kappa * (fourth + 10.0 * eps + 9.0 * x.most * x.widest) + 15.0 * eps * eps * eps


def _second_order(x: Exponentials, kappa: Tensor) -> Pair:
    """E s and Var s; written without differences of nearly equal numbers.

    E s^2 / (E s)^2 - 1 = A + B + A B, A without the terms of the series and B with them alone. The rise of one logit
    counts in M and eps; in kappa it is of third order.
    """
    p, d, pd = x.share, x.spread, x.product
    square, above = pd * p, d + 2.0
    rise = square * d * above  # of eps, with w^2 - 1 = d (d + 2)
    once, twice = 1.0 / (pd + 1.0), 1.0 / torch.addcmul(pd.new_ones(()), pd, above)
    eps1 = (rise + x.eps) * once * once
    eps2 = torch.addcmul(x.eps, rise, torch.addcmul(above, d, above)) * twice * twice  # w^4 - 1 = (w^2 - 1) (w^2 + 1)
    g1 = torch.addcmul(-kappa, eps1, 1.0 + 3.0 * eps1)
    g2 = torch.addcmul(-4.0 * kappa, eps2, 3.0 + 15.0 * eps2)
    a = d * (1.0 - 2.0 * p - square * (3.0 + d * (d + 3.0))) * twice * twice
    b = (g2 - g1 * (2.0 + g1)) / torch.square(1.0 + g1)
    m = p * once * (1.0 + g1)
    return m, m * m * torch.addcmul(a + b, a, b).clamp_min(0.0)


def _is_small(x: Exponentials) -> bool:
    """True if terms of second order are as small everywhere as those of third order have to be.

    In E s / p - 1 = eps - pd they are 3 eps^2 + (d + 3) (pd)^2 - kappa - 3 eps pd, and kappa <= (d + 3) pd eps.
    """
    eps, product, factor = x.eps, x.most * x.widest, x.widest + 3.0
    above, below = 3.0 * eps * eps + factor * product * product, (factor + 3.0) * product * eps
    return bool(_is_close(1.25 * torch.maximum(above, below), x).all())


def _first_order(x: Exponentials) -> Pair:
    """`_second_order` to first order in eps and pd."""
    p, d, pd, eps = x.share, x.spread, x.product, x.eps
    m = torch.addcmul(p, p, eps - pd)
    a = torch.addcmul(d, d, torch.addcmul(p, pd, d + 2.0), value=-2.0)
    return m, torch.addcmul(eps, a, eps + 1.0).mul_(m).mul_(m)


def _is_close(left_out: Tensor, x: Exponentials) -> Tensor:
    """Rows that are narrow enough, in which what was left out is small, or one logit has all of the weight."""
    small = (left_out * x.most <= CLOSE) & (left_out <= SHARE)
    return (x.widest <= math.expm1(WIDEST)) & (small | (x.most == 1.0))


def _block(mean: Tensor, var: Tensor) -> SoftmaxSeries:
    x = _exponentials(mean, var)
    if not differentiated(mean, var) and _is_small(x):
        return SoftmaxSeries(*_first_order(x), torch.ones_like(x.most, dtype=torch.bool))
    # cumulants of exp(X), with w = exp(var), are mu^2 (w - 1), mu^3 (w - 1)^2 (w + 2) and so on
    kappa = (x.product * x.product * x.share * (x.spread + 3.0)).sum(-1, keepdim=True)
    alone = x.most == 1.0  # as in the first row under a causal mask
    first, second = _second_order(x, kappa)
    first, second = torch.where(alone, x.share, first), second.masked_fill(alone, 0.0)
    return SoftmaxSeries(first, second, _is_close(_left_out(x, kappa.detach()), x))


def softmax_series(mean: Tensor, var: Tensor) -> SoftmaxSeries:
    """Softmax along the last axis; E softmax within 1e-6 and sd within 0.2 % in the rows that are `close`."""
    shape = mean.shape
    mean, var = mean.reshape(-1, shape[-1]), var.reshape(-1, shape[-1])
    rows = max(1, BLOCK // shape[-1])
    pairs = zip(mean.split(rows), var.split(rows), strict=True)
    blocks = [_block(m, v.clamp_max(WIDEST + 1.0)) for m, v in pairs]
    first, second, close = (torch.cat(x) for x in zip(*blocks, strict=True)) if len(blocks) > 1 else blocks[0]
    return SoftmaxSeries(first.view(shape), second.view(shape), close.view(shape[:-1]))
