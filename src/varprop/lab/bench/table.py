"""The results as text: by rich if it is there, else in aligned columns."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from .record import Cell, Record, group_title
from .timing import quartiles
from .variants import title

LEFT = ("variant", "model", "fold", "target", "note", "verdict")


@dataclass(frozen=True)
class Table:
    """A heading, the columns, and rows of text."""

    heading: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(record: Record) -> list[Table]:
    """Everything that was measured."""
    groups: dict[str, list[Cell]] = {}
    for cell in record.cells:
        groups.setdefault(group_title(cell), []).append(cell)
    found = [_steps(record, heading, cells) for heading, cells in groups.items()]
    if record.inferences:
        found.append(_inference(record))
    if record.roofline is not None:
        found.append(_roofline(record))
    return [without_empty(table) for table in (*found, _targets(record))]


def without_empty(table: Table) -> Table:
    """The table without columns that no row has anything in."""
    used = [place for place in range(len(table.columns)) if any(row[place] for row in table.rows)]
    columns, *rows = (tuple(row[place] for place in used) for row in (table.columns, *table.rows))
    return Table(table.heading, columns, rows)


def _steps(record: Record, heading: str, cells: Sequence[Cell]) -> Table:
    columns = ("variant", "step ms", "quartiles", "x none", "MiB", "x none", "kernels", "note")
    return Table(heading, columns, [_step(record, cell) for cell in cells])


def _step(record: Record, cell: Cell) -> tuple[str, ...]:
    if not cell.rounds:
        return title(cell.variant), "", "", "", "", "", "", cell.note
    lower, middle, upper = (f"{1e3 * value:.3f}" for value in quartiles(cell.rounds))
    memory = "" if cell.memory is None else f"{cell.memory / 2**20:.1f}"
    ratios = _ratio(record.time_ratio(cell)), _ratio(record.memory_ratio(cell))
    count = "" if cell.kernels is None else str(cell.kernels)
    return title(cell.variant), middle, f"{lower}-{upper}", ratios[0], memory, ratios[1], count, cell.note


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _inference(record: Record) -> Table:
    rows = []
    for found in record.inferences:
        folded, plain = (f"{1e3 * quartiles(times)[1]:.3f}" for times in (found.folded, found.plain))
        rows.append(
            (
                f"{found.title}, {found.precision}",
                folded,
                plain,
                f"{found.ratio:.3f}",
                "yes" if found.identical else "NO",
            )
        )
    return Table("Inference", ("model", "folded ms", "plain ms", "x plain", "same bits"), rows)


def _roofline(record: Record) -> Table:
    found = record.roofline
    assert found is not None
    rows = [
        _piece("forward", found.forward_operations, found.forward_bytes, found.bandwidth, found.forward),
        _piece("backward", found.backward_operations, found.backward_bytes, found.bandwidth, found.backward),
    ]
    if found.joining is not None:
        rows.append(_piece("gradients joined", 0, found.joining_bytes, found.bandwidth, found.joining))
    heading = f"Fold of {found.weights:,} weights alone; a copy moves {found.bandwidth / 1e9:.0f} GB/s ({found.how})"
    columns = ("fold", "Mflop at least", "MB at least", "least us", "measured us", "x least", "GB/s")
    return Table(heading, columns, rows)


def _piece(name: str, operations: int, size: int, bandwidth: float, measured: float) -> tuple[str, ...]:
    least = size / bandwidth
    times = f"{1e6 * least:.1f}", f"{1e6 * measured:.1f}", f"{measured / least:.2f}"
    return name, f"{operations / 1e6:.0f}", f"{size / 1e6:.1f}", *times, f"{size / measured / 1e9:.0f}"


def _targets(record: Record) -> Table:
    rows = []
    for found in record.targets:
        measured = "" if found["measured"] is None else f"{found['measured']:.3f}"
        rows.append((found["target"], measured, f"{found['limit']:.2f}", found["verdict"]))
    return Table("Targets of the analytic norm", ("target", "measured", "at most", "verdict"), rows)


def show(record: Record) -> None:
    """Print all tables."""
    if importlib.util.find_spec("rich") is None:
        print("\n\n".join(plain(table) for table in tables(record)))
        return
    import rich.console
    import rich.table

    console = rich.console.Console(width=None if rich.get_console().is_terminal else 140)
    for table in tables(record):
        made = rich.table.Table(box=None, pad_edge=False)
        for column in table.columns:
            made.add_column(column, justify="left" if column in LEFT else "right")
        for row in table.rows:
            made.add_row(*row)
        console.print(table.heading, style="bold", highlight=False)
        console.print(made)
        console.print()


def plain(table: Table) -> str:
    """A table in aligned columns."""
    texts = zip(table.columns, *table.rows, strict=True)
    aligned = [_aligned(column, left=column[0] in LEFT) for column in texts]
    return "\n".join([table.heading, *("  ".join(row).rstrip() for row in zip(*aligned, strict=True))])


def _aligned(column: Sequence[str], left: bool) -> list[str]:
    width = max(map(len, column))
    return [text.ljust(width) if left else text.rjust(width) for text in column]
