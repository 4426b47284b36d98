"""The page on the paper's experiments, docs/results/experiments.md, with the claims and figures beside it.

python -m benchmarks.paper_page docs/results            # again, from the records that lie there
python -m benchmarks.paper_page docs/results --add OUT  # what `varprop reproduce` left in OUT replaces its records
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from varprop.text_table import Table
from varprop_lab import figures
from varprop_lab.environment import write_atomically
from varprop_lab.figures import Figure, figures_of, setting_of, setting_text
from varprop_lab.paper.report import judged
from varprop_lab.paper.verdicts import judge
from varprop_lab.paper.verdicts.judge import escaped
from varprop_lab.protocol import (
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    Cell,
    Outcome,
    experiment_label,
    grouped,
    method_label,
    start_label,
)
from varprop_lab.report import duration, facts, git_text
from varprop_lab.seed_statistics import Metric, Sample, final, final_error
from varprop_lab.store import WITHOUT_CELLS, Run, read_runs, write_tables

_HEADER = """# Experiments

Written by `python -m benchmarks.paper_page docs/results`. Every number comes from the records beside this page.
Commands are shown as they were typed; `python -m varprop.cli` is now `varprop`.
The method is that of "How (Not) to Make a Comparison" and "Experiments" in the paper.
"""
# The manifest of a run that was resumed keeps the last state, the first hour and the sum of the seconds.
_SITTING = {
    "Hardware": ", last sitting",
    "Versions": ", last sitting",
    "Git": ", last sitting",
    "Started": ", first sitting",
    "Time": ", all sittings that were not broken off",
}
_COLUMNS = (
    *("start", "method", "learning rates", "search regret", "training loss", "in evaluation mode"),
    *("validation error", "test error"),
)
_METRICS: tuple[tuple[Metric, float], ...] = (
    (final(TRAIN_LOSS), 1.0),
    (final(TRAIN_EVAL_LOSS), 1.0),
    (final_error, 100.0),
    (lambda outcome: math.inf if outcome.diverged else 1.0 - outcome.test_accuracy, 100.0),
)
_REGRET = """
Search regret: by which share the loss of the search at the chosen rate is above the lowest loss known for the same cell
at any rate up to the bound, from the searches at all bounds; the mean and the largest. It is noise of the search, and
comes on top of that of the seeds. Where only one search was made, it is not known.
"""


def add_runs(out: Path, folder: Path) -> None:
    """Figures, tables and manifests of the runs in `out`, in a folder for each; earlier ones are replaced."""
    for run in _shown(out):
        target = folder / run.experiment
        for earlier in (*target.glob("*.png"), *target.glob("*.svg")):
            earlier.unlink()
        for figure in _headlines(run):
            figures.draw(figure, target / figure.name, experiment_label(run.experiment))
        if run.outcomes:
            write_tables(target, run.outcomes, run.manifest)
        if run.manifest:
            write_atomically(target / "manifest.json", f"{json.dumps(run.manifest, indent=1, default=str)}\n".encode())


def write_page(folder: Path) -> Path:
    """The claims, and the page that says how everything came about, from the records in the folder."""
    runs = _shown(folder)
    verdicts = judged(runs, folder)
    shown = {run.experiment: _headlines(run) for run in runs}
    addresses = {f"{name}/{figure.name}" for name, group in shown.items() for figure in group}
    judge.write(verdicts, folder)
    claims = judge.markdown(verdicts, lambda figure: _address(figure) if figure in addresses else "")
    sections = [_HEADER, "## Claims\n\n" + claims, _REGRET, *(_section(run, shown[run.experiment]) for run in runs)]
    write_atomically(folder / "experiments.md", "\n".join(sections).encode())
    return folder / "experiments.md"


def _headlines(run: Run) -> list[Figure]:
    return [figure for figure in figures_of(run) if figure.headline]


def _address(figure: str) -> str:
    """The file of ``experiment/figure`` as seen from the page."""
    return f"{quote(figure)}.png"


def _section(run: Run, shown: Sequence[Figure]) -> str:
    """One experiment: how it was run, what came out, what it looks like."""
    how = "".join(_how_it_was_run(run.manifest))
    problems = "".join(f"- missing: {escaped(problem)}\n" for problem in run.problems)
    pictures = "".join(
        f"![{escaped(f.title)}]({_address(f'{run.experiment}/{f.name}')})\n\n{escaped(f.caption)}\n\n" for f in shown
    )
    return f"## {escaped(experiment_label(run.experiment))}\n\n{how}{problems}\n{''.join(_summaries(run))}{pictures}"


def _how_it_was_run(manifest: dict[str, Any]) -> Iterator[str]:
    """A line for each fact; of a run in several sittings, which of them each is about."""
    sittings = manifest.get("sittings", [])
    several = len(sittings) > 1
    for name, value in facts(manifest):
        if name == "Command" and several:
            for index, sitting in enumerate(sittings, 1):
                sources = f", git {escaped(git_text(sitting['git']))}" if "git" in sitting else ""
                times = [sitting.get("started"), duration(sitting.get("seconds")) or "broken off"]
                when = "".join(f", {escaped(str(time))}" for time in times if time)
                yield f"- Sitting {index}: {_code(str(sitting.get('command')))}{sources}{when}\n"
        elif name == "Command":
            yield f"- {name}: {_code(value)}\n"
        else:
            yield f"- {name}{_SITTING.get(name, '') * several}: {escaped(value)}\n"


def _code(text: str) -> str:
    """Text set as code; a backtick inside needs a longer fence."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _summaries(run: Run) -> Iterator[str]:
    """One table for each bound and batch size: mean and standard deviation over seeds."""
    for setting in sorted({setting_of(outcome) for outcome in run.outcomes}):
        lowest, outcomes = lowest_known(run.outcomes, setting[0]), [o for o in run.outcomes if setting_of(o) == setting]
        rows = list(_summary_rows(outcomes, lowest))
        table = Table("", _COLUMNS, rows, left=_COLUMNS).markdown()
        title = setting_text(setting, outcomes).replace("\u00a0", " ")
        yield f"{title}, mean ± standard deviation over seeds at the end:\n\n{table}\n\n"


def lowest_known(outcomes: Sequence[Outcome], bound: float) -> dict[Cell, float]:
    """The lowest loss that any search for a cell, at whatever bound, met up to this one; by the cell at this bound.

    Cells that were searched once are left out: nothing is known but what that search found.
    """
    lowest_losses: dict[Cell, list[float]] = {}
    for outcome in outcomes:
        losses = [loss for rate, loss in outcome.search.trace if rate <= bound]
        lowest_losses.setdefault(replace(outcome.cell, lr_max=bound), []).append(min(losses, default=math.inf))
    return {cell: min(lowest) for cell, lowest in lowest_losses.items() if len(lowest) > 1}


def _regret(outcomes: Sequence[Outcome], lowest: dict[Cell, float]) -> str:
    pairs = [(o.search.loss, lowest.get(o.cell, math.inf)) for o in outcomes]
    regrets = [loss / best - 1 for loss, best in pairs if math.isfinite(best)]
    return f"{100 * sum(regrets) / len(regrets):.1f} %, {100 * max(regrets):.1f} %" if regrets else "–"


def _summary_rows(outcomes: Sequence[Outcome], lowest: dict[Cell, float]) -> Iterator[tuple[str, ...]]:
    groups = grouped(outcomes, lambda cell: (start_label(cell.start), method_label(cell.method, cell.variant)))
    for (start, method), group in groups.items():
        rates = ", ".join(f"{o.search.lr:.2g}{' (at bound)' * o.search.at_bound}" for o in group)
        ends = (_over_seeds(group, metric, factor) for metric, factor in _METRICS)
        yield escaped(start), escaped(method), rates, _regret(group, lowest), *ends


def _over_seeds(outcomes: Sequence[Outcome], metric: Metric, factor: float) -> str:
    values = tuple(value for value in map(metric, outcomes) if value == value)
    return Sample(values).text(3, factor, " %" if factor > 1 else "") if values else "–"


def _shown(out: Path) -> list[Run]:
    return [run for run in read_runs(out, list(WITHOUT_CELLS)) if run.outcomes or run.experiment in WITHOUT_CELLS]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--add", type=Path, metavar="OUT")
    options = parser.parse_args()
    if options.add is not None:
        add_runs(options.add, options.results)
    print(write_page(options.results))
