"""A run under way: what was asked for, what was measured, how much time is left."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import varprop as vp

from .. import environment
from ..names import unknown
from .cases import STEP
from .record import Record
from .step import LR

CPU_ROUNDS, GPU_ROUNDS = 11, 15
GPU_BUDGET = 340.0
BUSY = 0.7  # a run of the benchmark just before leaves more than 0


@dataclass(frozen=True)
class Options:
    """What to measure and for how long.

    Attributes:
        device: ``auto``, ``cpu`` or ``cuda``.
        cases: Names; None for those of the device.
        modes: Likewise.
        variants: None for all in eager mode and the few of each case where compilation takes long.
        rounds: Turns of every variant; None for the default of the device.
        seconds: For all turns of one cell together.
        max_seconds: Nothing new is begun after that; None for the default of the device.
        out: Folder of the results.
        tiny: Small sizes and a fast compiler, to try the benchmark itself.
        command: What the user typed.
    """

    device: str = "auto"
    cases: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None
    rounds: int | None = None
    seconds: float = 0.5
    max_seconds: float | None = None
    out: Path = Path("runs/bench")
    tiny: bool = False
    command: str | None = None

    @property
    def backend(self) -> str:
        """Of torch.compile."""
        return "aot_eager" if self.tiny else "inductor"


@dataclass(frozen=True)
class Session:
    """A run under way."""

    device: torch.device
    options: Options
    record: Record
    say: Callable[[str], None]
    started: float
    rounds: int
    limit: float

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.started

    def save(self) -> None:
        """Write what there is."""
        self.record.manifest["seconds"] = round(self.spent, 1)
        self.record.write(self.options.out)

    def is_over(self, name: str) -> bool:
        """Whether the time is; then it is noted that something is skipped."""
        if over := self.spent > self.limit:
            self.note(f"{name}: skipped, {self.limit:.0f} s are over")
        return over

    def print(self, text: str) -> None:
        """A line of progress."""
        self.say(f"[{self.spent:6.1f} s] {text}")

    def note(self, text: str) -> None:
        """A line of progress that stays in the results."""
        self.record.notes.append(text)
        self.print(text)


def known(names: tuple[str, ...] | None, all_names: tuple[str, ...], kind: str) -> tuple[str, ...] | None:
    """The names, each once.

    Raises:
        VarpropError: On an unknown name, with those that are known.
    """
    for name in names or ():
        if name not in all_names:
            raise vp.VarpropError(unknown(kind, name, all_names))
    return tuple(dict.fromkeys(names)) if names else None


def begin(options: Options, device: torch.device, say: Callable[[str], None]) -> Session:
    """A run with nothing measured yet."""
    on_gpu = device.type == "cuda"
    rounds = options.rounds or (GPU_ROUNDS if on_gpu else CPU_ROUNDS)
    limit = options.max_seconds or (GPU_BUDGET if on_gpu else math.inf)
    described: dict[str, Any] = {
        "command": options.command or environment.command_line("varprop.lab.bench"),
        "hardware": {**environment.hardware(device), "load": load()},
        "versions": environment.versions(),
        "git": environment.git_state(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "finished": False,
        "step": STEP,
        "settings": {"rounds": rounds, "seconds": options.seconds, "lr": LR, "tiny": options.tiny},
    }
    session = Session(device, options, Record(described), say, time.perf_counter(), rounds, limit)
    if load() >= BUSY:
        session.note(f"Other work is running here (load {load():.1f}): with more than one thread times say little.")
    return session


def load() -> float:
    """Processes that ran in the last minute, on average; 0 where the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


@contextlib.contextmanager
def settings(device: torch.device) -> Iterator[None]:
    """TF32 and cuDNN's choice of the fastest algorithm on a GPU; no denormal numbers on a CPU, which are slow."""
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    if device.type == "cpu":
        torch.set_flush_denormal(True)
    else:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark
        torch.set_flush_denormal(False)
