"""What a comparison found, in one sentence: who has the lowest loss and the highest accuracy, where that is decided."""

from __future__ import annotations

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

    A method leads where its mean over the seeds is the lowest and zero lies outside the 95 % interval of the
    differences, seed by seed, to every other method. It is undecided which one leads where that is not so, with one
    seed, and where a method that is behind has a learning rate at the bound of its search: a better one may lie beyond.
    """
    cases = [case for case in _cases(outcomes) if len(case) > 1]
    if not cases:
        return ""
    starts = len({outcome.cell.start for outcome in outcomes}) == len(cases)
    counted = f"{len(cases)} {'start' if starts else 'case'}{'s' * (len(cases) > 1)}"
    parts = [_leaders(cases, final(TRAIN_LOSS), "the lowest training loss", counted)]
    if any(outcome.curves.get(VALID_ACCURACY) for outcome in outcomes):
        parts += [_leaders(cases, final_error, "the highest validation accuracy", counted)]
    lost = sum(outcome.diverged for outcome in outcomes)
    parts += [f"{lost} of {len(outcomes)} runs diverged"] * bool(lost)
    bounded = sum(any(run.search.at_bound for runs in case.values() for run in runs) for case in cases)
    if bounded:
        parts += [f"from {bounded} of {counted} a best learning rate lies at the bound of its search (--lr-max)"]
    if len({outcome.cell.seed for outcome in outcomes}) == 1:
        parts += ["one seed decides nothing, take three or more (--seeds 3)"]
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def answer_and_table(outcomes: Sequence[Outcome]) -> str:
    """The sentence, and the table below it."""
    return "\n\n".join(filter(None, (answer(outcomes), result_table(outcomes))))


def _cases(outcomes: Sequence[Outcome]) -> list[Case]:
    same_start = grouped(outcomes, lambda cell: (cell.lr_max, cell.batch_size, cell.start))
    return [grouped(case, lambda cell: (cell.method, cell.variant)) for case in same_start.values()]


def _leaders(cases: Sequence[Case], metric: Metric, what: str, counted: str) -> str:
    """``AP2 has the lowest training loss from 2 of 3 starts, BN from 1``, and how many are undecided."""
    wins = Counter(leader for case in cases if (leader := _leader(case, metric)) is not None)
    if not wins:
        return f"which method has {what} is undecided"
    first, *rest = sorted(wins, key=lambda method: (-wins[method], method_rank(*method)))
    texts = [f"{method_label(*first)} has {what} from {wins[first]} of {counted}"]
    texts += [f"{method_label(*method)} from {wins[method]}" for method in rest]
    undecided = len(cases) - wins.total()
    return ", ".join(texts + [f"undecided from {undecided}"] * bool(undecided))


def _leader(case: Case, metric: Metric) -> Method | None:
    """The method that leads in a case; None where that is undecided."""
    samples = {m: Sample(tuple(map(metric, runs)), tuple(r.cell.seed for r in runs)) for m, runs in case.items()}
    best = min(samples, key=lambda method: (samples[method].mean, method_rank(*method)))
    behind = [method for method in samples if method != best]
    several = all(sample.seeds > 1 for sample in samples.values())
    bounded = any(run.search.at_bound for method in behind for run in case[method])
    ahead = all(lower(samples[best], samples[method]) == HOLDS for method in behind)
    return best if several and ahead and not bounded else None
