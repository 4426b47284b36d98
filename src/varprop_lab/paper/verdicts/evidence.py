"""What rules judge by: outcomes picked by what they are, numbers of their curves, and how claims are registered."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...protocol import (
    PAPER_BATCH,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_LOSS,
    Outcome,
    Protocol,
    method_label,
    start_label,
)
from ...seed_statistics import FAILS, HOLDS, LEVEL, NOISE, Decision, Metric, Sample, final

MISSING = "no data"
Case = TypeVar("Case")
_KIND = operator.attrgetter("experiment", "method", "start", "variant", "batch_size", "lr_max")  # all but the seed


@dataclass(frozen=True)
class Judgement:
    """A verdict with the numbers it rests on."""

    verdict: str
    measured: tuple[str, ...]


class NotRun(Exception):
    """An outcome that a rule needs was not run or not recorded."""

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
        values = {o.cell.seed: metric(o) for o in self.outcomes if _KIND(o.cell) == wanted}
        finite = {seed: value for seed, value in values.items() if not math.isnan(value)}
        return Sample(tuple(finite.values()), tuple(finite)) if finite else None

    def sample(
        self, experiment: str, method: str, start: str, metric: Metric, variant: str = "", **setting: Any
    ) -> Sample:
        """A metric over seeds, as `find` gives it; raises `NotRun` where there is none."""
        sample = self.find(experiment, method, start, metric, variant, **setting)
        if sample is None:
            name = f"{method_label(method, variant)} from {start_label(start)}"
            raise NotRun(f"{name} was not run, or this was not recorded", experiment)
        return sample

    def spread(self, experiment: str, cells: Sequence[tuple[str, str]], bound: float | None = None) -> Sample:
        """The highest final training loss of several methods and starts over the lowest, seed by seed."""
        by_seed = [self.sample(experiment, *cell, final(TRAIN_LOSS), bound=bound).by_seed for cell in cells]
        seeds = [seed for seed in by_seed[0] if all(seed in values for values in by_seed)]
        if not seeds:
            raise NotRun("there is no seed in common", experiment)
        ends = [[values[seed] for values in by_seed] for seed in seeds]
        ratios = [max(e) / min(e) if min(e) > 0 and math.isfinite(max(e)) else math.inf for e in ends]
        return Sample(tuple(ratios), tuple(seeds))

    def ran(self, experiments: Sequence[str]) -> list[str]:
        """The experiments among these that have an outcome at this bound; raises `NotRun` if none has."""
        there = {outcome.cell.experiment for outcome in self.outcomes if outcome.cell.lr_max == self.bound}
        names = [name for name in experiments if name in there]
        if not names:
            raise NotRun("none of the experiments was run", *experiments)
        return names


def judged(rule: Callable[[Case], Judgement], case: Case) -> Judgement:
    """The judgement of a rule; where something was not run, no data, with the command that would make it."""
    try:
        return rule(case)
    except NotRun as missing:
        return Judgement(MISSING, missing.lines)


def each(rule: Callable[[Case], Judgement], cases: Iterable[Case]) -> Judgement:
    """A rule that must hold in all cases, with the lines of each."""
    judgements = [judged(rule, case) for case in cases]
    lines = dict.fromkeys(line for judgement in judgements for line in judgement.measured)
    return Judgement(all_of(judgement.verdict for judgement in judgements), tuple(lines))


def all_of(verdicts: Iterable[str]) -> str:
    """One verdict of several parts, all of which must hold.

    Of many parts that are neither true nor false some fail by chance. So the claim fails only where a part would fail
    at the level of one part divided by their number (Bonferroni). That all of many hold by chance is less likely than
    that one does, and needs no correction.
    """
    listed = list(verdicts)
    if not listed or MISSING in listed:
        return MISSING
    if set(listed) == {HOLDS}:
        return HOLDS
    failures = [verdict.p if isinstance(verdict, Decision) else 0.0 for verdict in listed if verdict == FAILS]
    p = min(1.0, len(listed) * min(failures, default=1.0))
    return Decision(FAILS if p < LEVEL else NOISE, p)


def most_of(verdicts: Sequence[str]) -> str:
    """Verdict on at least half of several cases holding; undecided ones count neither way."""
    wins, undecided = verdicts.count(HOLDS), verdicts.count(NOISE)
    return HOLDS if 2 * wins >= len(verdicts) else NOISE if 2 * (wins + undecided) >= len(verdicts) else FAILS


def opposite(verdict: str) -> str:
    """The verdict on the contrary statement; an undecided one stays undecided."""
    contrary = {HOLDS: FAILS, FAILS: HOLDS}.get(verdict, verdict)
    return Decision(contrary, verdict.p) if isinstance(verdict, Decision) else contrary


def in_every_seed(passed: Sequence[bool]) -> str:
    """A threshold that all seeds must pass; some seeds alone decide nothing."""
    return HOLDS if all(passed) else FAILS if not any(passed) else NOISE


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


Rule = Callable[[Evidence], Judgement]
REGISTERED: dict[str, Claim] = {}


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and how it is judged."""

    name: str
    text: str  # the sentence
    rule: str  # how the verdict is computed, in words
    figure: str  # ``experiment/figure`` that bears on it
    experiments: tuple[str, ...]  # that it is about
    judge: Rule


def claim(
    name: str,
    text: str,
    rule: str,
    figure: str = "",
    experiments: tuple[str, ...] = (),
    cases: Sequence[Any] | None = None,
    **settings: Any,
) -> Callable[[Callable[..., Judgement]], Callable[..., Judgement]]:
    """Registers the function below as what judges a claim; arguments as of `Claim`, by default on its figure's runs.

    One function may judge several claims: it is called with the evidence and the settings of each. Of a claim that
    must hold in all of several `cases` it judges one, which it gets after the evidence.
    """
    about = experiments or tuple(filter(None, [figure.partition("/")[0]]))

    def register(judge: Callable[..., Judgement]) -> Callable[..., Judgement]:
        one = functools.partial(judge, **settings)
        judge_claim = one if cases is None else lambda evidence: each(functools.partial(one, evidence), cases)
        REGISTERED[name] = Claim(name, text, rule, figure, about, judge_claim)
        return judge

    return register
