"""The files of one run for a reader: tables, figures and an HTML page."""

from __future__ import annotations

from pathlib import Path

from ..protocol.labels import experiment_label
from ..store.files import write_atomically
from ..store.runs import Run, read_run
from ..store.tables import write_tables
from . import html_page, plotting
from .figures import figures_of


def write_one(out: Path, experiment: str) -> Path:
    """Write tables, figures and the page of one experiment into its folder; the path of the page."""
    run = read_run(Path(out) / experiment)
    write_files(run, Path(out))
    page = Path(out) / experiment / "report.html"
    write_atomically(page, html_page.render([run], Path(out)).encode())
    return page


def write_files(run: Run, out: Path) -> None:
    """Write ``runs``, ``curves`` and ``searches`` as CSV, and figures as PNG and SVG, into the folder of a run."""
    folder = out / run.experiment
    if run.outcomes:
        write_tables(folder, run.outcomes, run.manifest)
    for figure in figures_of(run):
        plotting.draw(figure, folder / "figures" / figure.name, experiment_label(run.experiment))
