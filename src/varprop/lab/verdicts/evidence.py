"""What rules judge by: outcomes picked by what they are, and the four verdicts with the ways they combine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..protocol.experiments import PAPER_BATCH
from ..protocol.records import Outcome
from .seed_statistics import Metric, Sample, difference, order

HOLDS, FAILS, NOISE, MISSING = "holds", "does not hold", "within noise", "no data"


@dataclass(frozen=True)
class Judgement:
    """A verdict with the numbers it rests on."""

    verdict: str
    measured: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """All outcomes, and the bound of the learning rate that is judged at."""

    outcomes: tuple[Outcome, ...]
    bound: float | None = None

    def sample(
        self,
        experiment: str,
        method: str,
        start: str,
        metric: Metric,
        variant: str = "",
        batch_size: int = PAPER_BATCH,
        bound: float | None = None,
    ) -> Sample | None:
        """A metric over seeds, at another bound if one is given; None where it was not run or leaves nothing."""
        wanted = (experiment, method, start, variant, batch_size, self.bound if bound is None else bound)
        found = {o.cell.seed: metric(o) for o in self.outcomes if _key(o) == wanted}
        known = {seed: value for seed, value in found.items() if not math.isnan(value)}
        return Sample(tuple(known.values()), tuple(known)) if known else None

    def ran(self, experiments: Iterable[str]) -> list[str]:
        """Those of the experiments that have an outcome at this bound."""
        there = {outcome.cell.experiment for outcome in self.outcomes if outcome.cell.lr_max == self.bound}
        return [name for name in experiments if name in there]


def _key(outcome: Outcome) -> tuple[object, ...]:
    cell = outcome.cell
    return cell.experiment, cell.method, cell.start, cell.variant, cell.batch_size, cell.lr_max


def no_data(command: str, *lines: str) -> Judgement:
    """What is missing, with the command that would make it."""
    return Judgement(MISSING, (*lines, f"to be made by: {command}"))


def all_of(verdicts: Iterable[str]) -> str:
    """One verdict of several parts, all of which must hold."""
    parts = list(verdicts)
    if not parts or MISSING in parts:
        return MISSING
    return FAILS if FAILS in parts else HOLDS if set(parts) == {HOLDS} else NOISE


def joined(parts: Sequence[Judgement]) -> Judgement:
    """All of several findings, with the lines of each."""
    return Judgement(all_of(part.verdict for part in parts), tuple(line for part in parts for line in part.measured))


def lower(a: Sample, b: Sample) -> str:
    """Whether `a` is lower than `b` beyond the noise."""
    return {"lower": HOLDS, "higher": FAILS, "noise": NOISE}[order(a, b)]


def in_every_seed(passed: Sequence[bool]) -> str:
    """A threshold that all seeds must pass; some seeds alone decide nothing."""
    return HOLDS if all(passed) else FAILS if not any(passed) else NOISE


def at_most(a: Sample, b: Sample, limit: float) -> str:
    """Whether the mean of a - b is at most a limit, with the noise to spare on either side."""
    if not (a.all_finite and b.all_finite):
        return HOLDS if a.all_finite and b.none_finite else FAILS if a.none_finite and b.all_finite else NOISE
    mean, margin = difference(a, b)
    if math.isnan(mean):
        return NOISE
    return HOLDS if mean + margin <= limit else FAILS if mean - margin > limit else NOISE


def within(a: Sample, b: Sample, tolerance: float) -> str:
    """Whether the means differ by at most the tolerance, with the noise to spare on either side."""
    if not (a.all_finite and b.all_finite):
        return FAILS if a.all_finite != b.all_finite else NOISE
    mean, margin = difference(a, b)
    if math.isnan(mean):
        return NOISE
    return HOLDS if abs(mean) + margin <= tolerance else FAILS if abs(mean) - margin > tolerance else NOISE
