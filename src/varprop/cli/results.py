"""What a command ends with: the answer, a small table, verdicts if they were asked for, and the path of the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from varprop.lab.protocol.records import Outcome
from varprop.lab.report.result_table import result_table

from .parser import typer


def show(outcomes: Sequence[Outcome], out: Path, experiments: Sequence[str]) -> None:
    """Print the table, write the report on everything in the folder, and say where it is.

    Args:
        outcomes: For the table.
        out: The folder of the results.
        experiments: Names the report must mention.
    """
    from varprop.lab import report

    _print_table(outcomes)
    page = report.write(out, experiments)
    if "claims" in experiments:
        verdicts(out / "claims.json")
    typer.echo(f"Report: {page.resolve()}")


def show_one(outcomes: Sequence[Outcome], out: Path, experiment: str) -> None:
    """The same for one experiment by itself: the answer first, and a page without the paper's claims."""
    from varprop.lab import report

    if found := report.answer(outcomes):
        typer.echo(f"{found}\n")
    _print_table(outcomes)
    typer.echo(f"Report: {report.write_one(out, experiment).resolve()}")


def _print_table(outcomes: Sequence[Outcome]) -> None:
    if outcomes:
        typer.echo(result_table(outcomes))


def verdicts(file: Path) -> None:
    """Print each claim of the paper with its verdict; the numbers are in the report."""
    for claim in json.loads(file.read_text("utf-8"))["claims"]:
        typer.echo(f"{claim['verdict']:<14}  {claim['claim']}")
