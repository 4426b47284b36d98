"""The inspection itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..engine.api import capture
from ..engine.evaluation import Evaluation as Walk
from ..engine.inputs import example_for, fitted_inputs
from ..engine.plan import make_plan, require_complete
from ..errors import VarpropError
from ..graph.node import Node
from ..graph.program import Program
from ..norm.batchnorm import has_seen_nothing
from .findings.judge import ARGUMENTS, FindingContext, findings, gradient_ratio
from .gradients.backward import gradients
from .numbers.collect import make_row
from .numbers.measure import Estimates, MeasuredNumbers, batch_extent, measure, trial_size
from .places import Place, first_moments, places
from .report import Report

ProgressCallback = Callable[[str, float, int], None]
STEPS = 3  # capture, propagation, gradients
BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
SECONDS = 1.0  # between two reports within a step


def inspect(
    model: nn.Module | Program,
    input: Any,
    *,
    example: Any = None,
    check: Any = None,
    samples: int = 256,
    seed: int = 0,
    k: float = 4.0,
    on_missing: Literal["raise", "sample"] = "sample",
    progress: ProgressCallback | None = None,
) -> Report:
    """See inside a network without data: statistics of every layer, gradients, and what is wrong with it.

    Args:
        model: A module in the mode it is to be looked at, or the result of `capture`. Batch norms that have seen no
            data normalize by the statistics of a large batch, as those in training mode do.
        input: Moments of the data, as for `propagate`.
        example: The real shape, ``(1, 3, 224, 224)`` or an input of it, where `input` does not know it.
        check: Inputs to measure the same numbers on: a tensor, a loader of batches, or ``"gaussian"`` for random ones
            with the given moments.
        samples: How many inputs of `check` to use at most.
        seed: Of the random draws of `check`.
        k: Half width of the activation ranges, in standard deviations.
        on_missing: As for `propagate`.
        progress: Called with what is being done, the number of steps done and of all steps; within long ones once a
            second, with the part of the step that is done.

    Returns:
        Rows, findings, and their forms for people and programs.

    Raises:
        CaptureError: If the model cannot be captured or the input does not fit it.
        MissingRule: If operations have no rule and ``on_missing="raise"``.
    """
    if on_missing not in ("raise", "sample"):
        raise ValueError(f'on_missing must be "raise" or "sample", not {on_missing!r}.')
    with_example = example is not None or isinstance(model, Program)
    example = None if isinstance(model, Program) else example_for(model, input, example)
    runs = 0 if check is None else math.ceil(samples / _batch_extent(model, example))
    step = _Steps(progress or (lambda text, done, total: None), STEPS + runs)
    step("capturing the graph")
    program, unsettled = (model, 0) if isinstance(model, Program) else captured(model, example)
    step("propagating moments")
    walk = walked(program, input, on_missing, step.within)
    step("following gradients back")
    back, found = gradients(walk), places(walk)
    nothing = MeasuredNumbers([{} for _ in found], 0.0)
    data = trial = nothing
    if check is not None:
        data = measure(walk, found, check, samples, seed, lambda: step("running data"))
    elif not unsettled:
        trial = _trial(walk, found, backward=False) or nothing
    with torch.no_grad():
        seen = zip(found, data.places, trial.places, strict=True)
        rows = [make_row(walk, back, place, k, *both) for place, *both in seen]

    def gradients_on_trial() -> list[Estimates]:
        return (_trial(walk, found, backward=True) or nothing).places

    context = FindingContext(
        unsettled, _arguments(program, with_example), check, data.input_std, _input_std(walk), gradients_on_trial
    )
    return Report(
        type(program.model).__name__,
        sum(parameter.numel() for parameter in program.model.parameters()),
        tuple(rows),
        findings(rows, context),
        tuple(_described(walk, node) for node in program.inputs),
        gradient_ratio(rows),
        "" if check is None else "gaussian" if isinstance(check, str) else "data",
        (walk, tuple(found)),
    )


def _trial(walk: Walk, places: list[Place], backward: bool) -> MeasuredNumbers | None:
    """Numbers on a few random inputs; None where the model cannot be run on them as it is."""
    program = walk.plan.program
    if any(isinstance(module, BATCH_NORM) and module.training for module in program.model.modules()):
        return None  # normalized by the statistics of a batch, of which the example may have a single input
    try:
        return measure(walk, places, "gaussian", trial_size(program), 0, backward=backward)
    except (VarpropError, RuntimeError, IndexError, ValueError):
        return None


def _input_std(walk: Walk) -> float:
    values = [first_moments(walk, node) for node in walk.plan.program.inputs if walk.plan.random(node)]
    variances = [float(value.var.double().mean()) for value in values if value is not None]
    return (sum(variances) / len(variances)) ** 0.5 if variances else 0.0


def captured(model: nn.Module, example: Any) -> tuple[Program, int]:
    """The model, its batch norms that have seen no data as in training, and how many of these there are."""
    new = [module for module in model.modules() if not module.training and has_seen_nothing(module)]
    for module in new:
        module.training = True
    try:
        return capture(model, example), len(new)
    finally:
        for module in new:
            module.training = False


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
def walked(program: Program, given: Any, on_missing: str, report: Callable[[int, int], None] | None = None) -> Walk:
    """Every random value of a captured model; `report` is told how many operations are done, and of how many."""
    values = fitted_inputs(program, given)
    plan = make_plan(program, [node for node, value in values.items() if not isinstance(value, torch.Tensor)])
    if on_missing == "raise":
        require_complete(plan)
    walk = Walk(plan, {**program.tensors(), **values})
    if report is not None:
        walk.report = lambda done: report(done, len(program.nodes))
    walk.run()
    walk.finish([node for node in program.nodes if plan.random(node)])
    return walk


def _arguments(program: Program, with_example: bool) -> str:
    """Those of a further call with this model and input."""
    shapes = [tuple(node.form.shape) for node in program.inputs]
    example = f", example={shapes[0] if len(shapes) == 1 else tuple(shapes)}" if with_example else ""
    return ARGUMENTS + example


def _described(walk: Walk, node: Node) -> dict[str, Any]:
    moments = first_moments(walk, node) if walk.plan.random(node) else None
    about: dict[str, Any] = {"name": node.name, "extents": list(node.form.shape), "random": walk.plan.random(node)}
    if moments is not None:
        about |= {"mean": float(moments.mean.double().mean()), "std": float(moments.var.double().mean().sqrt())}
    return about
