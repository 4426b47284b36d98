"""What was measured, the file it is kept in, and its tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from varprop.text_table import Table

from ..report.text import facts
from ..store.folder import write_atomically
from .cases import title
from .step import quartiles, ratio

FILE = "normalization.json"
ROOM = "make room and run the command again"  # what to do when the disk is full


@dataclass(frozen=True)
class Measurement:
    """One variant in one mode of one case."""

    case: str
    title: str  # of the case
    mode: str
    variant: str
    precision: str
    batch: int  # samples in a step
    preparing: float = 0.0  # seconds of building, compiling and warming up
    memory: int | None = None  # peak bytes of a step; None on a CPU
    kernels: int | None = None  # that the GPU runs in a step
    rounds: tuple[float, ...] = ()  # seconds of a step, one number a round; empty if it could not be measured
    note: str = ""  # why not, or what is odd

    @property
    def seconds(self) -> float:
        """Median of a step."""
        return quartiles(self.rounds)[1] if self.rounds else math.nan

    @property
    def group(self) -> str:
        """Case, mode and precision in a few words."""
        return f"{self.title}, batch {self.batch}, {self.mode} {self.precision}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with the quartiles."""
        lower, middle, upper = quartiles(self.rounds) if self.rounds else (None, None, None)
        return {**asdict(self), "seconds": middle, "lower_quartile": lower, "upper_quartile": upper}


@dataclass(frozen=True)
class Inference:
    """The folded model beside the plain model with the same weights."""

    case: str
    title: str
    precision: str
    folded: tuple[float, ...]
    plain: tuple[float, ...]
    identical: bool

    @property
    def ratio(self) -> float:
        """Time of the folded model over that of the plain one."""
        return ratio(self.folded, self.plain)


@dataclass
class Record:
    """Everything of a run; grows while it runs."""

    manifest: dict[str, Any]
    cells: list[Measurement] = field(default_factory=list)
    inferences: list[Inference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def cell(self, case: str, mode: str, variant: str) -> Measurement | None:
        """One that was measured."""
        matching = (c for c in self.cells if (c.case, c.mode, c.variant) == (case, mode, variant) and c.rounds)
        return next(matching, None)

    def time_ratio(self, cell: Measurement) -> float | None:
        """Time of a step over that without normalization in the same rounds; None if that was not measured."""
        plain = self.cell(cell.case, cell.mode, "none")
        if plain is None or len(plain.rounds) != len(cell.rounds) or not cell.rounds:
            return None
        return ratio(cell.rounds, plain.rounds)

    def memory_ratio(self, cell: Measurement) -> float | None:
        """Memory of a step over that without normalization; None if that was not measured."""
        plain = self.cell(cell.case, cell.mode, "none")
        return cell.memory / plain.memory if plain and plain.memory and cell.memory else None

    def write(self, folder: Path) -> None:
        """Keep all that there is, whole or not at all."""
        values = {
            **self.manifest,
            "cells": [{**c.to_dict(), "ratio": self.time_ratio(c)} for c in self.cells],
            "inference": [{**asdict(i), "ratio": i.ratio} for i in self.inferences],
            "notes": self.notes,
        }
        write_atomically(folder / FILE, f"{json.dumps(values, indent=1)}\n".encode(), then=ROOM)


_LEFT = ("variant", "model", "note")


def tables(record: Record) -> list[Table]:
    """Everything that was measured."""
    groups: dict[str, list[Measurement]] = {}
    for cell in record.cells:
        groups.setdefault(cell.group, []).append(cell)
    columns = ("variant", "step ms", "quartiles", "x none", "MiB", "x none", "kernels", "note")
    result = [Table(name, columns, [_step(record, c) for c in cells], _LEFT) for name, cells in groups.items()]
    if record.inferences:
        result.append(_inference(record))
    return [table.without_empty_columns() for table in result]


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
    for inference in record.inferences:
        times = [f"{1e3 * quartiles(seconds)[1]:.3f}" for seconds in (inference.folded, inference.plain)]
        same = "yes" if inference.identical else "NO"
        rows.append((f"{inference.title}, {inference.precision}", *times, _ratio(inference.ratio), same))
    return Table("Inference", ("model", "folded ms", "plain ms", "x plain", "same bits"), rows, _LEFT)


def write_page(record: Record, folder: Path) -> Path:
    """All that was measured, with the command and the machine, as Markdown beside the file of numbers."""
    lines = [f"- {name}: {f'`{value}`' if name == 'Command' else value}" for name, value in facts(record.manifest)]
    how = "\n".join(lines) + f"\n\n{record.manifest['step']}"
    sections = [f"# What the normalizations cost\n\n{how}"]
    sections += [f"## {table.heading}\n\n{table.markdown()}" for table in tables(record) if table.rows]
    if record.notes:
        sections.append("## Notes\n\n" + "\n".join(f"- {note}" for note in record.notes))
    path = (folder / FILE).with_suffix(".md")
    write_atomically(path, ("\n\n".join(sections) + "\n").encode(), then=ROOM)
    return path
