"""Which axis holds the channels, and what is known of every one of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import rule_of
from ..graph.node import Node
from ..moments import Moments


def channel_axis(moments: Moments, node: Node) -> int:
    """As the operation that made the node has it; otherwise second, and in sequences last."""
    rule = rule_of(maker(node))
    decided = None if rule is None else rule.channels
    if decided is None:
        decided = -1 if moments.ndim == 3 else 1
    return moments.ndim - 1 if decided < 0 else min(decided, moments.ndim - 1)


def maker(node: Node) -> Node:
    """The operation behind a node, functions of one value after it left aside."""
    rule = rule_of(node)
    while node.operands and (node.target is operator.getitem or (rule is not None and rule.kind == "elementwise")):
        node = node.operands[0]
        rule = rule_of(node)
    return node


def over_channels(values: Tensor, axis: int, reduced: Callable[..., Tensor]) -> Tensor:
    """One number a channel: all other axes reduced."""
    others = [other for other in range(values.ndim) if other != axis]
    return (reduced(values.detach(), others) if others else values.detach()).flatten()


def ranges(moments: Moments, node: Node, k: float) -> dict[str, Any]:
    """Ends of mean -+ k std for every channel, within what the operation can give."""
    rule = rule_of(node)
    least, most = (-math.inf, math.inf) if rule is None else rule.bounds(*node.args[1:], **node.kwargs)
    low = (moments.mean - k * moments.std).clamp(least, most)
    high = (moments.mean + k * moments.std).clamp(least, most)
    axis = channel_axis(moments, node)
    lowest, highest = over_channels(low, axis, torch.amin), over_channels(high, axis, torch.amax)
    return {"axis": axis, "k": k, "low": lowest.tolist(), "high": highest.tolist()}
