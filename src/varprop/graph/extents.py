"""Extents that export leaves open: how many elements a constant mask selects is known once the mask is looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .node import Form, Node, resolve


def form_of(value: Any) -> Any:
    """The form of a tensor, or a list of forms for several; None for what is no tensor."""
    if isinstance(value, Tensor):
        return Form(torch.Size(value.shape), value.dtype, value.device)
    return [form_of(item) for item in value] if isinstance(value, (list, tuple)) else None


def fill_open_extents(nodes: list[Node], tensors: dict[Node, Any]) -> None:
    """Give nodes whose extents are symbols those they have, by running them on constants and zeros."""
    open_nodes = [node for node in nodes if _is_open(node.form)]
    if not open_nodes:
        return
    values = dict(tensors)
    with torch.no_grad():
        for node in open_nodes:
            node.form = form_of(_value(node, values))


def _is_open(form: Any) -> bool:
    if isinstance(form, list):
        return any(map(_is_open, form))
    return isinstance(form, Form) and not all(type(extent) is int for extent in form.shape)


def _value(node: Node, values: dict[Node, Any]) -> Any:
    """What a node is for the constants of the model, with zeros for what depends on its input."""
    if node not in values:
        known = isinstance(node.form, Form) and not _is_open(node.form)
        if known and not _is_constant(node, values):
            values[node] = torch.zeros(node.form.shape, dtype=node.form.dtype, device=node.form.device)
        else:
            args, kwargs = resolve((node.args, node.kwargs), lambda operand: _value(operand, values))
            values[node] = node.target(*args, **kwargs)
    return values[node]


def _is_constant(node: Node, values: dict[Node, Any]) -> bool:
    """Whether a node follows from parameters, buffers and constants alone."""
    given = node in values and node.target is None
    return given or (node.target is not None and all(_is_constant(operand, values) for operand in node.operands))
