"""Everything that is made of a folder of results: tables, figures, claims, the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..environment import write_atomically
from ..report import render, write_files
from ..store import Run, read_runs
from .verdicts import judge
from .verdicts.judge import Verdict

_BENCHMARK = "normalization.json"


def write(out: Path, experiments: Sequence[str] = ()) -> Path:
    """Make everything a reader needs from what lies in a folder; returns the path of the page.

    For every experiment found or named: ``runs``, ``curves`` and ``searches`` as CSV, figures as PNG and SVG; for all
    together ``claims.json``, ``claims.md`` and ``report.html``. What is missing is shown as missing. Where a run is
    there as tables alone, they stay as they are, and the page is ``claims.md``.
    """
    out = Path(out)
    runs = read_runs(out, list(experiments))
    verdicts = judged(runs, out)
    judge.write(verdicts, out)
    if any(run.compact for run in runs):
        return out / "claims.md"
    for run in runs:
        write_files(run, out)
    write_atomically(out / "report.html", render(runs, out, verdicts, judge.RULE).encode())
    return out / "report.html"


def judged(runs: Sequence[Run], out: Path) -> list[Verdict]:
    """The claims on these runs, and on the benchmark in their folder, or else in the documentation here."""
    return judge.judge(runs, [out / _BENCHMARK, Path("docs") / "results" / _BENCHMARK])
