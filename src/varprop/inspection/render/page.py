"""One HTML file with nothing outside it: styles, script and data are inside; and the short form for a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...pages import environment, script, style
from ..findings.finding import Finding
from ..numbers.row import ReportRow
from .findings import FindingGroup, FindingItem, row_numbers, severities
from .format import inline_json, sentence, with_code
from .plots import Plot
from .table import Column, TableCell, sort_key
from .tree import ends, entries, groups

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("plots.js", "depth.js", "scatter.js", "pointer.js", "rows.js")


@dataclass(frozen=True)
class Page:
    """What a page shows."""

    title: str  # of the window
    heading: str  # above everything
    lead: str  # one sentence on what this is
    facts: Sequence[tuple[str, str]]  # names and values
    findings_heading: str  # above the findings
    findings: Sequence[FindingGroup]  # in groups
    no_findings: str  # A sentence instead
    plots: Sequence[Plot]  # by depth, and scatter plots
    rows: Sequence[ReportRow]  # what the tree and the table hold, in the order of execution
    columns: Sequence[Column]  # of the table, after number and name
    subjects: Sequence[Any]  # what the columns read, one for every row
    judged: Sequence[Finding]  # what colours the rows: the findings of the state they show
    table_note: str = ""  # A sentence above the table


def render(page: Page) -> str:
    """The page as text."""
    known = row_numbers(page.rows)
    worst = severities(known, page.judged)
    return _rendered(
        "page.html",
        page=page,
        row_numbers=known,
        severities=worst,
        cells=_cells(page.columns, page.subjects),
        tree=entries(page.rows, worst),
        style=style(TEMPLATES / "page.css"),
        data=inline_json(_data(page)),
        script=script(TEMPLATES, *SCRIPTS),
    )


def render_summary(columns: Sequence[Column], subjects: Sequence[Any], **about: str | Sequence[FindingItem]) -> str:
    """The short form: a title, a remark, findings or a sentence instead, and a table; in the notebook's own colours."""
    return _rendered("notebook.html", columns=columns, cells=_cells(columns, subjects), **about)


def _cells(columns: Sequence[Column], subjects: Sequence[Any]) -> list[list[TableCell]]:
    return [[column.read(subject) for column in columns] for subject in subjects]


def _rendered(name: str, **values: Any) -> str:
    text: str = _environment().get_template(name).render(**values)
    return text


@cache
def _environment() -> Any:
    made = environment(TEMPLATES)
    made.filters |= {"sentence": sentence, "with_code": with_code, "sort_key": sort_key}
    return made


def _data(page: Page) -> dict[str, object]:
    """What the script draws from."""
    rows = [
        [row.label, row.name, group, int(row.is_layer), int(row.weighted), ends(page.rows, index)]
        for index, (row, group) in enumerate(zip(page.rows, groups(page.rows), strict=True))
    ]
    return {"rows": rows, "figures": {plot.id: asdict(plot) for plot in page.plots}}
