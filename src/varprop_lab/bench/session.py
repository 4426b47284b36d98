"""A run under way: what was asked for, what was measured, how much time is left."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import environment
from .cases import STEP
from .record import Record
from .step import LR

CPU_ROUNDS, GPU_ROUNDS = 11, 15
GPU_BUDGET = 340.0
BUSY = 0.7  # a run of the benchmark just before leaves more than 0


@dataclass(frozen=True)
class Options:
    """What to measure and for how long; None for the default of the device."""

    device: str = "auto"  # or ``cpu`` or ``cuda``
    cases: tuple[str, ...] | None = None
    modes: tuple[str, ...] | None = None
    variants: tuple[str, ...] | None = None  # None: all in eager mode, few where compilation takes long
    rounds: int | None = None  # turns of every variant
    seconds: float = 0.5  # for all turns of one cell together
    max_seconds: float | None = None  # nothing new is begun after that
    out: Path = Path("runs/bench")
    tiny: bool = False  # small sizes and a fast compiler, to try the benchmark itself

    @property
    def backend(self) -> str:
        """Of torch.compile."""
        return "aot_eager" if self.tiny else "inductor"


class Session:
    """A run under way, with nothing measured yet; `say` gets the lines of progress."""

    def __init__(self, options: Options, device: torch.device, say: Callable[[str], None]) -> None:
        on_gpu = device.type == "cuda"
        self.options, self.device, self.say = options, device, say
        self.started = time.perf_counter()
        self.rounds = options.rounds or (GPU_ROUNDS if on_gpu else CPU_ROUNDS)
        self.limit = options.max_seconds or (GPU_BUDGET if on_gpu else math.inf)
        source = environment.provenance(device)
        self.record = Record(
            {
                **source,
                "hardware": {**source["hardware"], "load": load()},
                "seconds": 0.0,
                "finished": False,
                "step": STEP,
                "settings": {"rounds": self.rounds, "seconds": options.seconds, "lr": LR, "tiny": options.tiny},
            }
        )
        if load() >= BUSY:
            self.note(f"Other work is running here (load {load():.1f}): with more than one thread times say little.")

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
