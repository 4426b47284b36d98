"""What a command ends with: the answer, a small table, verdicts if they were asked for, and the path of the report."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from varprop.lab.protocol.labels import method_label, method_rank, rate, start_label, start_rank
from varprop.lab.protocol.records import TRAIN_LOSS, VALID_ACCURACY, Outcome
from varprop.text_table import Table

from .parser import typer

HEADINGS = ("experiment", "start", "method", "lr", "training loss", "validation", "test")


def show(outcomes: Sequence[Outcome], out: Path, experiments: Sequence[str]) -> None:
    """Print the table, write the report on everything in the folder, and say where it is.

    Args:
        outcomes: For the table.
        out: The folder of the results.
        experiments: Names the report must mention.
    """
    from varprop.lab import report

    table(outcomes)
    page = report.write(out, experiments)
    if "claims" in experiments:
        verdicts(out / "claims.json")
    typer.echo(f"Report: {page.resolve()}")


def show_one(outcomes: Sequence[Outcome], out: Path, experiment: str) -> None:
    """The same for one comparison by itself: the answer first, and a page without the paper's claims."""
    from varprop.lab import report

    if found := report.answer(outcomes):
        typer.echo(f"{found}\n")
    table(outcomes)
    typer.echo(f"Report: {report.write_one(out, experiment).resolve()}")


def table(outcomes: Sequence[Outcome]) -> None:
    """Print a row for every start and method: learning rate, final loss and accuracies, mean ± std over the seeds."""
    if not outcomes:
        return
    typer.echo(Table("", HEADINGS, [_row(group) for group in _groups(outcomes)], left=HEADINGS).plain())
    if any(outcome.search.at_bound for outcome in outcomes):
        typer.echo("* the best rate lies next to the bound of the search, which --lr-max widens")


def verdicts(file: Path) -> None:
    """Print each claim of the paper with its verdict; the numbers are in the report."""
    for claim in json.loads(file.read_text("utf-8"))["claims"]:
        typer.echo(f"{claim['verdict']:<14}  {claim['claim']}")


def _groups(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes that differ in nothing but the seed."""
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in outcomes:
        cell = outcome.cell
        order = (cell.experiment, cell.lr_max, cell.batch_size, start_rank(cell.start), cell.start)
        groups.setdefault((*order, method_rank(cell.method, cell.variant), cell.method), []).append(outcome)
    return [groups[key] for key in sorted(groups)]


def _row(group: list[Outcome]) -> tuple[str, ...]:
    cell = group[0].cell
    small = f", batch {cell.batch_size}" if cell.batch_size != 128 else ""
    return (
        cell.experiment,
        start_label(cell.start) + small,
        method_label(cell.method, cell.variant),
        _rates(group),
        _spread(_ends(group, TRAIN_LOSS), "{:.4g}"),
        _spread(_ends(group, VALID_ACCURACY), "{:.2%}"),
        _diverged(group) or _spread([outcome.test_accuracy for outcome in group], "{:.2%}"),
    )


def _rates(group: list[Outcome]) -> str:
    """The range of the learning rates over the seeds; a star where one lies next to the bound of the search."""
    rates = sorted(outcome.search.lr for outcome in group)
    span = rate(rates[0]) if rate(rates[0]) == rate(rates[-1]) else f"{rate(rates[0])}..{rate(rates[-1])}"
    return f"{span}*" if any(outcome.search.at_bound for outcome in group) else span


def _ends(group: list[Outcome], curve: str) -> list[float]:
    return [outcome.curves[curve][-1] for outcome in group if outcome.curves.get(curve)]


def _spread(values: list[float], form: str) -> str:
    """The mean, and the standard deviation where there are several values."""
    if not values:
        return "-"
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.replace('.4g', '.2g').format(statistics.stdev(values))}" if len(values) > 1 else mean


def _diverged(group: list[Outcome]) -> str:
    count = sum(outcome.diverged for outcome in group)
    return f"{count} of {len(group)} diverged" if count else ""
