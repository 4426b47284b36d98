"""One HTML file with nothing outside it: styles, script and data are inside; and the short form for a notebook."""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ..pages import environment, script, style
from .findings import ORDER, Differences, Finding, severity_change
from .rows import ReportRow

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_POWER = re.compile(r"\b\d(?:\.\d+)?e[+-]\d+\b")
_CALL = re.compile(r"(@?vp\.\w+(?:\((?:[^()]|\([^()]*\))*\))?)")


def number(value: float | None) -> str:
    """Three significant digits; powers of ten where there would be many zeros."""
    if value is None or math.isnan(value):
        return ""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size and not 1e-3 <= float(f"{size:.3g}") < 1e4:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits}×10{str(int(power)).translate(_RAISED)}".replace("-", "−")
    text = f"{float(f'{value:.3g}'):.0f}" if size >= 1000 else f"{value:#.3g}".rstrip(".")
    return "0" if value == 0 else text.replace("-", "−")


def rough(value: float) -> str:
    """One significant digit, for errors."""
    if not math.isfinite(value) or value == 0 or not 1e-4 <= value < 1e4:
        return number(value)
    return f"{float(f'{value:.1g}'):.{max(0, -math.floor(math.log10(value)))}f}"


def percent(share: float | None) -> str:
    """A share of the whole; what is neither nothing nor all is not rounded to it."""
    if share is None or not math.isfinite(share):
        return ""
    if 0 < share < 0.01:
        return "< 1 %"
    return "> 99 %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def count(value: int) -> str:
    """A large whole number in words a person says."""
    for size, name in ((10**9, "billion"), (10**6, "million")):
        if value >= size:
            return f"{value / size:.3g} {name}"
    return f"{value:,}"


def sentence(text: str) -> str:
    """A sentence written for terminals as HTML: powers of ten and signs as they are printed in books."""
    return html.escape(_POWER.sub(lambda match: number(float(match.group())), text).replace("+-", "±"))


def with_code(text: str) -> str:
    """Text as HTML, calls of the library set as code."""
    return _CALL.sub(r"<code>\1</code>", html.escape(text))


def inline_json(value: Any) -> str:
    """JSON that may stand in a script element: no tag can begin in it, five digits, no NaN, infinity as a word."""
    return json.dumps(_each_float(value, _short), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def finite_json(value: Any) -> str:
    """JSON for programs; what is not finite becomes null."""
    return json.dumps(_each_float(value, lambda x: x if math.isfinite(x) else None), indent=1, allow_nan=False)


def _each_float(value: Any, change: Callable[[float], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _each_float(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_float(item, change) for item in value]
    return change(value) if isinstance(value, float) else value


def _short(value: float) -> float | str | None:
    if math.isfinite(value):
        return float(f"{value:.5g}")
    return None if math.isnan(value) else "inf" if value > 0 else "-inf"


Reader = Callable[[Any], Any]


@dataclass(frozen=True)
class TableCell:
    """A text and the key that it is sorted by; cells without a key come last."""

    text: str
    key: float | str | None = None
    hint: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str  # its heading
    read: Callable[[Any], TableCell]  # the cell of a row, or of a change in the table of a comparison
    meaning: str = ""  # what it means
    text: bool = False  # whether it holds words
    first: bool = False  # whether the table begins sorted by it


def number_column(name: str, value: Reader, meaning: str = "", first: bool = False) -> Column:
    """A column of numbers with three digits."""
    return Column(name, lambda subject: TableCell(number(value(subject)), value(subject)), meaning, first=first)


def share_column(name: str, value: Reader, meaning: str = "") -> Column:
    """A column of shares in percent."""
    return Column(name, lambda subject: TableCell(percent(value(subject)), value(subject)), meaning)


def text_column(name: str, value: Reader, meaning: str = "", hint: Reader = lambda _: "") -> Column:
    """A column of words, with what to show when they are pointed at."""
    return Column(name, lambda s: TableCell(value(s), value(s), hint(s)), meaning, text=True)


def sort_key(key: float | str | None) -> str:
    """The key by which the page's script sorts."""
    if key is None or key != key:
        return ""
    return key if isinstance(key, str) else f"{key:.6g}".replace("inf", "Infinity")


Axis = Literal["linear", "log", "both"]  # both: logarithmic to either side of zero
Numbers = tuple[float | None, ...]
DECADES = 20.0  # values further apart than this factor get a logarithmic axis


@dataclass(frozen=True)
class PlotSeries:
    """A quantity of every row."""

    name: str  # for the legend
    look: str  # its colour, a class of the style sheet
    y: Numbers  # a value for every row, None where there is none
    low: Numbers = ()  # lower quartile over units, if known
    high: Numbers = ()  # upper quartile
    least: Numbers = ()  # the smallest unit
    most: Numbers = ()  # the largest
    error: Numbers = ()  # standard errors of measured values
    x: Numbers = ()  # for a scatter plot, the other coordinate
    marker: str = ""  # as matplotlib calls it; a line without markers if empty
    dashed: bool = False  # whether the line is


@dataclass(frozen=True)
class Plot:
    """One plot: what it is called, what its axes are, and what is in it."""

    id: str
    title: str
    caption: str
    label: str
    axis: Axis
    series: tuple[PlotSeries, ...]
    kind: Literal["depth", "scatter"] = "depth"
    percent: bool = False


def per_row(rows: Iterable[ReportRow], value: Callable[[ReportRow], float | None]) -> Numbers:
    """A value of every row."""
    return tuple(value(row) for row in rows)


def number_of(name: str, factor: float = 1.0) -> Callable[[ReportRow], float | None]:
    """The reader of one of a row's numbers."""

    def read(row: ReportRow) -> float | None:
        return row.numbers[name] * factor if name in row.numbers else None

    return read


def spread_series(what: Literal["mean", "std"], rows: Sequence[ReportRow], name: str, look: str) -> PlotSeries:
    """The mean or the standard deviation of the layer, with quartiles and extremes over its units."""
    spreads = [row.mean if what == "mean" else row.std for row in rows]
    edges = (("low", "lower"), ("high", "upper"), ("least", "least"), ("most", "most"))
    bands: dict[str, Any] = {band: tuple(getattr(spread, edge) for spread in spreads) for band, edge in edges}
    return PlotSeries(name, look, per_row(rows, number_of(what)), **bands)


def total_series(rows: Sequence[ReportRow], name: str, look: str) -> PlotSeries:
    """The gradient summed over positions."""
    return PlotSeries(name, look, per_row(rows, lambda row: row.gradient_total))


def measured_series(rows: Sequence[ReportRow], what: str, name: str) -> PlotSeries:
    """One of the numbers as measured, with standard errors."""
    return PlotSeries(
        name,
        "measured",
        per_row(rows, lambda row: row.measured[what]["value"] if what in row.measured else None),
        error=per_row(rows, lambda row: row.measured[what]["error"] if what in row.measured else None),
        marker="o",
    )


def axis_of(values: Iterable[float | None]) -> Axis:
    """Logarithmic where values span decades."""
    sizes = sorted(abs(value) for value in values if value)
    return "log" if sizes and sizes[-1] > DECADES * sizes[0] else "linear"


def signed_axis(values: Iterable[float | None]) -> Axis:
    """For values around zero: logarithmic on both sides where the largest dwarf the usual ones."""
    sizes = sorted(abs(value) for value in values if value)
    return "both" if sizes and sizes[-1] > 5 * DECADES * sizes[len(sizes) // 2] else "linear"


def plotted(rows: Sequence[ReportRow], values: Numbers) -> list[float | None]:
    """The values of the rows that plots show, those with nothing inside them that do not only move elements."""
    return [value for row, value in zip(rows, values, strict=True) if row.is_layer]


SHOWN = 5  # errors and warnings that are not collapsed


@dataclass(frozen=True)
class FindingItem:
    """A finding and the word on its badge; about one that is gone nothing is to be done."""

    finding: Finding
    badge: str
    gone: bool = False


@dataclass(frozen=True)
class FindingGroup:
    """Findings under a title; of collapsed ones it is all that shows at first."""

    title: str
    items: Sequence[FindingItem]
    details: Literal["", "collapsed", "expanded"] = ""  # whether it can be collapsed, and how it begins


def row_numbers(rows: Sequence[ReportRow]) -> dict[str, int]:
    """Index of the first row of every label."""
    numbers: dict[str, int] = {}
    for index, row in enumerate(rows):
        numbers.setdefault(row.label, index)
    return numbers


def severities(numbers: dict[str, int], findings: Iterable[Finding]) -> dict[int, str]:
    """The worst that is said about a row, by its index; `numbers` has the index of every label."""
    ordered = sorted(findings, key=lambda finding: -ORDER[finding.severity])
    return {numbers[finding.where]: finding.severity for finding in ordered if finding.where in numbers}


def report_groups(findings: Sequence[Finding]) -> list[FindingGroup]:
    """The first errors and warnings in the open; more of them, and notes, collapsed."""
    worse = [finding for finding in findings if finding.severity != "note"]
    notes = [finding for finding in findings if finding.severity == "note"]
    more = worse[SHOWN:]
    finding_groups = [
        FindingGroup("", report_items(worse[:SHOWN])),
        FindingGroup(f"{len(more)} more: {severity_counts(more)}", report_items(more), "collapsed"),
        FindingGroup(severity_counts(notes), report_items(notes), "collapsed" if worse else "expanded"),
    ]
    return [group for group in finding_groups if group.items]


def report_items(findings: Iterable[Finding]) -> list[FindingItem]:
    """Findings with their severity on the badge."""
    return [FindingItem(finding, finding.severity) for finding in findings]


def comparison_groups(differences: Differences) -> list[FindingGroup]:
    """Findings that are new, gone, and in both states."""
    stayed = []
    for pair in differences.stayed:
        change, severity = severity_change(pair), pair[1].severity
        stayed.append(FindingItem(pair[1], severity if change == "stayed" else f"{change}: {severity}"))
    gone = [FindingItem(finding, f"was {finding.severity}", gone=True) for finding in differences.gone]
    groups = (("New", report_items(differences.new)), ("Gone", gone), ("In both", stayed))
    return [FindingGroup(title, items) for title, items in groups if items]


def comparison_items(differences: Differences) -> list[FindingItem]:
    """Findings that are new, gone and in both states, in one list."""
    return [
        *(FindingItem(finding, f"new {finding.severity}") for finding in differences.new),
        *(FindingItem(finding, "gone", gone=True) for finding in differences.gone),
        *(FindingItem(pair[1], f"{severity_change(pair)} {pair[1].severity}") for pair in differences.stayed),
    ]


def severity_counts(findings: Sequence[Finding]) -> str:
    """How many there are of each severity."""
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in ORDER}
    words = [f"{number} {severity}{'s' if number > 1 else ''}" for severity, number in counts.items() if number]
    return ", ".join(words) or "no findings"


DEEPEST, LARGEST_PART = 4, 0.6  # levels of the tree that can be parts, and their largest share of the layers
OPEN_ROWS = 60  # a tree of more rows begins collapsed below its first level


@dataclass(frozen=True)
class TreeEntry:
    """One line of the tree of modules."""

    name: str  # of the module or operation
    kind: str  # class of the module, or ``operation``
    mark: str  # look of the mark behind it, if any
    mark_title: str  # what the mark says
    closes: int  # how many levels end before it
    holds: bool  # whether a level begins with it
    expanded: bool  # whether that is open at first


def tree_entries(rows: Sequence[ReportRow], severities: Mapping[int, str]) -> tuple[list[TreeEntry], int]:
    """All lines in order, and how many levels are open after the last."""
    lines: list[TreeEntry] = []
    open_depths: list[int] = []
    for index, row in enumerate(rows):
        still = [depth for depth in open_depths if depth < row.depth]
        end = ends(rows, index)
        holds = end > index + 1
        name, kind = (row.own_name, row.name) if row.kind == "module" else (row.name, "operation")
        expanded = len(rows) <= OPEN_ROWS or row.depth == 0
        mark = _mark(index, end, severities)
        lines.append(TreeEntry(name, kind, *mark, len(open_depths) - len(still), holds, expanded))
        open_depths = [*still, row.depth] if holds else still
    return lines, len(open_depths)


def ends(rows: Sequence[ReportRow], index: int) -> int:
    """The index after the last row inside a row."""
    after = index + 1
    while after < len(rows) and rows[after].depth > rows[index].depth:
        after += 1
    return after


def groups(rows: Sequence[ReportRow]) -> list[str]:
    """For every row the part of the model it belongs to, for the axis of the plots: few, and none nearly all of it."""
    names: list[str] = []
    for length in range(1, DEEPEST + 1):
        names = [".".join(row.path.split(".")[:length]) for row in rows]
        sizes = Counter(group for group, row in zip(names, rows, strict=True) if row.is_layer)
        if len(sizes) > 2 and max(sizes.values()) <= LARGEST_PART * sum(sizes.values()):
            return names
    return names


def _mark(index: int, end: int, severities: Mapping[int, str]) -> tuple[str, str]:
    """The worst that is said about a row, or about those inside it."""
    if severity := severities.get(index):
        return severity, severity
    inside = [severities[row] for row in range(index + 1, end) if row in severities]
    worst = min(inside, key=ORDER.__getitem__, default="")
    return (f"inside {worst}", f"{worst} inside") if worst else ("", "")


TEMPLATES = Path(__file__).parent / "templates"
SCRIPTS = ("plots.js", "depth.js", "scatter.js", "pointer.js", "rows.js")


@dataclass(frozen=True)
class Page:
    """Everything that a page shows."""

    title: str  # of the window
    heading: str  # above everything
    lead: str  # one sentence on what this is
    facts: Sequence[tuple[str, str]]  # names and values
    findings_heading: str  # above the findings
    findings: Sequence[FindingGroup]  # in groups
    no_findings: str  # a sentence instead
    plots: Sequence[Plot]  # by depth, and scatter plots
    rows: Sequence[ReportRow]  # what the tree and the table hold, in the order of execution
    columns: Sequence[Column]  # of the table, after number and name
    subjects: Sequence[Any]  # what the columns read, one for every row
    judged: Sequence[Finding]  # what colours the rows: the findings of the state they show
    table_note: str = ""  # a sentence above the table


def render(page: Page) -> str:
    """The page as text."""
    numbers = row_numbers(page.rows)
    worst = severities(numbers, page.judged)
    return _rendered(
        "page.html",
        page=page,
        row_numbers=numbers,
        severities=worst,
        cells=_cells(page.columns, page.subjects),
        tree=tree_entries(page.rows, worst),
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
    templates = environment(TEMPLATES)
    templates.filters |= {"sentence": sentence, "with_code": with_code, "sort_key": sort_key}
    return templates


def _data(page: Page) -> dict[str, object]:
    """The data that the script draws from."""
    rows = [
        [row.label, row.name, group, int(row.is_layer), int(row.weighted), ends(page.rows, index)]
        for index, (row, group) in enumerate(zip(page.rows, groups(page.rows), strict=True))
    ]
    return {"rows": rows, "figures": {plot.id: asdict(plot) for plot in page.plots}}
