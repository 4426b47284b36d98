"""What a global average counts as in the deep form: one of its positions, not an average of independent ones.

`propagate` takes positions as independent: the average of n of them has 1/n of their variance. Those of images and of
texts are not: in a ResNet at its start the outputs of the layer behind the average have three to five times the
predicted standard deviation, so that training begins with large losses and gradients. As with attention (`attention`),
the most it can have is the variance of its values, exact for positions that are all alike.
"""

from __future__ import annotations

from ..engine.plan import operation_of
from ..graph import ops
from ..graph.node import Form, Node
from ..graph.program import Program, transferred


def with_averages_of_like_positions(program: Program) -> Program:
    """The same program with every global average replaced by `position_average`."""
    replaced = {}
    for node in program.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and isinstance(source.form, Form) and isinstance(node.form, Form):
            found = _averaged(node, source)
            if found is not None:
                replaced[node] = (ops.position_average, (source, *found))
    return transferred(program, program.model, replaced=replaced) if replaced else program


def _averaged(node: Node, source: Node) -> tuple[tuple[int, ...], bool] | None:
    """The positions' axes if a node is a global average, and whether they are kept."""
    axes = tuple(range(2, source.ndim))
    if (operation := operation_of(node)) in ("adaptive average", "average window"):
        padded = operation == "average window" and len(node.args) > 3 and any(node.args[3])
        batched = source.ndim == node.ndim and axes and set(node.form.shape[2:]) == {1}
        return (axes, True) if batched and not padded else None
    if operation == "mean" and len(node.args) > 1 and isinstance(node.args[1], (list, tuple)):
        dims = tuple(sorted(axis % source.ndim for axis in node.args[1]))
        tokens = source.ndim == 3 and dims == (1,)
        if tokens or (source.ndim > 3 and dims == axes):
            return dims, bool(node.args[2]) if len(node.args) > 2 else False
    return None
