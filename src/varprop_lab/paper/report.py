"""Everything that is made of a folder of results: tables, figures, claims, the HTML page, the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..report import html_page
from ..report.output import write_files
from ..store.files import write_atomically
from ..store.runs import WITHOUT_CELLS, Run, read_runs
from . import markdown
from .verdicts import judge

_BENCHMARK = "normalization.json"


def write(out: Path, experiments: Sequence[str] = ()) -> Path:
    """Make everything a reader needs from what lies in a folder.

    For every experiment found or named: ``runs``, ``curves`` and ``searches`` as CSV, figures as PNG and
    SVG; for all together ``claims.json``, ``claims.md`` and ``report.html``. What is missing is shown as missing.

    Args:
        out: The folder given to ``--out``.
        experiments: Names that must appear, if only as missing.

    Returns:
        The path of ``report.html``; of ``experiments.md`` where the folder is that of the documentation, in which only
        the pages are written again.
    """
    out = Path(out)
    runs = read_runs(out, list(experiments))
    if any(run.compact for run in runs):  # records and figures of the documentation stay as they are
        return _write_pages(out)
    verdicts = judge.judge(runs, _benchmarks(out))
    judge.write(verdicts, out)
    for run in runs:
        write_files(run, out)
    write_atomically(out / "report.html", html_page.render(runs, out, verdicts, judge.RULE).encode())
    return out / "report.html"


def write_docs(out: Path, docs: Path) -> Path:
    """Bring results into the documentation: each replaces what ``docs/results`` has of its experiment.

    Returns:
        The path of ``docs/results/experiments.md``, the page on all that lies there.
    """
    results = Path(docs) / "results"
    markdown.write_runs(_shown(Path(out)), results)
    return _write_pages(results)


def _write_pages(results: Path) -> Path:
    runs = _shown(results)
    return markdown.write_pages(runs, judge.judge(runs, _benchmarks(results)), results)


def _shown(out: Path) -> list[Run]:
    return [run for run in read_runs(out, list(WITHOUT_CELLS)) if run.outcomes or run.experiment in WITHOUT_CELLS]


def _benchmarks(out: Path) -> list[Path]:
    """Where the benchmark of the overhead may lie: in the folder of the runs, else in the documentation here."""
    return [out / _BENCHMARK, Path("docs") / "results" / _BENCHMARK]
