"""What does the length of the weights do, if the function does not depend on it?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...figures import Figure, Panel
from ...seed_statistics import Sample
from ...training import Task, normalized_layers
from ..verdicts.evidence import Judgement, in_every_seed
from .runs import BANDS, TRAINED, Arm, Question, Records, Rule, experiment, line

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)
RATES = tuple(float(f"{0.01 * factor:.3g}") for factor in FACTORS)
MATTERS, ALIKE = 1.1, 1.05  # highest training loss over lowest


@torch.no_grad()
def lengthened(factor: float, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model of equal function on weights that are so many times as long."""
    for layer in normalized_layers(model).values():
        layer.weight.mul_(factor)
    return model


def named(factor: float) -> str:
    """Its arm."""
    return f"weights x {factor:.2g}"


def _differ_by(passes: Callable[[float], bool], rates: Sequence[float | None]) -> Rule:
    """The rule for the highest training loss over the lowest, by seed; a rate for every length, None for its best."""

    def rule(records: Records) -> Judgement:
        losses = [records.last(named(f), TRAINED, rate) for f, rate in zip(FACTORS, rates, strict=True)]
        by_seed = zip(*(sample.values for sample in losses), strict=True)
        spread = Sample(tuple(max(v) / min(v) if math.isfinite(max(v)) else math.inf for v in by_seed), losses[0].ids)
        means = ", ".join(f"{sample.mean:.3g}" for sample in losses)
        verdict = in_every_seed([passes(value) for value in spread.values])
        return Judgement(verdict, (f"{spread.text()} times", f"training losses {means}, shortest weights first"))

    return rule


def _figure(records: Records) -> Figure:
    def panel(title: str, position: Callable[[float, float], float]) -> Panel:
        drawn = []
        for look, factor in enumerate(FACTORS):
            runs = list(zip(*(records.last(named(factor), TRAINED, rate).values for rate in RATES), strict=True))
            drawn.append(line(named(factor), look, [position(rate, factor) for rate in RATES], runs))
        return Panel(title, tuple(drawn))

    panels = (
        panel("over the learning rate", lambda rate, factor: rate),
        panel("over rate / length", lambda rate, factor: rate / factor),
    )
    title = "Length of the first weights and learning rate"
    caption = f"Final training loss of AP2, in evaluation mode. {BANDS}"
    return Figure("norm", title, caption, panels, "learning rate (right: over the factor)", "training loss", x_log=True)


QUESTION = Question(
    "norm",
    "What does the length of the weights do?",
    tuple(Arm(named(f), rates=RATES, change=functools.partial(lengthened, f)) for f in FACTORS),
    experiment(epochs=4),
    (
        (
            f"at one rate, {RATES[2]:g}, lengths from 1/9 to 9 differ by more than {MATTERS} times in training loss",
            _differ_by(lambda spread: spread > MATTERS, [RATES[2]] * len(FACTORS)),
        ),
        (
            f"at rates in proportion to the length they differ by at most {ALIKE} times",
            _differ_by(lambda spread: spread <= ALIKE, RATES),
        ),
        (
            f"each at the best of five rates they differ by at most {ALIKE} times",
            _differ_by(lambda spread: spread <= ALIKE, [None] * len(FACTORS)),
        ),
    ),
    _figure,
)
