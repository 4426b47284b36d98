"""The two questions a user asks: what are the moments, and can they be had."""

from __future__ import annotations

import contextlib
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import rules  # noqa: F401  (importing the rules fills the registry)
from ..graph.node import Node, TensorInfo, resolve
from ..graph.program import ModuleCalls, Program
from ..moments import Moments, trusted
from ..rules.registry import rules_revision
from .covariance import CovarianceEvaluation
from .evaluation import Evaluation, evaluate
from .inputs import capture_for_rules, example_for, fitted_components
from .plan import Plan, make_plan, require_complete
from .reasons import reasons_of
from .report import Coverage, Entry, Result, Status


def capture(model: nn.Module, example: Any, *, moments: Any = None) -> Program:
    """Capture a model once, to propagate through it many times while its parameters change.

    Args:
        model: Any module `torch.export` can trace.
        example: An input tensor, a tuple of positional arguments, or a dict of keyword arguments; shapes such as
            ``(1, 3, 32, 32)`` will do. May be None where `moments` know the shape.
        moments: What will be propagated, as for `propagate`.

    Returns:
        A program that `propagate`, `coverage`, `inspect` and `predict` take in place of the model.

    Raises:
        CaptureError: If the model cannot be captured, or the example does not fit it.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
        >>> program = vp.capture(model, (1, 8))
        >>> before = vp.propagate(program, vp.Moments(0.0, 1.0))["0"].var
        >>> _ = model[0].weight.data.mul_(2)
        >>> torch.allclose(vp.propagate(program, vp.Moments(0.0, 1.0))["0"].var, 4 * before)
        True
    """
    if moments is not None:
        example = example_for(model, moments, example)
    return capture_for_rules(model, example)


def propagate(
    model: nn.Module | Program,
    moments: Any,
    example: Any = None,
    *,
    on_missing: Literal["raise", "sample"] = "raise",
    gradients: bool | None = None,
    covariance: Literal["full"] | None = None,
) -> Result:
    """Mean and variance of every unit of a model, computed from its parameters and the input's moments.

    Args:
        model: A module in the mode it is to be looked at, or the result of `capture`. Batch norms in training mode
            normalize by the statistics of a large batch.
        moments: `Moments` shaped like one batch of the model's input with a batch axis of extent 1; any axis may have
            extent 1 and is then uniform, so ``(1, 3, 1, 1)`` is "per channel". `Tokens` for integer inputs of
            embeddings. A tuple (or a dict by name) for several inputs; plain tensors among them are constants.
            ``Moments(0.0, 1.0)`` is one mean and variance for everything. A `Mixture` is followed component by
            component.
        example: The real shape, as ``(1, 3, 32, 32)`` or as an input of it (or a tuple, or a dict); may be left out
            where `moments` know it, as those of `input_moments` do.
        on_missing: ``"raise"`` lists operations without a rule; ``"sample"`` estimates those by sampling and marks
            them.
        gradients: Whether to record the computation for derivatives by the parameters and the moments, which takes
            memory for every operation. Left out, it is recorded if `moments` require gradients; never under
            ``torch.no_grad()``.
        covariance: ``"full"`` follows the covariance of all units of a layer, and of layers that meet again, in place
            of the assumption that units are independent: for layers of up to a few thousand units. The input's is that
            of `input_moments` with ``covariance=True``, or of independent elements; the results have theirs as
            ``covariance``.

    Returns:
        Statistics of the output and of every module and operation.

    Raises:
        MissingRule: If operations on the random path have no rule.
        CaptureError: If the model cannot be captured, the input does not fit it, or none of it is random.
        WrongMode: If a batch norm has no statistics to normalize by.
        VarpropError: If covariances do not fit into memory.

    Example:
        >>> result = vp.propagate(nn.Linear(100, 1, bias=False), vp.Moments(0.0, 1.0), example=(1, 100))
        >>> result.output.mean, result.output.var.shape
        (tensor([[0.]]), torch.Size([1, 1]))
        >>> vp.propagate(nn.Linear(8, 2), vp.Moments(0.0, 1.0), (1, 8), covariance="full").output.covariance.shape
        torch.Size([2, 2])
    """
    if on_missing not in ("raise", "sample"):
        raise ValueError(f'on_missing must be "raise" or "sample", not {on_missing!r}.')
    evaluation_class = evaluation_for(covariance)
    program = model if isinstance(model, Program) else capture(model, example, moments=moments)
    components, shares = fitted_components(program, moments)
    plan = plan_for(program, tuple(node for node, value in components[0].items() if not isinstance(value, Tensor)))
    if on_missing == "raise":
        require_complete(plan)
    with _recording(components, gradients):
        calls = program.module_outputs(plan.random)
        wanted = [node for nodes in calls.values() for node in nodes.outputs if plan.random(node)]
        wanted += [out for out in program.outputs if plan.random(out)]
        return _result(evaluate(plan, components, shares, evaluation_class, wanted), calls)


def evaluation_for(covariance: Any) -> type[Evaluation]:
    """The evaluation that the argument `covariance` of `propagate` and of `inspect` asks for."""
    if covariance not in (None, "full"):
        raise ValueError(f'covariance must be "full" or None, not {covariance!r}.')
    return Evaluation if covariance is None else CovarianceEvaluation


def _recording(components: list[dict[Node, Any]], gradients: bool | None) -> contextlib.AbstractContextManager[Any]:
    """Within, autograd records what was asked for; torch.func differentiates without being asked."""
    if gradients is None:
        tensors = (leaf for leaf in pytree.tree_leaves(components) if isinstance(leaf, Tensor))
        gradients = any(tensor.requires_grad for tensor in tensors)
    transformed = torch._C._are_functorch_transforms_active()
    return contextlib.nullcontext() if gradients or transformed else torch.no_grad()


def coverage(model: nn.Module | Program, example: Any) -> Coverage:
    """Every operation on the random path, sorted into exact, approximate (with the reason) and missing.

    Args:
        model: A module, or the result of `capture`.
        example: An input tensor, a tuple of them, or a dict by name, or their shapes; every one is taken as random.

    Returns:
        The operations, with the reasons.

    Raises:
        CaptureError: If the model cannot be captured, or the example does not fit it.

    Example:
        >>> covered = vp.coverage(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)), (1, 8))
        >>> covered.complete, [entry.op for entry in covered.approximate]  # print(covered) has the reasons
        (True, ['aten.layer_norm.default'])
    """
    program = model if isinstance(model, Program) else capture(model, example)
    plan = plan_for(program, tuple(program.inputs))
    with trusted():
        return Coverage(tuple(_static_entry(plan, node) for node in program.nodes if _counts(plan, node)))


def plan_for(program: Program, random: tuple[Node, ...]) -> Plan:
    """The plan of a program by the rules of now: a later one counts from the next propagation on."""
    revision, plan = program.facts.get(("plan", random), (None, None))
    if revision != rules_revision():
        plan = make_plan(program, random)
        program.facts["plan", random] = rules_revision(), plan
    return cast(Plan, plan)


def _counts(plan: Plan, node: Node) -> bool:
    return node in plan.rules or node in plan.missing


def _static_entry(plan: Plan, node: Node) -> Entry:
    if node in plan.missing:
        return _entry(node, "missing", ())
    reasons = reasons_of(plan, node, lambda: _forms(plan, node))
    return _entry(node, "approximate" if reasons else "exact", tuple(reasons))


def _forms(plan: Plan, node: Node) -> Any:
    """A node's arguments as shapes alone; one that is read twice is one object, by which rules know it."""

    def stand_in(operand: Node) -> Any:
        if not isinstance(operand.info, TensorInfo):
            return None
        empty = operand.info.empty()
        return Moments(empty, empty) if plan.random(operand) else empty

    empty = {operand: stand_in(operand) for operand in node.operands}
    return resolve((node.args, node.kwargs), empty.__getitem__)


def _entry(node: Node, status: Status, reasons: tuple[str, ...], moments: Moments | None = None) -> Entry:
    overload = isinstance(node.target, torch._ops.OpOverload)
    operation = str(node.target) if overload else getattr(node.target, "__name__", str(node.target))
    return Entry(node.name, operation, node.module, node.line, status, reasons, moments)


def _result(evaluation: Evaluation, calls: dict[str, ModuleCalls]) -> Result:
    program, env = evaluation.plan.program, evaluation.env
    outputs = [env.get(out, out) if isinstance(out, Node) else out for out in program.outputs]
    entries = tuple(_dynamic_entry(evaluation, node) for node in program.nodes if _counts(evaluation.plan, node))
    values = {path: [env.get(node) for node in call.outputs] for path, call in calls.items()}
    random = {path: tuple(v for v in several if isinstance(v, Moments)) for path, several in values.items()}
    moments = {path: several for path, several in random.items() if several}
    return Result(
        pytree.tree_unflatten(outputs, program.output_spec),
        entries,
        moments,
        {path: calls[path].class_name for path in moments},
        evaluation.assumption,
    )


def _dynamic_entry(evaluation: Evaluation, node: Node) -> Entry:
    value = evaluation.env.get(node)
    moments = value if isinstance(value, Moments) else None
    if node in evaluation.sampled:
        return _entry(node, "sampled", ("estimated by sampling for want of a rule",), moments)
    reasons = tuple(evaluation.notes.get(node, ()))
    return _entry(node, "approximate" if reasons else "exact", reasons, moments)
