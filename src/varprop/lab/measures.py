"""One number from one outcome: infinite where training diverged, NaN where there is nothing to measure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from .records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, Outcome

Measure = Callable[[Outcome], float]


def final(name: str) -> Measure:
    """The last value of a curve; infinite where training diverged, NaN where there is no such curve."""

    def measure(outcome: Outcome) -> float:
        values = outcome.curves.get(name)
        if outcome.diverged:
            return math.inf
        return (values[-1] if math.isfinite(values[-1]) else math.inf) if values else math.nan

    return measure


def final_error(outcome: Outcome) -> float:
    """One minus the validation accuracy at the end, so that lower is better; infinite where training diverged."""
    accuracy = final(VALID_ACCURACY)(outcome)
    return math.inf if math.isinf(accuracy) else 1.0 - accuracy


def average_loss(outcome: Outcome) -> float:
    """The mean of the running training loss over all epochs, a measure of speed."""
    values = outcome.curves.get(TRAIN_LOSS)
    return math.inf if outcome.diverged else statistics.fmean(values) if values else math.nan


def evaluation_gap(outcome: Outcome) -> float:
    """Median over the second half of the epochs of |evaluation loss / running loss - 1|."""
    train, evaluation = outcome.curves.get(TRAIN_LOSS, []), outcome.curves.get(TRAIN_EVAL_LOSS, [])
    half = min(len(train), len(evaluation)) // 2
    gaps = [abs(b / a - 1) for a, b in list(zip(train, evaluation, strict=False))[half:] if a > 0]
    if outcome.diverged:
        return math.inf
    return statistics.median(gaps) if gaps else math.nan
