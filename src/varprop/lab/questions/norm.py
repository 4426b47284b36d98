"""What does the length of the weights do, if the function does not depend on it?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..report.series import Figure, Panel
from ..training.task import Task
from ..verdicts.evidence import Judgement, in_every_seed
from ..verdicts.seed_statistics import Sample
from .arms import Arm, experiment, normalized_layers
from .lines import BANDS, line
from .records import Question, Records

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)
RATES = tuple(float(f"{0.01 * factor:.3g}") for factor in FACTORS)
MATTERS, ALIKE = 1.1, 1.05  # highest training loss over lowest


@torch.no_grad()
def lengthened(factor: float, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """The same function on weights that are so many times as long."""
    for layer in normalized_layers(model):
        layer.weight.mul_(factor)
    return model


def named(factor: float) -> str:
    """Its arm."""
    return f"weights x {factor:.2g}"


def _spread(samples: Sequence[Sample]) -> Sample:
    """The highest loss over the lowest, seed by seed."""
    by_seed = list(zip(*(one.values for one in samples), strict=True))
    return Sample(tuple(max(v) / min(v) if math.isfinite(max(v)) else math.inf for v in by_seed), samples[0].ids)


def _judged(losses: Callable[[Records], list[Sample]], passes: Callable[[float], bool], records: Records) -> Judgement:
    found = losses(records)
    spread = _spread(found)
    means = ", ".join(f"{one.mean:.3g}" for one in found)
    line = f"training loss {means} from the shortest to the longest, highest over lowest {spread.text()}"
    return Judgement(in_every_seed([passes(value) for value in spread.values]), (line,))


def _at_one_rate(records: Records) -> list[Sample]:
    return [records.loss(named(factor), RATES[2]) for factor in FACTORS]


def _at_rates_in_proportion(records: Records) -> list[Sample]:
    return [records.loss(named(factor), rate) for factor, rate in zip(FACTORS, RATES, strict=True)]


def _at_own_rates(records: Records) -> list[Sample]:
    return [records.loss(named(factor)) for factor in FACTORS]


def _figure(records: Records) -> Figure:
    def lines(place: Callable[[float, float], float]) -> Panel:
        drawn = []
        for look, factor in enumerate(FACTORS):
            runs = zip(*(records.loss(named(factor), rate).values for rate in RATES), strict=True)
            finite = [[v if math.isfinite(v) else None for v in run] for run in runs]
            drawn.append(line(named(factor), look, [place(rate, factor) for rate in RATES], finite))
        return Panel("", tuple(drawn))

    panels = (
        Panel("over the learning rate", lines(lambda rate, factor: rate).series),
        Panel("over rate / length", lines(lambda rate, factor: rate / factor).series),
    )
    caption = f"Final training loss of AP2.{BANDS}"
    title = "Length of the first weights and learning rate"
    return Figure("norm", title, caption, panels, "learning rate (right: over the factor)", "training loss", x_log=True)


QUESTION = Question(
    "norm",
    "What does the length of the weights do?",
    tuple(Arm(named(f), rates=RATES, change=functools.partial(lengthened, f)) for f in FACTORS),
    experiment(epochs=4),
    (
        (
            f"at one rate, {RATES[2]:g}, lengths from 1/9 to 9 differ by more than {MATTERS} times in training loss",
            functools.partial(_judged, _at_one_rate, lambda spread: spread > MATTERS),
        ),
        (
            f"with rates in proportion to the length they differ by at most {ALIKE} times",
            functools.partial(_judged, _at_rates_in_proportion, lambda spread: spread <= ALIKE),
        ),
        (
            f"each at the best of five rates they differ by at most {ALIKE} times",
            functools.partial(_judged, _at_own_rates, lambda spread: spread <= ALIKE),
        ),
    ),
    _figure,
)
