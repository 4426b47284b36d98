"""What rules judge by: outcomes picked by what they are, and the four verdicts with the ways they combine."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...protocol.experiments import PAPER_BATCH
from ...protocol.labels import method_label, start_label
from ...protocol.records import TRAIN_LOSS, Outcome
from ...seed_statistics import FAILS, HOLDS, NOISE, Metric, Sample, final

MISSING = "no data"
Case = TypeVar("Case")
_KIND = operator.attrgetter("experiment", "method", "start", "variant", "batch_size", "lr_max")  # all but the seed


@dataclass(frozen=True)
class Judgement:
    """A verdict with the numbers it rests on."""

    verdict: str
    measured: tuple[str, ...]


class NotRun(Exception):
    """What a rule needs was not run or not recorded."""

    def __init__(self, what: str, *experiments: str) -> None:
        self.lines = (what, f"to be made by: varprop reproduce {' '.join(experiments)} --seeds 3")


@dataclass(frozen=True)
class Evidence:
    """All outcomes, and the bound of the learning rate that is judged at."""

    outcomes: tuple[Outcome, ...]
    bound: float | None = None
    benchmarks: Sequence[Path] = ()  # where the measured overhead may lie

    def find(
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
        found = {o.cell.seed: metric(o) for o in self.outcomes if _KIND(o.cell) == wanted}
        known = {seed: value for seed, value in found.items() if not math.isnan(value)}
        return Sample(tuple(known.values()), tuple(known)) if known else None

    def sample(
        self, experiment: str, method: str, start: str, metric: Metric, variant: str = "", **setting: Any
    ) -> Sample:
        """The same; raises `NotRun` where there is none."""
        found = self.find(experiment, method, start, metric, variant, **setting)
        if found is None:
            name = f"{method_label(method, variant)} from {start_label(start)}"
            raise NotRun(f"{name} was not run, or this was not recorded", experiment)
        return found

    def spread(self, experiment: str, cells: Sequence[tuple[str, str]], bound: float | None = None) -> Sample:
        """The highest final training loss of several methods and starts over the lowest, seed by seed."""
        found = [self.sample(experiment, *cell, final(TRAIN_LOSS), bound=bound).by_seed for cell in cells]
        seeds = [seed for seed in found[0] if all(seed in values for values in found)]
        if not seeds:
            raise NotRun("there is no seed in common", experiment)
        ends = [[values[seed] for values in found] for seed in seeds]
        ratios = [max(e) / min(e) if min(e) > 0 and math.isfinite(max(e)) else math.inf for e in ends]
        return Sample(tuple(ratios), tuple(seeds))

    def ran(self, experiments: Sequence[str]) -> list[str]:
        """Those of the experiments that have an outcome at this bound; raises `NotRun` if none has."""
        there = {outcome.cell.experiment for outcome in self.outcomes if outcome.cell.lr_max == self.bound}
        found = [name for name in experiments if name in there]
        if not found:
            raise NotRun("none of the experiments was run", *experiments)
        return found


def judged(rule: Callable[[Case], Judgement], case: Case) -> Judgement:
    """What a rule finds; what is missing, with the command that would make it, where it cannot find anything."""
    try:
        return rule(case)
    except NotRun as missing:
        return Judgement(MISSING, missing.lines)


def each(rule: Callable[[Case], Judgement], cases: Iterable[Case]) -> Judgement:
    """A rule that must hold in all cases, with the lines of each."""
    parts = [judged(rule, case) for case in cases]
    lines = dict.fromkeys(line for part in parts for line in part.measured)
    return Judgement(all_of(part.verdict for part in parts), tuple(lines))


def all_of(verdicts: Iterable[str]) -> str:
    """One verdict of several parts, all of which must hold."""
    parts = list(verdicts)
    if not parts or MISSING in parts:
        return MISSING
    return FAILS if FAILS in parts else HOLDS if set(parts) == {HOLDS} else NOISE


def most_of(verdicts: Sequence[str]) -> str:
    """Whether at least half of several cases hold; undecided ones count neither way."""
    wins, undecided = verdicts.count(HOLDS), verdicts.count(NOISE)
    return HOLDS if 2 * wins >= len(verdicts) else NOISE if 2 * (wins + undecided) >= len(verdicts) else FAILS


def opposite(verdict: str) -> str:
    """That on the contrary; what is not decided stays so."""
    return {HOLDS: FAILS, FAILS: HOLDS}.get(verdict, verdict)


def in_every_seed(passed: Sequence[bool]) -> str:
    """A threshold that all seeds must pass; some seeds alone decide nothing."""
    return HOLDS if all(passed) else FAILS if not any(passed) else NOISE
