"""What a comparison found, in one sentence: who has the lowest loss and the highest accuracy, and how surely."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ..protocol.labels import method_label, method_rank
from ..protocol.records import TRAIN_LOSS, VALID_ACCURACY, Outcome, grouped
from ..seed_statistics import HOLDS, Metric, Sample, final, final_error, lower
from .result_table import result_table

Method = tuple[str, str]  # and its variant
Case = dict[Method, list[Outcome]]  # all that started from the same function with the same settings


def answer(outcomes: Sequence[Outcome]) -> str:
    """One sentence; empty where there is nothing to compare.

    The lowest mean over the seeds wins. A lead counts as sure by the rule of the verdicts: zero lies outside the 95 %
    interval of the differences, seed by seed, to every other method.
    """
    cases = [case for case in _cases(outcomes) if len(case) > 1]
    if not cases:
        return ""
    starts = len({outcome.cell.start for outcome in outcomes}) == len(cases)
    whole = f"{len(cases)} {'start' if starts else 'case'}{'s' * (len(cases) > 1)}"
    parts = [_winners(cases, final(TRAIN_LOSS), "the lowest training loss", whole)]
    if any(outcome.curves.get(VALID_ACCURACY) for outcome in outcomes):
        parts += [_winners(cases, final_error, "the highest validation accuracy", whole)]
    lost = sum(outcome.diverged for outcome in outcomes)
    parts += [f"{lost} of {len(outcomes)} runs diverged"] * bool(lost)
    parts += ["with one seed, small differences mean nothing"] * (len({o.cell.seed for o in outcomes}) == 1)
    sentence = "; ".join(filter(None, parts))
    return f"{sentence[:1].upper()}{sentence[1:]}."


def answer_and_table(outcomes: Sequence[Outcome]) -> str:
    """The sentence, and the table below it."""
    return "\n\n".join(filter(None, (answer(outcomes), result_table(outcomes))))


def _cases(outcomes: Sequence[Outcome]) -> list[Case]:
    same_start = grouped(outcomes, lambda cell: (cell.lr_max, cell.batch_size, cell.start))
    return [grouped(case, lambda cell: (cell.method, cell.variant)) for case in same_start.values()]


def _winners(cases: Sequence[Case], metric: Metric, what: str, whole: str) -> str:
    """``AP2 has the lowest loss from 2 of 3 starts (surely from 1) and BN from 1``."""
    wins: Counter[Method] = Counter()
    sure: Counter[Method] = Counter()
    for case in cases:
        samples = {m: Sample(tuple(map(metric, runs)), tuple(r.cell.seed for r in runs)) for m, runs in case.items()}
        best = min(samples, key=lambda method: (samples[method].mean, method_rank(*method)))
        others = [sample for method, sample in samples.items() if method != best]
        if math.isfinite(samples[best].mean) and all(other.mean != samples[best].mean for other in others):
            wins[best] += 1
            sure[best] += all(lower(samples[best], other) == HOLDS for other in others)
    if not wins:
        return f"no method has {what} alone"
    seeds = max(len(runs) for case in cases for runs in case.values())
    first, *rest = sorted(wins, key=lambda method: (-wins[method], method_rank(*method)))
    said = f"{method_label(*first)} has {what} from {wins[first]} of {whole}{_surely(first, wins, sure, seeds)}"
    more = [f"{method_label(*m)} from {wins[m]}{_surely(m, wins, sure, seeds)}" for m in rest]
    return " and ".join([", ".join([said, *more[:-1]]), *more[-1:]])


def _surely(method: Method, wins: Counter[Method], sure: Counter[Method], seeds: int) -> str:
    if seeds < 2:
        return ""
    if sure[method] == wins[method]:
        return " (by more than the noise between seeds)"
    return f" (by more than the noise between seeds: {sure[method]})"
