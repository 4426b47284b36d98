"""The inspection itself."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from ..capture import Program
from ..engine import capture, example_for, fitted_inputs
from ..moments import Moments
from ..node import Node
from ..plan import make_plan, require_complete
from ..walk import Walk
from .backward import gradients
from .findings import findings
from .measure import measure
from .places import first_moments, places
from .report import Report
from .rows import Row, make_row


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
) -> Report:
    """See inside a network without data: statistics of every layer, gradients, and what is wrong with it.

    Args:
        model: A module in the mode it is to be looked at, or the result of `capture`.
        input: Moments of the data, as for `propagate`.
        example: An input that gives the real shape where `input` has uniform axes.
        check: Inputs to measure the same numbers on: a tensor, a loader of batches, or ``"gaussian"`` for random ones
            with the given moments.
        samples: How many inputs of `check` to use at most.
        seed: Of the random draws of `check`.
        k: Half width of the activation ranges, in standard deviations.
        on_missing: As for `propagate`.

    Returns:
        Rows, findings, and their forms for people and programs.

    Raises:
        CaptureError: If the model cannot be captured or the input does not fit it.
        MissingRule: If operations have no rule and ``on_missing="raise"``.
    """
    if on_missing not in ("raise", "sample"):
        raise ValueError(f'on_missing must be "raise" or "sample", not {on_missing!r}.')
    program = model if isinstance(model, Program) else capture(model, example_for(model, input, example))
    walk = _walked(program, input, on_missing)
    back, found = gradients(walk), places(walk)
    measured = measure(walk, found, check, samples, seed) if check is not None else [{} for _ in found]
    with torch.no_grad():
        rows = [make_row(walk, back, place, k, seen) for place, seen in zip(found, measured, strict=True)]
    ratio = _gradient_ratio(rows)
    return Report(
        type(program.model).__name__,
        sum(parameter.numel() for parameter in program.model.parameters()),
        tuple(rows),
        findings(rows, ratio),
        tuple(_described(walk, node) for node in program.inputs),
        ratio,
        "" if check is None else "gaussian" if isinstance(check, str) else "data",
    )


@torch.no_grad()
def _walked(program: Program, given: Any, on_missing: str) -> Walk:
    values = dict(zip(program.inputs, fitted_inputs(program, given), strict=True))
    plan = make_plan(program, [node for node, value in values.items() if not isinstance(value, torch.Tensor)])
    if on_missing == "raise":
        require_complete(plan)
    walk = Walk(plan, {**program.tensors(), **values})
    walk.run()
    walk.finish([node for node in program.nodes if plan.random(node)])
    return walk


def _gradient_ratio(rows: list[Row]) -> float | None:
    """Of the first to the last layer with weights; of any layers where there are no two of them."""
    layers = [row for row in rows if row.leaf and row.gradient_total is not None]
    weighted = [row for row in layers if row.weighted]
    totals = [row.gradient_total or 0.0 for row in (weighted if len(weighted) > 1 else layers)]
    return totals[0] / totals[-1] if totals and totals[-1] else None


def _described(walk: Walk, node: Node) -> dict[str, Any]:
    moments = first_moments(walk, node) if walk.plan.random(node) else None
    about: dict[str, Any] = {"name": node.name, "extents": list(node.form.shape), "random": walk.plan.random(node)}
    if isinstance(moments, Moments):
        about |= {"mean": float(moments.mean.double().mean()), "std": float(moments.var.double().mean().sqrt())}
    return about
