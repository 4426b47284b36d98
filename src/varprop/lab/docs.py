"""Results for the documentation: figures, tables, claims, and a page that says how each came about."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import figures, tables, verdicts
from .gather import Run
from .layout import figures_of, setting_of, setting_text
from .measures import Measure, final, final_error
from .page import facts, state_of
from .panels import Figure
from .records import TRAIN_LOSS, Outcome
from .spread import Sample
from .store import write_atomically
from .style import experiment_label, method_label, start_label
from .verdicts import Verdict, plain

HEADER = """# Experiments

Written by `varprop.lab.report.write_docs` from the records of the runs; every number here comes from them. The method:
"How (Not) to Make a Comparison" and "Experiments" in the paper.
"""
# The manifest of a run that was resumed keeps the last state, the first hour and the sum of the seconds.
SITTING = {
    "Hardware": ", last sitting",
    "Versions": ", last sitting",
    "Git": ", last sitting",
    "Started": ", first sitting",
    "Time": ", all sittings",
}
SUMMARY = """| start | method | learning rates | training loss | validation error | test error |
|---|---|---|---|---|---|
"""


def write(runs: Sequence[Run], judged: Sequence[Verdict], folder: Path) -> Path:
    """Writes everything below a folder.

    Args:
        runs: With something to show.
        judged: The claims.
        folder: ``docs/results``.

    Returns:
        The page, ``experiments.md``.
    """
    shown = {run.experiment: [figure for figure in figures_of(run) if figure.headline] for run in runs}
    for run in runs:
        write_run(run, shown[run.experiment], folder / run.experiment)
    there = {f"{name}/{figure.name}" for name, those in shown.items() for figure in those}
    verdicts.write(judged, folder)
    claims = verdicts.markdown(judged, lambda figure: address(figure) if figure in there else "")
    parts = [HEADER, "## Claims\n\n" + claims, *(section(run, shown[run.experiment]) for run in runs)]
    write_atomically(folder / "experiments.md", "\n".join(parts).encode())
    return folder / "experiments.md"


def write_run(run: Run, shown: Sequence[Figure], folder: Path) -> None:
    """Figures, CSV tables and the manifest of one experiment."""
    for figure in shown:
        figures.draw(figure, folder / figure.name, experiment_label(run.experiment))
    if run.outcomes:
        for name, rows in tables.tables(run).items():
            tables.write_csv(folder / f"{name}.csv", tables.COLUMNS[name], rows)
    if run.manifest:
        write_atomically(folder / "manifest.json", f"{json.dumps(run.manifest, indent=1, default=str)}\n".encode())


def address(figure: str) -> str:
    """The file of ``experiment/figure`` as seen from the page."""
    return f"{quote(figure)}.png"


def section(run: Run, shown: Sequence[Figure]) -> str:
    """One experiment: how it was run, what came out, what it looks like."""
    how = "".join(how_it_was_run(run.manifest))
    problems = "".join(f"- missing: {plain(problem)}\n" for problem in run.problems)
    pictures = "".join(picture(run.experiment, figure) for figure in shown)
    return f"## {plain(experiment_label(run.experiment))}\n\n{how}{problems}\n{''.join(summaries(run))}{pictures}"


def how_it_was_run(manifest: dict[str, Any]) -> Iterator[str]:
    """A line for each fact; of a run in several sittings, which of them each is about."""
    sittings = tables.sittings(manifest)
    several = len(sittings) > 1
    for name, value in facts(manifest):
        if name == "Command" and several:
            yield from (f"- Sitting {i}: {made_by(sitting)}\n" for i, sitting in enumerate(sittings, 1))
        elif name == "Command":
            yield f"- {name}: {code(value)}\n"
        else:
            yield f"- {name}{SITTING.get(name, '') * several}: {plain(value)}\n"


def made_by(sitting: dict[str, Any]) -> str:
    """The command of a sitting, and the sources it ran."""
    git = sitting.get("git")
    return code(str(sitting.get("command"))) + (f", git {plain(state_of(git))}" if isinstance(git, dict) else "")


def code(text: str) -> str:
    """Text set as code; a backtick inside needs a longer fence."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def picture(experiment: str, figure: Figure) -> str:
    """A figure with its caption."""
    return f"![{plain(figure.title)}]({address(f'{experiment}/{figure.name}')})\n\n{plain(figure.caption)}\n\n"


def summaries(run: Run) -> Iterator[str]:
    """One table for each bound and batch size: mean and standard deviation over seeds."""
    for setting in sorted({setting_of(outcome) for outcome in run.outcomes}):
        rows = "".join(summary_rows([o for o in run.outcomes if setting_of(o) == setting]))
        naive = f"lr = {setting[0]:g}, batch {setting[1]}"
        title = naive if run.experiment == "naive" else setting_text(setting).replace("\u00a0", " ")
        yield f"{title}, mean ± standard deviation over seeds at the end:\n\n{SUMMARY}{rows}\n"


def summary_rows(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """One row for each start and method, in their order."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = start_label(outcome.cell.start), method_label(outcome.cell.method, outcome.cell.variant)
        groups.setdefault(key, []).append(outcome)
    for (start, method), those in groups.items():
        rates = ", ".join(f"{o.search.lr:.2g}{' (at bound)' * o.search.at_bound}" for o in those)
        ends = [over_seeds(those, final(TRAIN_LOSS)), over_seeds(those, final_error, 100.0)]
        ends.append(over_seeds(those, lambda o: float("inf") if o.diverged else 1 - o.test_accuracy, 100.0))
        yield f"| {plain(start)} | {plain(method)} | {rates} | {' | '.join(ends)} |\n"


def over_seeds(outcomes: Sequence[Outcome], measure: Measure, factor: float = 1.0) -> str:
    """A measure with its spread."""
    values = tuple(value for value in map(measure, outcomes) if value == value)
    return Sample(values).text(3, factor, " %" if factor > 1 else "") if values else "–"
