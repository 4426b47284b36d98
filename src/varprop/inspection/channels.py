"""Which axis holds the channels, and what is known of every one of them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import rule_of
from ..graph.node import Node
from ..moments import Moments
from .bends import limits_of
from .places import op_name

CHANNELS_SECOND = ("conv", "pool", "batch_norm")
CHANNELS_LAST = ("linear", "layer_norm")


def channel_axis(moments: Moments, node: Node) -> int:
    """As the operation that made the node has it; otherwise second, and in sequences last."""
    made = op_name(maker(node))
    if any(word in made for word in CHANNELS_SECOND):
        return min(1, moments.ndim - 1)
    last = moments.ndim == 3 or any(word in made for word in CHANNELS_LAST)
    return moments.ndim - 1 if last or moments.ndim < 2 else 1


def maker(node: Node) -> Node:
    """The operation behind a node, functions of one value after it left aside."""
    rule = rule_of(node) if node.target is not None else None
    while node.operands and (node.target is operator.getitem or (rule is not None and rule.kind == "elementwise")):
        node = node.operands[0]
        rule = rule_of(node) if node.target is not None else None
    return node


def over_channels(values: Tensor, axis: int, reduced: Callable[..., Tensor]) -> Tensor:
    """One number a channel: all other axes reduced."""
    others = [other for other in range(values.ndim) if other != axis]
    return (reduced(values.detach(), others) if others else values.detach()).flatten()


def ranges(moments: Moments, node: Node, k: float) -> dict[str, Any]:
    """Ends of mean -+ k std for every channel, within what the operation can give."""
    least, most = limits_of(node)
    low = (moments.mean - k * moments.std).clamp(least, most)
    high = (moments.mean + k * moments.std).clamp(least, most)
    axis = channel_axis(moments, node)
    ends = {"low": over_channels(low, axis, torch.amin), "high": over_channels(high, axis, torch.amax)}
    return {"axis": axis, "k": k} | {name: values.tolist() for name, values in ends.items()}
