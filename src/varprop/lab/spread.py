"""Numbers with their spread over seeds, and when a difference between two of them counts.

A difference of means counts when it is larger than twice the standard deviation that the difference of two single runs
would have: ``|a - b| > 2 sqrt(s_a^2 + s_b^2)``, with the sample standard deviations over seeds. That is stricter than a
test on the means, and stays as strict with more seeds. Where one side has a single seed, the other side's spread stands
for both; where both have, no difference counts. A run that diverged has an infinite loss: a side none of whose runs
diverged is lower than a side all of whose runs did, and otherwise nothing counts.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

Order = Literal["lower", "higher", "noise"]


@dataclass(frozen=True)
class Sample:
    """One value a seed, infinite or NaN where the run diverged."""

    values: tuple[float, ...]

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
        """Whether no run diverged."""
        return all(map(math.isfinite, self.values))

    @property
    def none_finite(self) -> bool:
        """Whether every run diverged."""
        return not any(map(math.isfinite, self.values))

    def text(self, digits: int = 3, factor: float = 1.0, unit: str = "") -> str:
        """``0.123 ± 0.004 (3 seeds)``."""
        diverged = sum(not math.isfinite(value) for value in self.values)
        if diverged:
            return f"diverged in {diverged} of {self.seeds} seeds"
        value = with_spread(self.mean * factor, self.std * factor, digits)
        return f"{value}{unit} ({self.seeds} seed{'s' * (self.seeds != 1)})"


def with_spread(mean: float, std: float, digits: int = 3) -> str:
    """Two significant digits of the standard deviation, and the mean to the same decimal."""
    if math.isnan(std):
        return number(mean, digits)
    if std == 0.0:
        return f"{number(mean, digits)} ± 0"
    decimals = max(0, 1 - math.floor(math.log10(std)))
    return f"{mean:.{decimals}f} ± {std:.{decimals}f}"


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent where it can be avoided."""
    return f"{value:.{digits}g}" if abs(value) < 10 ** (digits - 1) or not math.isfinite(value) else f"{value:.0f}"


def noise(a: Sample, b: Sample) -> float:
    """Twice the standard deviation of the difference of two single runs; NaN where it cannot be known."""
    first, second = a.std, b.std
    if a.all_finite and b.all_finite:
        first = second if math.isnan(first) else first
        second = first if math.isnan(second) else second
    return 2.0 * math.hypot(first, second)


def order(a: Sample, b: Sample) -> Order:
    """Whether `a` is lower or higher than `b` by more than the noise."""
    if not (a.all_finite and b.all_finite):
        return "lower" if a.all_finite and b.none_finite else "higher" if a.none_finite and b.all_finite else "noise"
    difference, margin = a.mean - b.mean, noise(a, b)
    if math.isnan(margin) or abs(difference) <= margin:
        return "noise"
    return "lower" if difference < 0 else "higher"
