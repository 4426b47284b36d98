"""What was measured, and the file it is kept in."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..store.files import write_atomically
from .timing import quartiles, ratio

FILE = "normalization.json"
ROOM = "make room and run the command again"  # what to do when the disk is full
METHODS = {"none": "standard", "weight": "weight", "batch": "batch", "analytic": "analytic"}  # as the lab names them


@dataclass(frozen=True)
class Measurement:
    """One variant in one mode of one case.

    Attributes:
        title: Of the case.
        batch: Samples in a step.
        preparing: Seconds of building, compiling and warming up.
        memory: Peak bytes of a step; None on a CPU.
        kernels: That the GPU runs in a step.
        rounds: Seconds of a step, one number a round; empty if it could not be measured.
        note: Why not, or what is odd.
    """

    case: str
    title: str
    mode: str
    variant: str
    precision: str
    batch: int
    preparing: float = 0.0
    memory: int | None = None
    kernels: int | None = None
    rounds: tuple[float, ...] = ()
    note: str = ""

    @property
    def seconds(self) -> float:
        """Median of a step."""
        return quartiles(self.rounds)[1] if self.rounds else math.nan

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


@dataclass(frozen=True)
class Roofline:
    """The fold of all weights alone, beside the time that the memory needs for the bytes that cannot be avoided.

    Attributes:
        weights: How many are folded.
        bandwidth: Bytes read and written a second in a large copy.
        forward_bytes: 4 read and 2 (bf16) or 4 written a weight.
        backward_bytes: The weight and its folded gradient read, its gradient written.
        forward: Measured seconds.
        backward: Measured seconds.
        how: They were measured.
        joining: Measured seconds to bring the gradients of all layers into one buffer, where that is done.
    """

    weights: int
    bandwidth: float
    forward_bytes: int
    backward_bytes: int
    forward: float
    backward: float
    how: str
    joining: float | None = None

    @property
    def least_forward(self) -> float:
        """Seconds at the speed of a copy."""
        return self.forward_bytes / self.bandwidth

    @property
    def least_backward(self) -> float:
        """Seconds at the speed of a copy."""
        return self.backward_bytes / self.bandwidth

    @property
    def forward_operations(self) -> int:
        """Of a weight: 2 for the mean, 3 for the variance, 1 to fold it."""
        return 6 * self.weights

    @property
    def backward_operations(self) -> int:
        """Of a weight: 2 for the row's rate, 6 for its own gradient, 2 and 3 for those by means and variances."""
        return 13 * self.weights

    @property
    def joining_bytes(self) -> int:
        """Every gradient by a folded weight, read and written."""
        return 2 * (self.forward_bytes - 4 * self.weights)


@dataclass
class Record:
    """Everything of a run; grows while it runs."""

    manifest: dict[str, Any]
    cells: list[Measurement] = field(default_factory=list)
    inferences: list[Inference] = field(default_factory=list)
    roofline: Roofline | None = None
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

    def put(self, cells: Sequence[Measurement]) -> None:
        """Add cells, in the place of earlier records of the same ones."""
        keys = {(c.case, c.mode, c.variant) for c in cells}
        self.cells[:] = [c for c in self.cells if (c.case, c.mode, c.variant) not in keys] + list(cells)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `models` is what the lab reads the overhead from."""
        return {
            **self.manifest,
            "models": self.models(),
            "cells": [{**c.to_dict(), "ratio": self.time_ratio(c)} for c in self.cells],
            "inference": [{**asdict(i), "ratio": i.ratio} for i in self.inferences],
            "roofline": None if self.roofline is None else roofline_dict(self.roofline),
            "notes": self.notes,
        }

    def models(self) -> dict[str, dict[str, float]]:
        """Seconds of a step by case, mode and method."""
        found: dict[str, dict[str, float]] = {}
        for cell in self.cells:
            if cell.rounds and cell.variant in METHODS:
                found.setdefault(group_title(cell), {})[METHODS[cell.variant]] = cell.seconds
        return found

    def write(self, folder: Path) -> Path:
        """Keep all that there is, whole or not at all."""
        path = folder / FILE
        content = json.dumps(self.to_dict(), indent=1)
        write_atomically(path, f"{content}\n".encode(), then=ROOM)
        return path


def roofline_dict(found: Roofline) -> dict[str, Any]:
    """With what follows from the numbers."""
    names = ("forward_operations", "backward_operations", "least_forward", "least_backward")
    return {**asdict(found), **{name: getattr(found, name) for name in names}}


def group_title(cell: Measurement) -> str:
    """Case, mode and precision in a few words."""
    return f"{cell.title}, batch {cell.batch}, {cell.mode} {cell.precision}"


def first_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
