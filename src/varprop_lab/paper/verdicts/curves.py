"""Numbers of one run's curves: how far evaluation is from training, how rough a curve is, how far it has risen."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence

from ...protocol.experiments import Protocol
from ...protocol.records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_LOSS, Outcome
from ...seed_statistics import Metric

Span = tuple[int, int | None]
EARLY: Span = (0, 10)  # epochs 1 to 10: where the paper's figures differ most
LATE: Span = (10, None)
ROUGH = "roughness is the mean absolute second difference of the logarithm of a loss from epoch to epoch"

# The weights of the running mean vanish to `remain` in one epoch, so that it is as old, on average, as this.
_LAG = 1 / math.log(1 / Protocol().remain)


def evaluation_gap(span: Span) -> Metric:
    """Median over epochs of evaluation loss / running loss - 1, the lag of the running loss taken out; signed."""
    return _of_log_gaps(span, statistics.median)


def evaluation_distance(span: Span) -> Metric:
    """How far the two are from each other on average, either way: what goes up and down about the other is not near."""
    return _of_log_gaps(span, lambda gaps: statistics.fmean(map(abs, gaps)))


def _of_log_gaps(span: Span, summary: Callable[[Sequence[float]], float]) -> Metric:
    """A summary of log(evaluation loss / running loss) over epochs, as a share.

    The running loss after an epoch is that of 0.43 epochs before. What it will be so much later is read, in the
    logarithm, on the line to its next value; the last epoch has none and is left out.
    """

    def metric(outcome: Outcome) -> float:
        if outcome.diverged:
            return math.inf
        evaluation, training = (_logs(outcome, name) for name in (TRAIN_EVAL_LOSS, TRAIN_LOSS))
        now = [a + _LAG * (b - a) for a, b in itertools.pairwise(training)]
        gaps = [e - t for e, t in zip(evaluation, now, strict=False)][slice(*span)]
        return math.expm1(summary(gaps)) if gaps else math.nan

    return metric


def roughness(curve: str, span: Span = (0, None)) -> Metric:
    """Mean of the absolute second differences of the logarithm: 0 for a curve that falls by the same share."""

    def metric(outcome: Outcome) -> float:
        if outcome.diverged:
            return math.inf
        logs = _logs(outcome, curve)[slice(*span)]
        bends = [abs(a - 2 * b + c) for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
        return statistics.fmean(bends) if bends else math.nan

    return metric


def rougher_in_evaluation(span: Span) -> Metric:
    """How many times as rough as the running loss the loss in evaluation mode is."""
    evaluation, training = roughness(TRAIN_EVAL_LOSS, span), roughness(TRAIN_LOSS, span)

    def metric(outcome: Outcome) -> float:
        if outcome.diverged:
            return math.inf
        return evaluation(outcome) / training(outcome) if training(outcome) else math.nan

    return metric


def risen(outcome: Outcome) -> float:
    """By which share the validation loss ends above its lowest value: what overfitting costs."""
    values = outcome.curves.get(VALID_LOSS)
    return math.inf if outcome.diverged else values[-1] / min(values) - 1 if values and min(values) > 0 else math.nan


def _logs(outcome: Outcome, curve: str) -> Sequence[float]:
    values = outcome.curves.get(curve, [])
    return [math.log(value) for value in values] if all(0 < value < math.inf for value in values) else []
