"""The page of a comparison: both states in every plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .compare_findings import severity_change
from .findings import Finding
from .page import Page
from .page_figures import (
    Axis,
    Figure,
    Series,
    axis_of,
    is_layer,
    mean_series,
    of,
    plotted,
    signed_axis,
    std_series,
    total_series,
)
from .page_findings import item, places, severities
from .page_table import Cell, Column, number_cell, share_cell, text_cell
from .page_text import count, number
from .rows import Row

if TYPE_CHECKING:
    from .compare import Change, Comparison

SHARES = ("saturated", "dead", "always_on")
Maker = Callable[[Sequence[Row], str, str], Series]


def comparison_page(comparison: Comparison) -> Page:
    """Both states in one picture, with what is new and what is gone."""
    rows, (first, second) = [change.after for change in comparison.changes], comparison.names
    return Page(
        title=f"{comparison.after.model}: {first} and {second}",
        heading=f"{comparison.after.model}: {first} → {second}",
        lead="Expected statistics of every layer in two states of one model, computed from the weights.",
        facts=_facts(comparison),
        findings=("Findings: what changed", _findings(comparison, places(rows))),
        figures=figures(comparison),
        rows=rows,
        columns=_columns(first, second),
        cells=[_cells(change) for change in comparison.changes],
        severities=severities(rows, comparison.after.findings),
        table_note=_missing(comparison),
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    before, after = comparison.before, comparison.after
    layers = [change for change in comparison.changes if is_layer(change.after)]
    known = [("parameters", count(after.parameters)), ("layers in both", str(len(layers)))]
    if before.gradient_ratio is not None and after.gradient_ratio is not None:
        ratios = f"{number(before.gradient_ratio)} → {number(after.gradient_ratio)} times"
        known.append(("gradient, first to last layer", ratios))
    if largest := comparison.largest(1):
        known.append(("largest change", largest[0].label))
    return known


def _findings(comparison: Comparison, known: Mapping[str, int]) -> str:
    found = comparison.findings
    parts = [
        _block("New", [item(finding, known) for finding in found.new]),
        _block("Gone", [_gone(finding, known) for finding in found.gone]),
        _block("In both", [item(pair[1], known, _word(pair)) for pair in found.stayed]),
    ]
    return "".join(parts) or '<p class="fine">Neither state has findings.</p>'


def _word(pair: tuple[Finding, Finding]) -> str:
    change = severity_change(pair)
    return pair[1].severity if change == "stayed" else f"{change}: {pair[1].severity}"


def _block(title: str, items: Sequence[str]) -> str:
    return f'<h3>{title}</h3><ul class="findings">{"".join(items)}</ul>' if items else ""


def _gone(finding: Finding, known: Mapping[str, int]) -> str:
    text = item(finding, known, f"was {finding.severity}").replace(
        f'<li class="{finding.severity}">', '<li class="gone">'
    )
    return text.partition('<p class="advice">')[0] + "</div></li>"


def figures(comparison: Comparison) -> list[Figure]:
    """Forward, backward, and units, both states in each."""
    found = [
        _both(comparison, std_series, "std", "Signal, forward", "standard deviation", axis_of),
        _both(comparison, total_series, "gradient", "Gradient, backward", "gradient scale", axis_of),
        _both(comparison, mean_series, "mean", "Mean, forward", "mean", signed_axis),
    ]
    units = _both(comparison, _idle_series, "units", "Units without effect", "units, %", lambda _: "linear", True)
    return [*found, units] if any(value is not None for value in units.series[0].y) else found


def _both(
    comparison: Comparison,
    make: Maker,
    id: str,
    title: str,
    label: str,
    axis: Callable[[Sequence[float | None]], Axis],
    percent: bool = False,
) -> Figure:
    rows = [change.after for change in comparison.changes]
    states = ([change.before for change in comparison.changes], rows)
    series = tuple(
        make(state, name, look) for state, name, look in zip(states, comparison.names, ("before", "after"), strict=True)
    )
    values = [value for one in series for value in plotted(rows, one.y)]
    return Figure(id, title, CAPTIONS[id], label, axis(values), series, percent=percent)


CAPTIONS = {
    "std": "Root mean square over the units of each layer; bands show how units differ.",
    "gradient": "Expected scale of the gradient summed over positions, for a gradient of variance 1 at the output.",
    "mean": "Average over the units of each layer.",
    "units": "Share of the units of each activation that are saturated, dead or always on.",
}


def _idle_series(rows: Sequence[Row], name: str, look: str) -> Series:
    def idle(row: Row) -> float | None:
        known = [row.numbers[share] for share in SHARES if share in row.numbers]
        return min(100.0, 100 * sum(known)) if known else None

    return Series(name, look, of(rows, idle), marker="square" if look == "before" else "circle")


def _columns(first: str, second: str) -> tuple[Column, ...]:
    pairs = [
        ("std", "standard deviation, root mean square over the units"),
        ("gradient", "gradient summed over positions"),
        ("mean", "mean, averaged over the units"),
    ]
    columns = [
        Column("class", "class of the module, or the operation", False),
        Column("change", "the larger of the factors of std and gradient, or of their inverses", first=True),
    ]
    for what, meaning in pairs:
        columns += [Column(f"{what}, {state}", f"{meaning}: {state}") for state in (first, second)]
        columns += [Column(f"{what}, times", f"{second} over {first}")] if what != "mean" else []
    for share in SHARES:
        words = share.replace("_", " ")
        columns += [Column(f"{words}, {state}", f"share of units: {state}") for state in (first, second)]
    return tuple(columns)


def _cells(change: Change) -> list[Cell]:
    before, after = change.before, change.after
    factor = 2**change.size if change.size < 1000 else float("inf")
    shares = [share_cell(row.numbers.get(share)) for share in SHARES for row in (before, after)]
    return [
        text_cell(after.name if after.kind == "module" else "operation"),
        number_cell(factor),
        number_cell(before.numbers["std"]),
        number_cell(after.numbers["std"]),
        number_cell(change.std_factor),
        number_cell(before.gradient_total),
        number_cell(after.gradient_total),
        number_cell(change.gradient_factor),
        number_cell(before.numbers["mean"]),
        number_cell(after.numbers["mean"]),
        *shares,
    ]


def _missing(comparison: Comparison) -> str:
    parts = [
        f"{len(labels)} row{'s' if len(labels) > 1 else ''} only in {name}, such as {labels[0]}"
        for name, labels in zip(comparison.names, (comparison.only_before, comparison.only_after), strict=True)
        if labels
    ]
    return "; ".join(parts) + "." if parts else ""
