"""Numbers over seeds, and when a difference between two of them counts.

Cells of one seed share data, split, order and first weights, so that they are compared seed by seed: a difference
counts when zero lies outside the 95 % interval of Student's t for the mean of the differences. With fewer than two
seeds in common nothing counts. A run that diverged has an infinite loss: a side none of whose runs diverged is lower
than a side all of whose runs did, and otherwise nothing counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .environment import require
from .protocol import TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Outcome

HOLDS, FAILS, NOISE = "holds", "does not hold", "within noise"  # of the statement that one side is lower
LEVEL = 0.05  # the share of differences that count where there is none


class Decision(str):
    """A verdict that a test of a difference gave, with its p-value: how often chance alone gives such a difference."""

    p: float

    def __new__(cls, verdict: str, p: float) -> Decision:
        """The verdict as a string, which it equals."""
        decision = super().__new__(cls, verdict)
        decision.p = p
        return decision


Metric = Callable[[Outcome], float]  # infinite where training diverged, NaN where there is nothing to measure


def final(name: str) -> Metric:
    """The last value of a curve."""

    def metric(outcome: Outcome) -> float:
        end = outcome.last(name)
        if end is None:
            return math.inf if outcome.diverged else math.nan
        return end if math.isfinite(end) and not outcome.diverged else math.inf

    return metric


def final_error(outcome: Outcome, curve: str = VALID_ACCURACY) -> float:
    """One minus the validation accuracy at the end, so that lower is better."""
    accuracy = final(curve)(outcome)
    return math.inf if math.isinf(accuracy) else 1.0 - accuracy


def generalization_gap(training: str) -> Metric:
    """The validation loss at the end less a loss on the training images, whose curve is named."""

    def metric(outcome: Outcome) -> float:
        return math.inf if outcome.diverged else final(VALID_LOSS)(outcome) - final(training)(outcome)

    return metric


def average_loss(outcome: Outcome) -> float:
    """The mean of the running training loss over all epochs, a measure of speed."""
    values = outcome.curves.get(TRAIN_LOSS)
    return math.inf if outcome.diverged else statistics.fmean(values) if values else math.nan


def log_rate(outcome: Outcome) -> float:
    """The decimal logarithm of the learning rate found."""
    return math.log10(outcome.search.lr)


@dataclass(frozen=True)
class Sample:
    """One value a seed, infinite or NaN where the run diverged; `ids` are the seeds, 0, 1, ... if they are left out."""

    values: tuple[float, ...]
    ids: tuple[int, ...] = ()

    @property
    def seeds(self) -> int:
        """How many values there are."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Over seeds; infinite if any run diverged."""
        return statistics.fmean(self.values) if self.all_finite else math.inf

    @property
    def std(self) -> float:
        """The sample standard deviation; NaN for a single seed or where a run diverged."""
        return statistics.stdev(self.values) if self.seeds > 1 and self.all_finite else math.nan

    @property
    def all_finite(self) -> bool:
        """True if no run diverged."""
        return all(map(math.isfinite, self.values))

    @property
    def by_seed(self) -> dict[int, float]:
        """The values by their seeds."""
        return dict(zip(self.ids or range(self.seeds), self.values, strict=True))

    @property
    def none_finite(self) -> bool:
        """True if every run diverged."""
        return not any(map(math.isfinite, self.values))

    def map(self, function: Callable[[float], float]) -> Sample:
        """A function of every value."""
        return Sample(tuple(map(function, self.values)), self.ids)

    def text(self, digits: int = 3, factor: float = 1.0, unit: str = "") -> str:
        """``0.123 ± 0.004 (3 seeds)``: two significant digits of the deviation, and the mean to the same decimal."""
        diverged = sum(not math.isfinite(value) for value in self.values)
        if diverged:
            return f"diverged in {diverged} of {self.seeds} seeds"
        mean, std = self.mean * factor, self.std * factor
        if std > 0:
            decimals = max(0, 1 - math.floor(math.log10(std)))
            value = f"{mean:.{decimals}f} ± {std:.{decimals}f}"
        else:
            value = number(mean, digits) + " ± 0" * (std == 0.0)
        return f"{value}{unit} ({self.seeds} seed{'s' * (self.seeds != 1)})"

    def percent(self) -> str:
        """The text of shares, in percent."""
        return self.text(3, 100, " %")


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent where it can be avoided."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) or not math.isfinite(value) else f"{value:.0f}"


def lower(a: Sample, b: Sample) -> str:
    """Verdict on `a` being lower than `b` beyond the noise."""
    return _lost(a, b) or _decided(_differences(a, b), 0.0, equal=NOISE)


def at_most(a: Sample, b: Sample, limit: float) -> str:
    """Verdict on the mean of a - b being at most a limit, with the noise to spare on either side."""
    return _lost(a, b) or _decided(_differences(a, b), limit)


def within(a: Sample, b: Sample, tolerance: float) -> str:
    """Verdict on the means differing by at most the tolerance, with the noise to spare on either side."""
    if lost := _lost(a, b):
        return FAILS if lost == HOLDS else lost  # whichever side diverged
    differences = _differences(a, b)
    if differences and statistics.fmean(differences) < 0:
        differences = [-value for value in differences]
    return _decided(differences, tolerance)


def _differences(a: Sample, b: Sample) -> list[float]:
    """a - b for every seed in common."""
    first, second = a.by_seed, b.by_seed
    return [first[seed] - second[seed] for seed in first if seed in second]


def _lost(a: Sample, b: Sample) -> str:
    """The verdict on which is lower where runs diverged; empty where none did."""
    if a.all_finite and b.all_finite:
        return ""
    return HOLDS if a.all_finite and b.none_finite else FAILS if a.none_finite and b.all_finite else NOISE


def _decided(differences: Sequence[float], limit: float, equal: str = HOLDS) -> Decision:
    """Verdict on the mean of differences being below a limit, by Student's t; one difference decides nothing.

    `equal` is the verdict where all differences are the limit.
    """
    if len(differences) < 2:
        return Decision(NOISE, math.nan)
    above, spread = statistics.fmean(differences) - limit, statistics.stdev(differences)
    if spread == 0:
        return Decision(equal if above == 0 else HOLDS if above < 0 else FAILS, 0.0)
    t = above * math.sqrt(len(differences)) / spread
    p = 2 * float(require("scipy.special", "A verdict").stdtr(len(differences) - 1, -abs(t)))  # both tails
    return Decision(NOISE if p >= LEVEL else HOLDS if t < 0 else FAILS, p)
