"""Results in words: the answer of a comparison, a small table of text, and how a run was made."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from varprop.text_table import Table

from ..protocol import (
    TRAIN_LOSS,
    VALID_ACCURACY,
    Cell,
    Method,
    Outcome,
    grouped,
    method_label,
    method_rank,
    rate,
    start_label,
    start_rank,
)
from ..seed_statistics import HOLDS, Metric, Sample, final, final_error, lower


def facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of all that is known."""
    if not manifest:
        return []
    versions = manifest.get("versions", {})
    entries = {
        "Command": manifest.get("command"),
        "Hardware": _machine(manifest.get("hardware", {})),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None),
        "Git": git_text(manifest.get("git", {})),
        "Started": manifest.get("started"),
        "Time": duration(manifest.get("seconds")),
        "Data": manifest.get("fingerprints", {}).get("data"),
        "Configuration": ", ".join(_flat(manifest.get("configuration", {}))),
    }
    return [(name, str(value)) for name, value in entries.items() if value not in (None, "")]


def git_text(git: dict[str, Any]) -> str:
    """The commit, and whether the sources differed from it."""
    if not git:
        return "unknown"
    changes = f" (SHA-256 {str(git['diff'])[:12]})" if git.get("diff") else ""
    return f"{git.get('commit', 'unknown')}{f', with local changes{changes}' if git.get('dirty') else ''}"


def _machine(hardware: dict[str, Any]) -> str:
    names = {"gpu": "", "cuda": "CUDA ", "machine": "", "cpu_threads": ""}
    items = [f"{prefix}{hardware[name]}" for name, prefix in names.items() if hardware.get(name)]
    return ", ".join(items) + (" threads" if hardware.get("cpu_threads") else "")


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """``name = value``, with a dot for what lies inside."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value}"


def duration(seconds: float | None) -> str | None:
    """Seconds in words; None where they are not known."""
    if seconds is None:
        return None
    minutes, remainder = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes} min {remainder} s"


HEADINGS = ("experiment", "start", "method", "lr", "training loss", "validation", "test")
AT_BOUND = "* the best rate lies next to the bound of the search, which --lr-max widens"


def result_table(outcomes: Sequence[Outcome]) -> str:
    """Learning rate, final loss and accuracies, mean ± standard deviation over the seeds; empty without outcomes."""
    if not outcomes:
        return ""
    text = Table("", HEADINGS, [_row(group) for group in _groups(outcomes)], left=HEADINGS).plain()
    return "\n".join([text, AT_BOUND] if any(outcome.search.at_bound for outcome in outcomes) else [text])


def _groups(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes that differ in nothing but the seed."""
    groups = grouped(outcomes, lambda c: (c.experiment, c.lr_max, c.batch_size, *_place(c)))
    return [groups[key] for key in sorted(groups)]


def _place(cell: Cell) -> tuple[Any, ...]:
    return start_rank(cell.start), cell.start, method_rank(cell.method, cell.variant), cell.method


def _row(group: list[Outcome]) -> tuple[str, ...]:
    cell = group[0].cell
    lost = sum(outcome.diverged for outcome in group)
    small = f", batch {cell.batch_size}" if cell.batch_size != 128 else ""
    return (
        cell.experiment,
        start_label(cell.start) + small,
        method_label(cell.method, cell.variant),
        _rates(group),
        _spread([outcome.last(TRAIN_LOSS) for outcome in group], "{:.4g}"),
        _spread([outcome.last(VALID_ACCURACY) for outcome in group], "{:.2%}"),
        f"{lost} of {len(group)} diverged" if lost else _spread([o.test_accuracy for o in group], "{:.2%}"),
    )


def _rates(group: list[Outcome]) -> str:
    """The range of the learning rates over the seeds; a star where one lies next to the bound of the search."""
    rates = sorted(outcome.search.lr for outcome in group)
    span = rate(rates[0]) if rate(rates[0]) == rate(rates[-1]) else f"{rate(rates[0])}..{rate(rates[-1])}"
    return f"{span}*" if any(outcome.search.at_bound for outcome in group) else span


def _spread(ends: Sequence[float | None], form: str) -> str:
    """The mean, and the standard deviation where there are several values; a dash where there are none."""
    values = [end for end in ends if end is not None and not math.isnan(end)]
    if not values:
        return "-"
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.replace('.4g', '.2g').format(statistics.stdev(values))}" if len(values) > 1 else mean


Case = dict[tuple[Method, str], list[Outcome]]  # by method and variant, all that started from the same function


def answer(outcomes: Sequence[Outcome]) -> str:
    """One sentence; empty where there is nothing to compare.

    A method leads where its mean over the seeds is the lowest and zero lies outside the 95 % interval of the
    differences, seed by seed, to every other method. It is undecided which one leads where that is not so, with one
    seed, and where a method that is behind has a learning rate at the bound of its search: a better one may lie beyond.
    """
    by_start = grouped(outcomes, lambda cell: (cell.lr_max, cell.batch_size, cell.start)).values()
    cases: list[Case] = [grouped(same_start, lambda cell: (cell.method, cell.variant)) for same_start in by_start]
    cases = [case for case in cases if len(case) > 1]
    if not cases:
        return ""
    starts = len({outcome.cell.start for outcome in outcomes}) == len(cases)
    counted = f"{len(cases)} {'start' if starts else 'case'}{'s' * (len(cases) > 1)}"
    clauses = [_leaders(cases, final(TRAIN_LOSS), "the lowest training loss", counted)]
    if any(outcome.curves.get(VALID_ACCURACY) for outcome in outcomes):
        clauses += [_leaders(cases, final_error, "the highest validation accuracy", counted)]
    lost = sum(outcome.diverged for outcome in outcomes)
    clauses += [f"{lost} of {len(outcomes)} runs diverged"] * bool(lost)
    bounded = sum(any(run.search.at_bound for runs in case.values() for run in runs) for case in cases)
    if bounded:
        clauses += [f"from {bounded} of {counted} a best learning rate lies at the bound of its search (--lr-max)"]
    if len({outcome.cell.seed for outcome in outcomes}) == 1:
        clauses += ["one seed decides nothing, take three or more (--seeds 3)"]
    sentence = "; ".join(clauses)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def answer_and_table(outcomes: Sequence[Outcome]) -> str:
    """The sentence, and the table below it."""
    return "\n\n".join(filter(None, (answer(outcomes), result_table(outcomes))))


def _leaders(cases: Sequence[Case], metric: Metric, what: str, counted: str) -> str:
    """``AP2 has the lowest training loss from 2 of 3 starts, BN from 1``, and how many are undecided."""
    wins = Counter(leader for case in cases if (leader := _leader(case, metric)) is not None)
    if not wins:
        return f"which method has {what} is undecided"
    first, *following = sorted(wins, key=lambda method: (-wins[method], method_rank(*method)))
    texts = [f"{method_label(*first)} has {what} from {wins[first]} of {counted}"]
    texts += [f"{method_label(*method)} from {wins[method]}" for method in following]
    undecided = len(cases) - wins.total()
    return ", ".join(texts + [f"undecided from {undecided}"] * bool(undecided))


def _leader(case: Case, metric: Metric) -> tuple[Method, str] | None:
    """The method that leads in a case; None where that is undecided."""
    samples = {m: Sample(tuple(map(metric, runs)), tuple(r.cell.seed for r in runs)) for m, runs in case.items()}
    best = min(samples, key=lambda method: (samples[method].mean, method_rank(*method)))
    behind = [method for method in samples if method != best]
    several = all(sample.seeds > 1 for sample in samples.values())
    bounded = any(run.search.at_bound for method in behind for run in case[method])
    ahead = all(lower(samples[best], samples[method]) == HOLDS for method in behind)
    return best if several and ahead and not bounded else None
