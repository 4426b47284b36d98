"""An exported program in functional form: no operation changes a value in place or only sometimes copies one.

Torch finds that form by tracing the program twice more, which takes longer than its export. Nearly all models need
little of it: an activation in place becomes the one that returns its result, and a few operations become what they do
here. Whatever asks for more is left to torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def in_functional_form(exported: ExportedProgram) -> ExportedProgram:
    """The program that `run_decompositions({})` returns, but for writes to buffers that nobody reads."""
    graph = exported.graph_module.graph
    _unwrap(graph)
    if not _is_within_reach(graph):
        return exported.run_decompositions({})  # type: ignore[no-any-return]
    for node in list(graph.nodes):
        if node.op == "call_function" and not _stays(node.target):
            _rewrite(node)
    graph.eliminate_dead_code()
    return exported


def take_apart(graph: fx.Graph, has_rule: Callable[[Any], bool]) -> None:
    """Write operations without a rule as those they consist of, where each of these has one.

    So ``multiply``, ``concat``, ``special_expit`` and all other aliases of torch become the operations that they are.
    """
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or not _is_composite(node.target) or has_rule(node.target):
            continue
        if [type(result.type) for result in node.target._schema.returns] != [torch.TensorType]:
            continue
        transcript = _Transcript(node)
        try:
            new = _taken_apart(node, *node.args, transcript=transcript, **node.kwargs)
        except Exception:  # it asks for values, say: then it stays whole, and is named if it is on the random path
            new = None
        if new is not None and all(has_rule(inner.target) for inner in transcript.nodes):
            node.replace_all_uses_with(new)
            graph.erase_node(node)
        else:
            for inner in reversed(transcript.nodes):
                graph.erase_node(inner)


def _unwrap(graph: fx.Graph) -> None:
    """Put the operations under `torch.no_grad`, or where autocast is off, where they are called.

    Autocast that is off says what holds anyway. What leaves `torch.no_grad` is detached, as it is when the model runs.
    """
    for node in list(graph.nodes):
        differentiable = True
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            differentiable, body, *arguments = node.args
        elif node.target is torch.ops.higher_order.wrap_with_autocast and node.args[2] is False:
            _, _, _, _, body, *arguments = node.args
        else:
            continue
        inner = getattr(graph.owning_module, body.target).graph
        _unwrap(inner)
        placeholders = inner.find_nodes(op="placeholder")
        with graph.inserting_before(node):
            results: Any = graph.graph_copy(inner, dict(zip(placeholders, arguments, strict=True)))
        for user in list(node.users):
            value = results[user.args[1]]
            user.replace_all_uses_with(value if differentiable else _detached(graph, node, value))
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(body)


def _detached(graph: fx.Graph, before: fx.Node, value: fx.Node) -> fx.Node:
    """A value behind a `detach` that is inserted before a node; itself if it can have no gradient."""
    if not value.meta["val"].is_floating_point():
        return value
    with graph.inserting_before(before):
        new = graph.call_function(aten.detach.default, (value,))
    new.meta = dict(value.meta)
    return new


def _is_within_reach(graph: fx.Graph) -> bool:
    """True if each operation can be rewritten here, and none changes a value of which there is a view."""
    origin: dict[fx.Node, fx.Node] = {}  # of what an operation in place returns
    shared: set[fx.Node] = set()  # views, and values of which there are some
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if _changes_nothing(node) or _in_place(node.target) is not None:
            origin[node] = origin.get(node.args[0], node.args[0])
            value = origin[node]
            if value in shared or (value.op != "call_function" and len(value.users) > 1):
                return False  # an input may be read elsewhere, unless it has one user
            if len({source.meta["val"].dtype for source in node.all_input_nodes}) > 1:
                return False  # the result is converted to the dtype of the first
        elif not (_stays(node.target) or _has_rewrite(node) or _is_plain_view(node.target)):
            return False
        elif _is_view(node.target) or (node.target is operator.getitem and node.args[0] in shared):
            shared |= {node, *(origin.get(source, source) for source in node.all_input_nodes)}
    return True


def _changes_nothing(node: fx.Node) -> bool:
    """True if an operation returns its argument, as a dropout in place does in evaluation."""
    return node.target is aten.detach_.default or (node.target is aten.dropout_.default and not node.args[2])


@functools.cache
def _stays(target: Any) -> bool:
    """True if torch leaves an operation as it is."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    if target in _REWRITES or target._schema.is_mutable:
        return False
    uncertain = _is_aliasing(target) or torch.Tag.maybe_aliasing_or_mutating in target.tags
    return not (_is_composite(target) and uncertain)


@functools.cache
def _is_view(target: Any) -> bool:
    """True if the result of an operation may share memory with its arguments."""
    return isinstance(target, OpOverload) and _is_aliasing(target) and not target._schema.is_mutable


def _is_plain_view(target: Any) -> bool:
    """True if it returns one view, not a list of them."""
    return _is_view(target) and isinstance(target._schema.returns[0].type, torch.TensorType)


def _is_aliasing(target: OpOverload) -> bool:
    return any(argument.alias_info is not None for argument in target._schema.arguments)


def _is_composite(target: OpOverload) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in target.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key)


@functools.cache
def _in_place(target: Any) -> OpOverload | None:
    """The operation that returns what this one writes to its first argument."""
    name, _, overload = str(target).removeprefix("aten.").partition(".")
    if not isinstance(target, OpOverload) or not name.endswith("_") or torch.Tag.nondeterministic_seeded in target.tags:
        return None
    functional = getattr(getattr(aten, name[:-1], None), overload, None)
    return functional if functional is not None and _stays(functional) and not _is_aliasing(functional) else None


def _has_rewrite(node: fx.Node) -> bool:
    if node.target is aten.batch_norm.default:
        return not node.args[5] or node.args[3] is None  # by the batch it would write to what it has stored
    return node.target in _REWRITES and node.target is not aten.dropout_.default


def _rewrite(node: fx.Node) -> None:
    """Put what an operation computes in its place."""
    functional, first = _in_place(node.target), node.args[0]
    if node.target is aten.detach_.default and not _is_constant(node.args[0]):
        functional = aten.detach.default
    if functional is not None and isinstance(first, fx.Node):
        new = _insert(node, functional, node.args, node.kwargs)
        first.replace_all_uses_with(new, lambda user: user > node)
    else:
        rewrite: Callable[..., fx.Node] = _REWRITES.get(node.target, _taken_apart)
        new = rewrite(node, *node.args, **node.kwargs)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _is_constant(node: Any) -> bool:
    """True if a value follows from constants of the graph alone, as what `torch.tensor` makes does."""
    if node.op == "placeholder":
        return bool(node.name.startswith("c_"))
    return all(map(_is_constant, node.all_input_nodes))


def _insert(before: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """A new operation before another, described as that one is, but by the extents of its own result."""
    values, named = pytree.tree_map_only(fx.Node, lambda node: node.meta["val"], (args, kwargs))
    with _fake_mode(before):
        return _write(before, target, args, kwargs, target(*values, **named))


def _fake_mode(node: fx.Node) -> Any:
    return pytree.tree_leaves(node.meta["val"])[0].fake_mode


def _write(before: fx.Node, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
    name = getattr(target, "overloadpacket", target).__name__
    with before.graph.inserting_before(before):
        new = before.graph.create_node("call_function", target, args, kwargs, name)
    new.meta = before.meta | {"val": value}
    return new


def _batch_norm(node: fx.Node, *args: Any) -> fx.Node:
    *arguments, stored_mean, stored_var, by_batch, momentum, eps, _ = args
    if by_batch:
        norm, settings = aten._native_batch_norm_legit.no_stats, [True]
    else:
        norm, settings = aten._native_batch_norm_legit_no_training.default, [stored_mean, stored_var]
    results = _insert(node, norm, (*arguments, *settings, momentum, eps), {})
    return _insert(node, operator.getitem, (results, 0), {})


def _dropout(node: fx.Node, x: fx.Node, share: float, training: bool) -> fx.Node:
    """A dropout, of single elements by the operation that returns its mask too; a copy in evaluation."""
    if not training or share == 0:
        return _insert(node, aten.clone.default, (x,), {})
    if node.target is not aten.dropout.default:
        return _insert(node, node.target, (x, share, training), {})
    return _insert(node, operator.getitem, (_insert(node, aten.native_dropout.default, (x, share, True), {}), 0), {})


def _chunk(node: fx.Node, x: fx.Node, chunks: int, dim: int = 0) -> fx.Node:
    size = -(-x.meta["val"].shape[dim] // chunks)
    return _insert(node, aten.split.Tensor, (x, size, dim), {})


_REWRITES: dict[Any, Callable[..., fx.Node]] = {
    aten.batch_norm.default: _batch_norm,
    aten.chunk.default: _chunk,
    aten.alpha_dropout.default: _dropout,
    aten.feature_alpha_dropout.default: _dropout,
    aten.feature_dropout.default: _dropout,
    aten.detach_.default: lambda node, x: x,
    aten.dropout.default: _dropout,
    aten.dropout_.default: lambda node, x, *_: x,
    aten.lift_fresh_copy.default: lambda node, x: _insert(node, aten.clone.default, (x,), {}),
    aten.to.dtype: lambda node, x, dtype, *_, **__: _insert(node, aten._to_copy.default, (x,), {"dtype": dtype}),
}


def _taken_apart(node: fx.Node, *args: Any, transcript: _Transcript | None = None, **kwargs: Any) -> fx.Node:
    """The operations of which one consists; whether a view has to copy depends on the layout of its argument."""
    transcript, view = transcript or _Transcript(node), cast(Callable[..., Tensor], node.target)
    values, named = pytree.tree_map_only(fx.Node, transcript.value, (args, kwargs))
    with _fake_mode(node), transcript:
        return transcript.written[id(view(*values, **named))]


class _Transcript(TorchDispatchMode):
    """Within, each operation on the values of nodes is written before a node."""

    def __init__(self, before: fx.Node) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = before
        self.written: dict[int, fx.Node] = {}  # by the identity of their values, which they keep alive
        self.nodes: list[fx.Node] = []  # those that were written, in order

    def value(self, node: fx.Node) -> Any:
        """The value of a node, by which it is recognised in the operations to come."""
        self.written[id(node.meta["val"])] = node
        return node.meta["val"]

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = target(*args, **kwargs)
        if not isinstance(result, Tensor):  # the device of a tensor, say
            return result
        nodes, named = pytree.tree_map_only(Tensor, lambda value: self.written[id(value)], (args, kwargs))
        self.nodes.append(_write(self.before, target, nodes, named, result))
        self.written[id(result)] = self.nodes[-1]
        return result
