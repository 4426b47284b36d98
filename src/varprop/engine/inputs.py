"""What the user gives, fitted to the model: an example to capture it with, and the moments of every input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..graph.capture import as_arguments, as_example, capture, leaves_of, named_leaves, require_module, require_values
from ..graph.node import Node
from ..graph.program import Program
from ..moments import Mixture, Moments, Tokens, autocast_off
from ..rules.registry import lookup, module_classes
from .evaluation import Evaluation
from .plan import make_plan

Input = Moments | Tokens | Tensor
RANDOM = (Moments, Tokens)
INPUTS = (Moments, Tokens, Tensor)
LONGER = 2  # the extent that an axis of extent 1 is tried with


def capture_for_rules(model: nn.Module, example: Any) -> Program:
    """The graph of a model in operations and modules that have rules, as far as it can be written in such."""
    return capture(model, example, module_classes(), lambda target: lookup(target) is not None)


def example_for(model: nn.Module, moments: Any, example: Any) -> Any:
    """The example, or an input of the moments' own extents in its place where these say enough.

    Raises a CaptureError if moments have extent 1 along an axis that an operation looks along, and no example tells how
    long it is.
    """
    require_module(model)
    require_values(model)
    require_random(moments)
    if example is not None:
        return as_example(model, example, moments)
    _check_dtype(model, moments)
    _refuse_unknown_extents(model, moments)
    return _with_extents(moments)


def _with_extents(inputs: Any, moments: Moments | None = None, axis: int = 0) -> Any:
    """Inputs of the extents that the moments have; one axis of one of them longer, if given."""

    def stand_in(leaf: Any) -> Any:
        if isinstance(leaf, Tokens):
            raise CaptureError("Tokens have no shape of their own: give one, such as example=(1, 128).")
        if not isinstance(leaf, Moments):
            return leaf
        if not leaf.full:
            raise CaptureError("Moments of one number have no shape: give one, such as example=(1, 3, 32, 32).")
        extents = [LONGER if leaf is moments and position == axis else full for position, full in enumerate(leaf.full)]
        return leaf.mean.detach().expand(extents).contiguous()

    return pytree.tree_map(stand_in, inputs, is_leaf=lambda leaf: isinstance(leaf, RANDOM))


def _refuse_unknown_extents(model: nn.Module, inputs: Any) -> None:
    """Raise a CaptureError if an axis of extent 1 may stand for a longer one and results depend on how long it is.

    Each is tried with another extent: if the model refuses that, or all statistics stay the same, it does not matter.
    """
    moments = [leaf for leaf in leaves_of(inputs, RANDOM) if isinstance(leaf, Moments)]
    # the last first: positions are behind channels, and more often meant
    unknown = [(value, axis) for value in moments for axis in reversed(range(1, value.ndim)) if value.full[axis] == 1]
    if not unknown:
        return
    example = _with_extents(inputs)
    program = _captured(model, example, unknown[0][0])
    for value, axis in unknown:
        try:
            longer = capture_for_rules(model, _with_extents(inputs, value, axis))
        except CaptureError:
            continue
        node = next(_differing(program, longer, inputs), None)
        if node is not None:
            raise CaptureError(
                f"The moments have extent 1 along axis {axis}, and {_op(node)} in '{node.module or '(model)'}' looks "
                f"along it: say how long it is, {_hint(value)}."
            )


def _captured(model: nn.Module, example: Any, moments: Moments) -> Program:
    try:
        return capture_for_rules(model, example)
    except CaptureError as error:
        raise CaptureError(
            f"{error} If an axis of extent 1 stands for a longer one, say how long it is, {_hint(moments)}."
        ) from error


def _hint(moments: Moments) -> str:
    extents = [str(full) if full > 1 or axis == 0 else "32" for axis, full in enumerate(moments.full)]
    return f"such as example=({', '.join(extents)}), or example={tuple(moments.full)} if it is no longer than that"


def _differing(program: Program, longer: Program, inputs: Any) -> Iterator[Node]:
    """Operations whose results have other statistics where an axis is longer."""
    first, second = (_evaluated(captured, inputs) for captured in (program, longer))
    for node, counterpart in zip(program.nodes, longer.nodes, strict=False):
        comparable = node.target == counterpart.target and node not in first.plan.missing
        if not comparable or not _alike(first.env.get(node), second.env.get(counterpart)):
            yield node


@torch.no_grad()
@autocast_off()
def _evaluated(program: Program, inputs: Any) -> Evaluation:
    values = fitted_inputs(program, inputs)
    plan = make_plan(program, [node for node, value in values.items() if not isinstance(value, Tensor)])
    evaluation = Evaluation(plan, {**program.tensors(), **values}, annotate=False)
    evaluation.run()
    return evaluation


def _alike(first: Any, second: Any) -> bool:
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return all(map(_alike, first, second))
    if not isinstance(first, Moments) or not isinstance(second, Moments):
        return True
    return _close(first.mean, second.mean) and _close(first.var, second.var)


def _close(first: Tensor, second: Tensor) -> bool:
    try:
        return torch.allclose(first, second, rtol=1e-4, atol=1e-30)
    except RuntimeError:  # of extents that do not go together
        return False


def _op(node: Node) -> str:
    return str(node.packet).split(".")[-1] if node.packet else getattr(node.target, "__name__", str(node.target))


def _check_dtype(model: nn.Module, inputs: Any) -> None:
    """The graph is captured without computing, so torch itself would not notice."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    for index, value in enumerate(leaves_of(as_arguments(inputs), (Moments, Tokens))):
        if isinstance(value, Moments) and len(dtypes) == 1 and value.dtype not in dtypes:
            (expected,) = dtypes
            given, wanted = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, expected))
            raise CaptureError(
                f"Input {index} is {given} but the model's parameters are {wanted}: convert one of them, such as "
                f"moments.to({expected})."
            )


def fitted_components(program: Program, inputs: Any) -> tuple[list[dict[Node, Input]], list[float]]:
    """`fitted_inputs` of every component of a mixture, and their shares; anything else is one component."""
    if not isinstance(inputs, Mixture):
        return [fitted_inputs(program, inputs)], [1.0]
    return [fitted_inputs(program, component) for component in inputs.components], inputs.shares


def fitted_inputs(program: Program, inputs: Any) -> dict[Node, Input]:
    """The inputs of a program in their order, with the model's extents and dtype."""
    require_random(inputs)
    named = named_leaves(program.model, *as_arguments(inputs), INPUTS)
    named = {name: value for name, value in named.items() if isinstance(value, INPUTS)}
    if named.keys() == set(program.names):
        values = [named[name] for name in program.names]
    else:
        values = list(named.values())
        _check_names(program, inputs, list(named))
    pairs = enumerate(zip(program.inputs, values, strict=True))
    return {node: _fit(index, node, value) for index, (node, value) in pairs}


def require_random(inputs: Any) -> None:
    """Refuse data where moments belong; constants beside moments are welcome."""
    values = leaves_of(as_arguments(inputs), INPUTS)
    if values and not any(isinstance(value, RANDOM) for value in values):  # a model may draw all that is random itself
        raise CaptureError(
            "No input is random, as tensors and numbers are constants: did you mean vp.input_moments(x), which has the "
            "mean and variance of data, vp.Moments(mean, var), or vp.Tokens(probabilities) for indices?"
        )


def _check_names(program: Program, inputs: Any, named: list[str]) -> None:
    """Inputs without names go by their position; those with names must have the model's."""
    if len(named) != len(program.inputs) and not isinstance(inputs, dict):
        raise CaptureError(f"The model takes {len(program.inputs)} tensor input(s), but {len(named)} were given.")
    if isinstance(inputs, dict):
        unknown = [name for name in named if name not in program.names]
        wrong, about = ("has no input", unknown) if unknown else ("also takes", set(program.names) - set(named))
        listed, known = (", ".join(map(repr, sorted(names))) for names in (about, program.names))
        raise CaptureError(f"The model {wrong} {listed}: its tensor inputs are {known}.")


def _fit(index: int, node: Node, value: Input) -> Input:
    info, shape = node.info, node.info.shape
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Tokens):
        return Tokens(value.probabilities, shape)
    if value.ndim == 0:
        value = value.expand(*[1] * len(shape))
    if not info.is_floating:
        raise CaptureError(
            f"Input {index} of the model holds whole numbers ({info.dtype}), which have no mean and variance to "
            f"propagate: give vp.Tokens(probabilities) for indices of an embedding, a plain tensor for a constant, or "
            f"an example of floating point numbers for images of bytes."
        )
    if value.ndim != len(shape) or any(n not in (1, full) for n, full in zip(value.shape, shape, strict=True)):
        raise CaptureError(
            f"Input {index} has moments of shape {tuple(value.shape)}, but the model sees {tuple(shape)}: every axis "
            f"must have that extent, or 1 where the statistics do not change along it."
        )
    if value.covariance is not None and value.shape != shape:
        raise CaptureError(
            f"Input {index} has the covariance of one input of shape {tuple(value.shape)}, but the model sees "
            f"{tuple(shape)}: give an example of the first shape, or none."
        )
    fitted = value.to(info.dtype)
    fitted.full = shape
    return fitted
