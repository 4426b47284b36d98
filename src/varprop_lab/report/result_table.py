"""Results as a small table of text: a row for every start and method, seeds together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from varprop.text_table import Table

from ..protocol.labels import method_label, method_rank, rate, start_label, start_rank
from ..protocol.records import TRAIN_LOSS, VALID_ACCURACY, Cell, Outcome, grouped

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
