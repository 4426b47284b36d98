"""The results as tables, in a terminal and on a Markdown page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from varprop.text_table import Table

from ..report.facts import facts
from ..store.files import write_atomically
from .record import FILE, ROOM, Measurement, Record
from .timing import quartiles
from .variants import title

_LEFT = ("variant", "model", "note")


def tables(record: Record) -> list[Table]:
    """Everything that was measured."""
    groups: dict[str, list[Measurement]] = {}
    for cell in record.cells:
        groups.setdefault(cell.group, []).append(cell)
    columns = ("variant", "step ms", "quartiles", "x none", "MiB", "x none", "kernels", "note")
    found = [Table(name, columns, [_step(record, c) for c in cells], _LEFT) for name, cells in groups.items()]
    if record.inferences:
        found.append(_inference(record))
    return [table.without_empty_columns() for table in found]


def _step(record: Record, cell: Measurement) -> Sequence[str]:
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
        times = [f"{1e3 * quartiles(seconds)[1]:.3f}" for seconds in (found.folded, found.plain)]
        same = "yes" if found.identical else "NO"
        rows.append((f"{found.title}, {found.precision}", *times, _ratio(found.ratio), same))
    return Table("Inference", ("model", "folded ms", "plain ms", "x plain", "same bits"), rows, _LEFT)


def write_page(record: Record, folder: Path) -> Path:
    """All that was measured, with the command and the machine, as Markdown beside the file of numbers."""
    lines = [f"- {name}: {f'`{value}`' if name == 'Command' else value}" for name, value in facts(record.manifest)]
    how = "\n".join(lines) + f"\n\n{record.manifest['step']}"
    parts = [f"# What the normalizations cost\n\n{how}"]
    parts += [f"## {table.heading}\n\n{table.markdown()}" for table in tables(record) if table.rows]
    if record.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    path = (folder / FILE).with_suffix(".md")
    write_atomically(path, ("\n\n".join(parts) + "\n").encode(), then=ROOM)
    return path
