"""The results as a page: how they were measured, and all tables."""

from __future__ import annotations

from pathlib import Path

from ..page import facts
from ..store import write_atomically
from .record import FILE, Record
from .table import LEFT, Table, tables

PAGE = Path(FILE).with_suffix(".md").name


def write(record: Record, folder: Path) -> Path:
    """The page beside the file of numbers."""
    path = folder / PAGE
    write_atomically(path, page(record).encode(), then="make room and run the command again")
    return path


def page(record: Record) -> str:
    """All that was measured, with the command and the machine."""
    chart = Path(FILE).with_suffix(".png").name
    parts = [f"# What the normalizations cost\n\n{how(record)}", f"![step times as multiples of none]({chart})"]
    parts += [f"## {table.heading}\n\n{as_markdown(table)}" for table in tables(record) if table.rows]
    if record.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    return "\n\n".join(parts) + "\n"


def how(record: Record) -> str:
    """Command, machine and versions, a line each, and what a step is."""
    lines = [f"- {name}: {f'`{value}`' if name == 'Command' else value}" for name, value in facts(record.manifest)]
    return "\n".join(lines) + f"\n\n{record.manifest['step']}"


def as_markdown(table: Table) -> str:
    """A table as Markdown writes it."""
    rules = ["---" if column in LEFT else "---:" for column in table.columns]
    return "\n".join("| " + " | ".join(row) + " |" for row in (table.columns, rules, *table.rows))
