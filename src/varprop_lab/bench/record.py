"""What was measured, and the file it is kept in."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..store.files import write_atomically
from .timing import quartiles, ratio

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
        """Of the folded to the plain model."""
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
        found = (c for c in self.cells if (c.case, c.mode, c.variant) == (case, mode, variant) and c.rounds)
        return next(found, None)

    def time_ratio(self, cell: Measurement) -> float | None:
        """Of its step to that without normalization in the same rounds."""
        other = self.cell(cell.case, cell.mode, "none")
        if other is None or len(other.rounds) != len(cell.rounds) or not cell.rounds:
            return None
        return ratio(cell.rounds, other.rounds)

    def memory_ratio(self, cell: Measurement) -> float | None:
        """Of its memory to that without normalization."""
        other = self.cell(cell.case, cell.mode, "none")
        return cell.memory / other.memory if other and other.memory and cell.memory else None

    def write(self, folder: Path) -> None:
        """Keep all that there is, whole or not at all."""
        values = {
            **self.manifest,
            "cells": [{**c.to_dict(), "ratio": self.time_ratio(c)} for c in self.cells],
            "inference": [{**asdict(i), "ratio": i.ratio} for i in self.inferences],
            "notes": self.notes,
        }
        write_atomically(folder / FILE, f"{json.dumps(values, indent=1)}\n".encode(), then=ROOM)
