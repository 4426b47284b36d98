"""Embeddings: rows of a table, and sums, averages and maxima of several."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import CaptureError
from ..moments import Moments, Tokens
from .axes import Value, lift, write_out
from .registry import rule

aten = torch.ops.aten

ROWS = 1 << 19  # entries of a table whose squares stay in the cache of a processor, with two copies
SUM, MEAN, MAXIMUM = range(3)  # of a bag, by torch's numbers


@rule(aten.embedding)
def embedding(weight: Value, indices: Value | Tokens, *_: Any, **__: Any) -> Moments:
    """Rows of a table; a random one: E = sum_j p_j E_j, Var = sum_j p_j ((E_j - E)^2 + Var_j) (mathematics.md, 8)."""
    if isinstance(indices, Tensor):
        table = write_out(lift(weight), 0)
        return Moments(F.embedding(indices, table.mean), F.embedding(indices, table.var))
    if isinstance(indices, Moments):  # which some versions of torch let pass for indices when they capture
        raise CaptureError("An embedding reads indices, which have no moments: give vp.Tokens(probabilities) for them.")
    rows = weight.dense().mean if isinstance(weight, Moments) else weight
    chance = indices.probabilities.to(rows)
    if len(chance) != len(rows):
        raise CaptureError(
            f"The tokens have {len(chance)} probabilities, but the embedding that reads them has {len(rows)} rows: "
            f"give one probability for each row."
        )
    mean = chance @ rows
    count = max(1, ROWS // rows.shape[1])
    parts = zip(chance.split(count), rows.split(count), strict=True)
    var = sum((p @ (part - mean).square() for p, part in parts), torch.zeros_like(mean))
    if isinstance(weight, Moments):
        var = var + chance @ weight.dense().var
    shape = (*(1 for _ in indices.full or (1,)), mean.shape[-1])
    return Moments(mean.view(shape), var.view(shape))


@rule(aten.embedding_bag)
def embedding_bag(
    weight: Tensor,
    indices: Tokens,
    offsets: Tensor,
    _scale_grad: bool = False,
    mode: int = SUM,
    _sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Moments, None, None, None]:
    """Sum, average or maximum of the rows of a bag, for bags of equally many independent random tokens."""
    bags, size = _equal_bags(weight, indices, offsets, include_last_offset)
    if padding_idx is not None and padding_idx >= 0 and bool(indices.probabilities[padding_idx] > 0):
        raise CaptureError(
            f"Token {padding_idx} is the padding of an embedding bag, which leaves it out: give it probability 0."
        )
    row = embedding(weight, Tokens(indices.probabilities, (bags,)))
    if mode == MAXIMUM:
        return _largest(weight, indices.probabilities.to(weight), size), None, None, None
    if per_sample_weights is not None:
        factors = per_sample_weights.view(bags, size)
    else:
        factors = torch.full((1, size), 1.0 if mode == SUM else 1 / size).to(row.mean)
    first, second = (power.sum(1, keepdim=True) for power in (factors, factors.square()))
    return Moments(row.mean * first, row.var * second), None, None, None


def _equal_bags(weight: Any, indices: Any, offsets: Tensor, include_last_offset: bool) -> tuple[int, int]:
    """How many bags there are, and how many tokens each has."""
    if isinstance(weight, Tensor) and isinstance(indices, Tokens) and indices.full is not None:
        ends = offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([indices.full.numel()])])
        sizes = ends.diff().tolist()
        if len(set(sizes)) == 1:
            return len(sizes), sizes[0]
    raise CaptureError("Bags of an embedding have moments where they are equally many random tokens (vp.Tokens).")


def _largest(rows: Tensor, chance: Tensor, count: int) -> Moments:
    """The largest of so many independent rows of a table, column by column: P(max <= x) = P(row <= x)^count."""
    values, order = rows.sort(0)
    below = chance[order].cumsum(0).clamp(max=1.0).pow(count)
    share = torch.diff(below, dim=0, prepend=torch.zeros_like(below[:1]))
    mean = (share * values).sum(0, keepdim=True)
    return Moments(mean, (share * (values - mean).square()).sum(0, keepdim=True))
