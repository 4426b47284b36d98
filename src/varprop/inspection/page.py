"""One HTML file with nothing outside it: styles, script and data are inside, and no package is needed to write it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from ..errors import VarpropError
from .page_figures import Figure, is_layer
from .page_table import Cell, Column, table
from .page_text import escape, inline_json
from .page_tree import ends, groups, tree
from .rows import Row

TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("scales.js", "plots.js", "depth.js", "scatter.js", "pointer.js", "rows.js")


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        title: Of the window.
        heading: Above everything.
        lead: One sentence on what this is.
        facts: Names and values.
        findings: Their heading and the list, as HTML.
        figures: Plots by depth and scatter plots.
        rows: What the tree and the table hold, in the order of execution.
        columns: Of the table, after number and name.
        cells: For every row its cells.
        severities: The worst that is said about a row, by its index.
        table_note: A sentence above the table.
    """

    title: str
    heading: str
    lead: str
    facts: Sequence[tuple[str, str]]
    findings: tuple[str, str]
    figures: Sequence[Figure]
    rows: Sequence[Row]
    columns: Sequence[Column]
    cells: Sequence[Sequence[Cell]]
    severities: Mapping[int, str]
    table_note: str = ""


def render(page: Page) -> str:
    """The page as text."""
    return Template(_template("page.html")).substitute(
        title=escape(page.title),
        heading=escape(page.heading),
        lead=escape(page.lead),
        facts="".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.facts),
        findings_heading=escape(page.findings[0]),
        findings=page.findings[1],
        figures="".join(_figure(figure) for figure in page.figures),
        tree=tree(page.rows, page.severities),
        table_note=escape(page.table_note),
        table=table(page.rows, page.columns, page.cells, page.severities),
        terms="".join(f"<div><dt>{escape(c.name)}</dt><dd>{escape(c.meaning)}</dd></div>" for c in page.columns),
        style=_template("page.css"),
        data=inline_json(_data(page)),
        script="\n".join(_template(name) for name in SCRIPTS),
    )


def write(text: str, path: str | Path) -> Path:
    """Write a page so that it is there whole or not at all.

    Raises:
        VarpropError: If the folder is missing or cannot be written to.
    """
    file = Path(path)
    special = file.exists() and not file.is_file()  # such as /dev/stdout, which must not be replaced
    draft = file if special else file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, "utf-8")
        if not special:
            draft.replace(file)
    except OSError as error:
        if not special:
            with contextlib.suppress(OSError):
                draft.unlink()
        raise VarpropError(f"{file} cannot be written: {error.strerror or error}.") from error
    return file


def _figure(figure: Figure) -> str:
    return (
        f'<figure class="{figure.kind}"><figcaption><h3>{escape(figure.title)}</h3></figcaption>'
        f'<div class="plot" data-figure="{escape(figure.id)}"></div>'
        f'<p class="caption">{escape(figure.caption)}</p></figure>'
    )


def _data(page: Page) -> dict[str, object]:
    """What the script draws from."""
    rows = [
        [row.label, row.name, group, int(is_layer(row)), int(row.weighted), ends(page.rows, index)]
        for index, (row, group) in enumerate(zip(page.rows, groups(page.rows), strict=True))
    ]
    return {"rows": rows, "figures": {figure.id: asdict(figure) for figure in page.figures}}


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text("utf-8")
