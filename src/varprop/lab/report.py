"""Tables, figures, claims and one self-contained page, all from what lies in the folder of the runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from . import docs as documents
from . import figures, page, tables, verdicts
from .gather import WITHOUT_CELLS, Run, gather
from .store import write_atomically

BENCHMARK = "normalization.json"


def write(out: Path, experiments: Sequence[str] = ()) -> Path:
    """Makes everything a reader needs from what lies in a folder.

    For every experiment found or named: ``runs``, ``curves`` and ``searches`` as CSV (and Parquet), figures as PNG and
    SVG; for all together ``claims.json``, ``claims.md`` and ``report.html``. What is missing is shown as missing.

    Args:
        out: The folder given to ``--out``.
        experiments: Names that must appear, if only as missing.

    Returns:
        The path of ``report.html``.
    """
    out = Path(out)
    runs = gather(out, list(experiments))
    judged = verdicts.judge(runs, benchmarks(out))
    verdicts.write(judged, out)
    for run in runs:
        write_run(run, out / run.experiment)
    write_atomically(out / "report.html", page.render(runs, judged).encode())
    return out / "report.html"


def write_docs(out: Path, docs: Path) -> Path:
    """Copies results into the documentation, under ``docs/results``.

    Args:
        out: The folder given to ``--out``.
        docs: The folder of the documentation.

    Returns:
        The path of ``docs/results/experiments.md``.
    """
    runs = [run for run in gather(Path(out), list(WITHOUT_CELLS)) if run.outcomes or run.experiment in WITHOUT_CELLS]
    return documents.write(runs, verdicts.judge(runs, benchmarks(Path(out))), Path(docs) / "results")


def write_run(run: Run, folder: Path) -> None:
    """The tables and figures of one experiment; nothing where nothing was run."""
    if run.outcomes:
        tables.write(run, folder)
    figures.write(run, folder / "figures")


def benchmarks(out: Path) -> list[Path]:
    """Where the benchmark of the overhead may lie: in the folder of the runs, else in the documentation here."""
    return [out / BENCHMARK, Path("docs") / "results" / BENCHMARK]
