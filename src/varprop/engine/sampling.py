"""Moments of an operation without a rule, estimated from random draws (opt-in)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MissingRule
from ..moments import Moments

DRAWS = 1024


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Within, the same numbers are drawn each time; the caller's random state is left alone."""
    if torch.compiler.is_compiling():
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def sample(op: Any, args: Any, kwargs: Any, draws: int = DRAWS) -> Any:
    """Mean and variance over Gaussian draws of the random arguments; the caller's random state is left alone."""
    with seeded():
        outputs = [pytree.tree_leaves(op(*draw(args), **draw(kwargs))) for _ in range(draws)]
    if any(output.is_complex() for output in outputs[0]):
        raise MissingRule(
            f"{op} gives complex numbers, and moments are those of real ones: keep the module that holds it whole with "
            "`@vp.rule(ThatModule)`."
        )
    values = [_moments(torch.stack(column)) for column in zip(*outputs, strict=True)]
    return values[0] if len(values) == 1 else values


def draw(tree: Any) -> Any:
    """One Gaussian draw of all Moments in a nest of arguments."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Moments):
            return leaf
        dense = leaf.dense()
        return dense.mean + dense.std * torch.randn(dense.shape, dtype=dense.dtype, device=dense.device)

    return pytree.tree_map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Moments))


def _moments(values: Tensor) -> Moments:
    values = values if values.is_floating_point() else values.float()
    return Moments(values.mean(0), values.var(0, correction=0))
