"""`vp.inspect`: capture, propagation, gradients, measured numbers and findings, one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..engine.api import capture, evaluation_for
from ..engine.evaluation import Evaluation, evaluate
from ..engine.inputs import example_for, fitted_components
from ..engine.plan import make_plan, require_complete
from ..errors import VarpropError
from ..graph.node import Node
from ..graph.program import Program
from ..graph.tracing import preserved_modes
from ..norm.batchnorm import has_seen_nothing
from .findings import ARGUMENTS, FindingContext, findings, gradient_ratio
from .gradients import gradients
from .measure import Estimates, MeasuredNumbers, batch_extent, measure, trial_size
from .regions import Region, first_moments, regions_of
from .report import Report
from .rows import make_row, std_of

ProgressCallback = Callable[[str, float, int], None]
STEPS = 3  # capture, propagation, gradients
BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
SECONDS = 1.0  # between two reports within a step


def inspect(
    model: nn.Module | Program,
    moments: Any,
    *,
    example: Any = None,
    check: Any = None,
    samples: int = 256,
    seed: int = 0,
    k: float = 4.0,
    on_missing: Literal["raise", "sample"] = "sample",
    covariance: Literal["full"] | None = None,
    progress: ProgressCallback | None = None,
) -> Report:
    """See inside a network without data: statistics of every layer, gradients, and what is wrong with it.

    Args:
        model: A module in the mode it is to be looked at, or the result of `capture`. Batch norms that have seen no
            data normalize by the statistics of a large batch, as those in training mode do.
        moments: Moments of the data, as for `propagate`.
        example: The real shape, ``(1, 3, 224, 224)`` or an input of it, where `moments` do not know it.
        check: Inputs to measure the same numbers on: a tensor, a loader of batches, or ``"gaussian"`` for random ones
            with the given moments.
        samples: How many inputs of `check` to use at most.
        seed: Of the random draws of `check`.
        k: Half width of the activation ranges, in standard deviations.
        on_missing: As for `propagate`.
        covariance: ``"full"`` follows the covariance of all units, as for `propagate`: with that of the data, from
            `input_moments`, it is near the truth also about trained networks, whose units are far from independent;
            with that of every class (``labels=``), whose layers pull classes apart.
        progress: Called with what is being done, the number of steps done and of all steps; within long ones once a
            second, with the part of the step that is done.

    Returns:
        Rows, findings, and their forms for people and programs.

    Raises:
        CaptureError: If the model cannot be captured or the input does not fit it.
        MissingRule: If operations have no rule and ``on_missing="raise"``.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> _ = nn.init.zeros_(model[0].weight)
        >>> report = vp.inspect(model, vp.Moments(0.0, 1.0), example=(1, 8))
        >>> report.findings[0].kind, report.findings[0].where
        ('constant', '0')
    """
    if on_missing not in ("raise", "sample"):
        raise ValueError(f'on_missing must be "raise" or "sample", not {on_missing!r}.')
    evaluation_class = evaluation_for(covariance)
    with_example = example is not None or isinstance(model, Program)
    example = None if isinstance(model, Program) else example_for(model, moments, example)
    runs = 0 if check is None else math.ceil(samples / _batch_extent(model, example))
    step = _Steps(progress or (lambda text, done, total: None), STEPS + runs)
    step("capturing the graph")
    program, unsettled = (model, 0) if isinstance(model, Program) else captured(model, example)
    step("propagating moments")
    evaluation = evaluated(program, moments, on_missing, step.within, evaluation_class)
    step("following gradients back")
    back, regions = gradients(evaluation), regions_of(evaluation)
    nothing = MeasuredNumbers([{} for _ in regions], 0.0)
    data = trial = nothing
    if check is not None:
        data = measure(evaluation, regions, check, samples, seed, lambda: step("running data"))
    elif not unsettled:
        trial = _trial(evaluation, regions, backward=False) or nothing
    untried = check is None and not unsettled and trial is nothing
    with torch.no_grad():
        seen = zip(regions, data.regions, trial.regions, strict=True)
        rows = [make_row(evaluation, back, region, k, *estimates) for region, *estimates in seen]

    def gradients_on_trial() -> list[Estimates]:
        return (_trial(evaluation, regions, backward=True) or nothing).regions

    shapes = [tuple(node.info.shape) for node in program.inputs]
    example_again = f", example={shapes[0] if len(shapes) == 1 else tuple(shapes)}" if with_example else ""
    context = FindingContext(
        unsettled=unsettled,
        arguments=ARGUMENTS + example_again,
        check=check,
        measured_input_std=data.input_std,
        input_std=std_of(evaluation, program.inputs),
        gradients=gradients_on_trial,
        untried=untried,
    )
    return Report(
        model=type(program.model).__name__,
        parameters=sum(parameter.numel() for parameter in program.model.parameters()),
        rows=tuple(rows),
        findings=findings(rows, context),
        inputs=tuple(_described(evaluation, node) for node in program.inputs),
        gradient_ratio=gradient_ratio(rows),
        check="" if check is None else "gaussian" if isinstance(check, str) else "data",
        covariance=covariance or "",
        source=(evaluation, tuple(regions)),
    )


def _trial(evaluation: Evaluation, regions: list[Region], backward: bool) -> MeasuredNumbers | None:
    """Numbers on a few random inputs; None where the model cannot be run on them as it is."""
    program = evaluation.plan.program
    if any(isinstance(module, BATCH_NORM) and module.training for module in program.model.modules()):
        return None  # normalized by the statistics of a batch, of which the example may have a single input
    size = trial_size(program)
    if not size:
        return None
    try:
        return measure(evaluation, regions, "gaussian", size, 0, backward=backward)
    except (VarpropError, RuntimeError, IndexError, ValueError):
        return None


def captured(model: nn.Module, example: Any) -> tuple[Program, int]:
    """The model, its batch norms that have seen no data as in training, and how many of these there are."""
    new = [module for module in model.modules() if not module.training and has_seen_nothing(module)]
    with preserved_modes(model):
        for module in new:
            module.training = True
        return capture(model, example), len(new)


class _Steps:
    """Counts the steps as they are reported, and within one tells once a second how much of it is done."""

    def __init__(self, progress: ProgressCallback, total: int) -> None:
        self.progress, self.total, self.done = progress, total, -1
        self.text, self.told = "", 0.0

    def __call__(self, text: str) -> None:
        self.done, self.text, self.told = self.done + 1, text, time.monotonic()
        self.progress(text, self.done, self.total)

    def within(self, done: int, total: int) -> None:
        """So much of the present step is done."""
        if time.monotonic() - self.told >= SECONDS:
            self.told = time.monotonic()
            self.progress(f"{self.text} ({done} of {total} operations)", self.done + done / total, self.total)


def _batch_extent(model: nn.Module | Program, example: Any) -> int:
    """How many inputs one run takes."""
    if isinstance(model, Program):
        return batch_extent(model)
    first = next((leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)), None)
    return int(first.shape[0]) if first is not None and first.ndim else 1


@torch.no_grad()
def evaluated(
    program: Program,
    moments: Any,
    on_missing: str,
    report: Callable[[int, int], None] | None = None,
    evaluation_class: type[Evaluation] = Evaluation,
) -> Evaluation:
    """Every random value of a captured model; `report` is told how many operations are done, and of how many."""
    components, shares = fitted_components(program, moments)
    plan = make_plan(program, [node for node, value in components[0].items() if not isinstance(value, torch.Tensor)])
    if on_missing == "raise":
        require_complete(plan)
    wanted = [node for node in program.nodes if plan.random(node)]
    progress = None if report is None else lambda done: report(done, len(program.nodes))
    return evaluate(plan, components, shares, evaluation_class, wanted, progress)


def _described(evaluation: Evaluation, node: Node) -> dict[str, Any]:
    """Name, extents, mean and std of an input."""
    random = evaluation.plan.random(node)
    about: dict[str, Any] = {"name": node.name, "extents": list(node.info.shape), "random": random}
    if random and (moments := first_moments(evaluation, node)) is not None:
        about |= {"mean": float(moments.mean.double().mean()), "std": float(moments.var.double().mean().sqrt())}
    return about
