"""Softmax and attention to first order around their means: cheap, and with the derivatives of the plain operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..graph.node import Node
from ..moments import Moments

aten = torch.ops.aten


def mean_of(value: Any) -> Any:
    """The mean of a random value with every axis written out; a constant itself."""
    return value.dense().mean if isinstance(value, Moments) else value


def var_of(value: Any) -> Tensor:
    """The variance of a random value with every axis written out; zeros for a constant."""
    return value.dense().var if isinstance(value, Moments) else torch.zeros_like(value)


def softmax(node: Node, x: Moments, dim: int, *_: Any, **__: Any) -> Moments:
    """d p_j = p_j (d x_j - sum_k p_k d x_k) for independent logits."""
    plain = node.target(x.dense().mean, dim, *node.args[2:])
    var, p = var_of(x), plain.detach()
    return Moments(plain, p.square() * ((1 - 2 * p) * var + (p.square() * var).sum(dim, keepdim=True)).clamp_min(0))


def log_softmax(node: Node, x: Moments, dim: int, *_: Any, **__: Any) -> Moments:
    """d log p_j = d x_j - sum_k p_k d x_k for independent logits."""
    plain = node.target(x.dense().mean, dim, *node.args[2:])
    var, p = var_of(x), plain.detach().exp()
    return Moments(plain, ((1 - 2 * p) * var + (p.square() * var).sum(dim, keepdim=True)).clamp_min(0))


def attention(
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Moments:
    """Var = sum_j p_j² (Var v_j + (v_j - out)² Var s_j) for scores s independent of one another.

    Dropout of the weights multiplies p_j² E[v_j²] by d / (1 - d) more.
    """
    q, k, v, mask = (mean_of(argument) for argument in (query, key, value, attn_mask))
    with sdpa_kernel(SDPBackend.MATH):  # the others cannot carry several output directions back at once
        plain = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    with torch.no_grad():
        p, k, v, vk, vv = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        score_var = factor**2 * (q.square() @ vk.mT + var_of(query) @ (k.square() + vk).mT)
        if isinstance(attn_mask, Moments):
            score_var = score_var + attn_mask.dense().var
        by_score, squares = p.square() * score_var, p.square()
        out = p @ v
        between = by_score @ v.square() - 2 * out * (by_score @ v) + out.square() * by_score.sum(-1, keepdim=True)
        dropped = dropout_p / (1 - dropout_p) * (squares @ (v.square() + vv))
        return Moments(plain, squares @ vv + between.clamp_min(0) + dropped)


def attention_weights(
    query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The weights at the means; means of keys and values and variances of both, of one head each."""
    q, k, v, mask = (mean_of(argument) for argument in (query, key, value, attn_mask))
    vk, vv = var_of(key), var_of(value)
    if enable_gqa:
        times = q.shape[-3] // k.shape[-3]
        k, v, vk, vv = (t.repeat_interleave(times, -3) for t in (k, v, vk, vv))
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.mT
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return torch.softmax(scores, -1), k, v, vk, vv


FIRST_ORDER: dict[Any, Callable[..., Moments]] = {
    aten.scaled_dot_product_attention: attention,
    aten.softmax: softmax,
    aten._softmax: softmax,
    aten.log_softmax: log_softmax,
    aten._log_softmax: log_softmax,
}


@torch.no_grad()
def dropped_weights(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The standard deviation of weights that drop out, the mean values, and the variance by what varies of these."""
    p, _, v, _, vv = attention_weights(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    std = p * (dropout_p / (1 - dropout_p)) ** 0.5 if dropout_p < 1 else torch.zeros_like(p)
    return std, v, std.square() @ vv
