"""Puts hand-written normalizations and softmaxes back together, so that one rule sees each; other spellings too."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import fx

from . import ops

aten = torch.ops.aten
Packet = Any


def recompose(graph: fx.Graph) -> None:
    """Replace every recognised expression by a call of the operation in `ops`, or of torch's, in place."""
    first = (
        _softsign,
        _signed_size,
        _truth,
        _broadcast,
        _length,
        _unit_length,
        _normalization,
        _softmax,
        _group_softmax,
        _fourier,
    )
    for patterns in (first, (_below_maximum,)):  # a softmax takes its maximum off, and is no longer seen behind it
        for node in list(graph.nodes):
            match = next((match for pattern in patterns if (match := pattern(node)) is not None), None)
            if match is not None:
                with graph.inserting_before(node):
                    call = _inserted(graph, node, match)
                node.replace_all_uses_with(call)
                _erase_unused(graph, node)


def _inserted(graph: fx.Graph, node: fx.Node, match: tuple[Any, ...]) -> fx.Node:
    """The call of an operation on its arguments, tuples among which are calls too, all with the extents of a node."""
    target, *args = match
    operands = [_inserted(graph, node, arg) if isinstance(arg, tuple) else arg for arg in args]
    call = graph.call_function(target, tuple(operands))
    call.meta.update(node.meta)
    return call


def _softsign(node: fx.Node) -> tuple[Any, ...] | None:
    """x / (1 + |x|)."""
    x, divisor = _operands(node, aten.div)
    inner, addend = _operands(divisor, aten.add)
    if addend == 1 and _is(inner, aten.abs) and _same(inner.args[0], x):
        return ops.softsign, x
    return None


def _signed_size(node: fx.Node) -> tuple[Any, ...] | None:
    """sign(x) |x|, which is x, as torch.nn.functional.lp_pool writes an average of even powers before its root.

    Odd powers are left as they are: of values of both signs their root has no moments.
    """
    for sign, size in permutations(_operands(node, aten.mul)):
        size = size.args[0] if _is(size, aten.relu) else size
        if _is(sign, aten.sign) and _is(size, aten.abs) and _same(size.args[0], sign.args[0]):
            average = sign.args[0]
            pools = _is(average, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
            _, power = _operands(average.args[0], aten.pow) if pools else (None, None)
            even = isinstance(power, (int, float)) and power % 2 == 0
            return (aten.alias.default, average) if even else None
    return None


def _truth(node: fx.Node) -> tuple[Any, ...] | None:
    """x.bool() of floating point numbers, which asks whether they differ from zero; other casts copy."""
    value = node.meta.get("val")
    if not _is(node, aten._to_copy, aten.to) or not isinstance(value, torch.Tensor) or value.dtype is not torch.bool:
        return None
    return (aten.ne.Scalar, node.args[0], 0) if _is_floating(node.args[0]) else None


def _broadcast(node: fx.Node) -> tuple[Any, ...] | None:
    """One result of torch.broadcast_tensors is its operand expanded, random or not, whatever the others are."""
    if node.target is not operator.getitem or not _is(node.args[0], aten.broadcast_tensors):
        return None
    together, index = node.args
    return aten.expand.default, together.args[0][index], list(node.meta["val"].shape)  # type: ignore[union-attr, index]


def _is_floating(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _length(node: fx.Node) -> tuple[Any, ...] | None:
    """torch.linalg.norm where it is the norm of vectors: along one axis, or of no order over all that are given."""
    if node.target is not aten.linalg_norm.default or "dtype" in node.kwargs:
        return None
    x, order, dims, keepdim = _arguments(node, None, None, None, False)
    if order is not None and not (isinstance(dims, list) and len(dims) == 1):
        return None  # of matrices, or of a number of axes that decides which
    return aten.linalg_vector_norm.default, x, 2 if order is None else order, dims, keepdim


def _unit_length(node: fx.Node) -> tuple[Any, ...] | None:
    """x / max(||x||, eps), as torch.nn.functional.normalize writes it."""
    x, divisor = _operands(node, aten.div)
    divisor = divisor.args[0] if _is(divisor, aten.expand) else divisor
    norm, eps = _operands(divisor, aten.clamp_min)
    norm, eps = (divisor, 0.0) if norm is None else (norm, eps)
    if not _is(norm, aten.linalg_vector_norm) or not _same(norm.args[0], x):
        return None
    _, order, dims, keepdim = _arguments(norm, None, 2, None, False)
    return (ops.unit_normalize, x, dims, eps) if order == 2 and dims and keepdim else None


def _normalization(node: fx.Node) -> tuple[Any, ...] | None:
    """x / sqrt(mean(x^2) + eps), and the same of x - mean(x)."""
    for x, scale in _factors(node):
        spread, eps = _operands(_under_root(scale, node), aten.add)
        if not isinstance(eps, (int, float)) or not isinstance(x, fx.Node):
            continue
        centred = _centred(x)
        if centred and _is_variance(spread, *centred):
            return ops.standardize, *centred, float(eps)
        dims = _mean_square(spread, x)
        if dims:
            operation = (ops.standardize, centred[0]) if centred and centred[1] == dims else (ops.rms_normalize, x)
            return *operation, dims, float(eps)
    return None


def _softmax(node: fx.Node) -> tuple[Any, ...] | None:
    """exp(x) / sum(exp(x)) and exp(x - logsumexp(x)): whatever is taken off x along that axis, it is softmax(x)."""
    for terms, divisor in _factors(node):
        if _is(node, aten.mul) and not _is(divisor, aten.reciprocal):
            continue
        divisor = divisor.args[0] if _is(node, aten.mul) else divisor
        divisor = divisor.args[0] if _is(divisor, aten.expand) else divisor
        if _is(terms, aten.exp) and _is(divisor, aten.sum) and _same(divisor.args[0], terms) and _keeps(divisor):
            dims = divisor.args[1]
            return _softmax_of(terms.args[0], dims[0]) if len(dims) == 1 else None
    if not _is(node, aten.exp):
        return None
    x, total = _operands(node.args[0], aten.sub)
    if _is(total, aten.logsumexp) and _same(total.args[0], x) and _keeps(total) and len(total.args[1]) == 1:
        return _softmax_of(x, total.args[1][0])
    return None


TINY = 1e-12  # added to a sum of exponentials that are at most 1, the largest of them 1


def _group_softmax(node: fx.Node) -> tuple[Any, ...] | None:
    """exp(x) / sum(exp(x)) over elements of equal index, added up by scatter: whatever a group has in common is off."""
    terms, divisor = _operands(node, aten.div)
    if not _is(terms, aten.exp) or not _is(divisor, aten.index_select) or "rounding_mode" in node.kwargs:
        return None
    total, dim, index = divisor.args
    total, tiny = _operands(total, aten.add) if _is(total, aten.add) else (total, 0.0)
    added = _is(total, aten.scatter_add, aten.index_add)
    if not added or not isinstance(tiny, (int, float)) or not 0.0 <= tiny <= TINY or not _same(total.args[3], terms):
        return None
    started, axis, numbers, _ = total.args
    rank = len(_shape(terms))
    zeros = _is(started, aten.new_zeros, aten.zeros, aten.zeros_like, aten.full)
    while _is(numbers, aten.view, aten.expand, aten.unsqueeze, aten.reshape, aten.alias):  # to the rank of the terms
        numbers = numbers.args[0]
    if not zeros or total.kwargs or axis % rank != dim % rank or not _same(numbers, index):
        return None
    x, dim = terms.args[0], dim % rank
    while True:
        source, shift = _operands(x, aten.sub)
        of_group = _is(shift, aten.index_select) and shift.args[1] % rank == dim and _same(shift.args[2], index)
        if not of_group or not isinstance(source, fx.Node) or "alpha" in x.kwargs or _shape(source) != _shape(x):
            return ops.group_softmax, x, index, dim, int(_shape(total)[dim])
        x = source


def _softmax_of(x: fx.Node, dim: int) -> tuple[Any, ...]:
    """softmax(x), without what is taken off x first and is the same all along the axis."""
    while True:
        source, shift = _operands(x, aten.sub)
        extents = _shape(shift)
        if not isinstance(source, fx.Node) or "alpha" in x.kwargs or len(_shape(source)) != len(_shape(x)):
            return aten.softmax.int, x, dim
        axis = dim % len(_shape(x)) - len(_shape(x))
        if len(extents) >= -axis and extents[axis] != 1:
            return aten.softmax.int, x, dim
        x = source


def _shape(node: Any) -> Sequence[int]:
    """The extents of a tensor; those of a number are none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, torch.Tensor) else ()


def _below_maximum(node: fx.Node) -> tuple[Any, ...] | None:
    """x - maximum(x, y), which is -relu(y - x), and x - max(x), never above zero either: -relu(max(x) - x)."""
    x, maximum = _operands(node, aten.sub)
    if not isinstance(x, fx.Node) or "alpha" in node.kwargs or _shape(x) != _shape(node) or not _is_floating(node):
        return None
    if _is(maximum, aten.maximum) and any(_same(operand, x) for operand in maximum.args):
        larger = maximum.args[0] if _same(maximum.args[1], x) else maximum.args[1]
        return aten.neg.default, (aten.relu.default, (aten.sub.Tensor, larger, x))
    inner = maximum
    while _is(inner, aten.detach, aten.alias, aten.expand):
        inner = inner.args[0]
    if isinstance(inner, fx.Node) and inner.target is operator.getitem and inner.args[1] == 0:
        inner = inner.args[0]
    if not _is(inner, aten.amax, aten.max) or not _same(inner.args[0], x):
        return None
    return aten.neg.default, (aten.relu.default, (aten.sub.Tensor, maximum, x))


def _fourier(node: fx.Node) -> tuple[Any, ...] | None:
    """The real or imaginary part of discrete Fourier transforms of real values, one or several axes in turn."""
    pairs, axis, index = _arguments(node, None, None, None)
    if not _is(node, aten.select) or not _is(pairs, aten.view_as_real) or axis not in (-1, len(_shape(node))):
        return None
    x, axes, part = pairs.args[0], list[int](), "imag" if index in (1, -1) else "real"
    while isinstance(x, fx.Node) and x.target in _TRANSFORMS:
        source, sizes, dims, norm = _arguments(x, None, None, _TRANSFORMS[x.target], None)
        if sizes is not None or norm is not None or x.kwargs:
            return None
        rank = len(_shape(x))
        axes += [dim % rank for dim in ([dims] if isinstance(dims, int) else range(rank) if dims is None else dims)]
        x = source
    real = isinstance(x, fx.Node) and _is_floating(x)
    return (ops.fourier, x, axes, part) if axes and real and len(set(axes)) == len(axes) else None


# Transforms, and the axes that each takes where it is told none.
_TRANSFORMS: dict[Any, Any] = {aten.fft_fft.default: -1, aten.fft_fft2.default: [-2, -1], aten.fft_fftn.default: None}


def _factors(node: fx.Node) -> list[tuple[Any, Any]]:
    if _is(node, aten.mul):
        a, b = node.args
        return [(a, b), (b, a)]
    return [tuple(node.args[:2])] if _is(node, aten.div) else []  # type: ignore[list-item]


def _under_root(scale: Any, node: fx.Node) -> Any:
    """The argument of the root, if `scale` multiplies by rsqrt or divides by sqrt."""
    reciprocal = _is(node, aten.mul)
    if reciprocal and _is(scale, aten.reciprocal):
        scale, reciprocal = scale.args[0], False
    power = scale.args[1] if _is(scale, aten.pow) else None
    if _is(scale, aten.rsqrt if reciprocal else aten.sqrt) or power == (-0.5 if reciprocal else 0.5):
        return scale.args[0]
    return None


def _centred(x: fx.Node) -> tuple[fx.Node, list[int]] | None:
    """The source and axes, if x = source - mean(source)."""
    source, mean = _operands(x, aten.sub)
    if _is(mean, aten.mean) and _keeps(mean) and _same(mean.args[0], source):
        return source, list(mean.args[1])
    return None


def _is_variance(node: Any, source: fx.Node, dims: list[int]) -> bool:
    """A population variance of `source` over the same axes."""
    if not _is(node, aten.var) or not _same(node.args[0], source) or list(node.args[1]) != dims:
        return False
    unbiased = node.args[2] if len(node.args) > 2 else node.kwargs.get("correction", 1)
    return not unbiased and (node.kwargs.get("keepdim") or node.args[-1] is True)


def _mean_square(node: Any, x: fx.Node) -> list[int] | None:
    if not (_is(node, aten.mean) and _keeps(node)):
        return None
    square = node.args[0]
    squared = _is(square, aten.square) or (_is(square, aten.pow) and square.args[1] == 2)
    squared = squared or (_is(square, aten.mul) and square.args[0] is square.args[1])
    return list(node.args[1]) if squared and _same(square.args[0], x) else None


def _keeps(mean: fx.Node) -> bool:
    return len(mean.args) > 2 and mean.args[2] is True


def _arguments(node: Any, *defaults: Any) -> list[Any]:
    """The first arguments of a node, one for every default, which stands for an argument that is left out."""
    return [*node.args, *defaults[len(node.args) :]][: len(defaults)]


def _operands(node: Any, packet: Packet) -> tuple[Any, Any]:
    return tuple(node.args[:2]) if _is(node, packet) and len(node.args) > 1 else (None, None)


def _is(node: Any, *packets: Packet) -> bool:
    """True if a node calls one of these operations, whatever the overload."""
    return isinstance(node, fx.Node) and getattr(node.target, "overloadpacket", None) in packets


def _same(a: Any, b: Any) -> bool:
    return a is b and isinstance(a, fx.Node)


def _erase_unused(graph: fx.Graph, replaced: fx.Node) -> None:
    """Erase a node, and the operations that nothing but it read."""
    waiting, erased = [replaced], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and not node.users and node not in erased:
            waiting += node.all_input_nodes  # an erased node has none
            erased.add(node)
            graph.erase_node(node)
