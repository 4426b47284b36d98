"""One operation as a graph of its own, so that a test row goes through the same walk as a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varprop import Moments, Program, Tokens
from varprop.engine.evaluation import Evaluation
from varprop.engine.plan import make_plan, require_complete
from varprop.graph.node import Node, info_of

RANDOM = (Moments, Tokens)


def is_random(value: Any) -> bool:
    return isinstance(value, RANDOM)


def leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=is_random)


def replace(tree: Any, change: Callable[[Any], Any]) -> Any:
    return pytree.tree_map(change, tree, is_leaf=is_random)


def propagate_op(op: Any, args: Any, kwargs: Any) -> Any:
    """What the engine makes of one operation; random arguments are Moments or Tokens."""
    values: dict[Node, Any] = {}

    def enter(leaf: Any) -> Any:
        if not isinstance(leaf, (Tensor, *RANDOM)):
            return leaf
        node = Node(f"x{len(values)}", info=info_of(stand_in(leaf)))
        values[node] = leaf
        return node

    node_args, node_kwargs = replace((tuple(args), dict(kwargs)), enter)
    info = info_of(run_op(op, *replace((args, kwargs), stand_in)))
    node = Node("op", op, node_args, node_kwargs, info)
    program = Program(nn.Module(), [node], [], {}, {}, [node], None)
    plan = make_plan(program, [n for n, v in values.items() if is_random(v)])
    require_complete(plan)
    walk = Evaluation(plan, dict(values))
    walk.run()
    walk.finish([node])
    return walk.value(node)


def stand_in(leaf: Any) -> Any:
    """A plain tensor in place of a random one."""
    if isinstance(leaf, Moments):
        return leaf.mean.detach().expand(leaf.full)
    if isinstance(leaf, Tokens):
        return torch.zeros(leaf.full or (), dtype=torch.long)
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def run_op(op: Any, args: Any, kwargs: Any) -> Any:
    return op(*args, **kwargs)


def draw(leaf: Any, count: int) -> Any:
    """Independent draws of a random argument, along a new first axis."""
    if isinstance(leaf, Moments):
        dense = leaf.dense()
        return dense.mean + dense.std * torch.randn(count, *dense.shape, dtype=dense.dtype)
    if isinstance(leaf, Tokens):
        shape = leaf.full or ()
        return torch.multinomial(leaf.probabilities, count * shape.numel(), replacement=True).view(count, *shape)
    return leaf
