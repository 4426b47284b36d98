"""Progress of long work: a live line with rate and remaining time on a terminal, now and then a plain one elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO

PLAIN_SECONDS = 10.0  # between two plain lines, at least


class Progress(Protocol):
    """What `show` gives: something that counts steps."""

    def advance(self, steps: int = 1, text: str = "") -> None:
        """Count steps done, and say what is going on; an empty text leaves the one before."""


@contextmanager
def show(total: int, title: str, done: int = 0, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show the progress of what happens within.

    Args:
        total: How many steps there are.
        title: Stands at the beginning of the line.
        done: Steps that were done in an earlier run: counted, but not in the rate.
        stream: Where it goes; standard error by default, so that results on standard output stay clean.
    """
    stream = sys.stderr if stream is None else stream
    shown = _live if stream.isatty() and _has_rich() else _plain
    with shown(total, title, done, stream) as progress:
        yield progress


@contextmanager
def silent() -> Iterator[Progress]:
    """Progress that nobody sees, for work inside other work and for tests."""
    yield _Silent()


class _Silent:
    def advance(self, steps: int = 1, text: str = "") -> None:
        pass


def _has_rich() -> bool:
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True


@dataclass
class _Live:
    bar: Any
    task: Any

    def advance(self, steps: int = 1, text: str = "") -> None:
        fields = {"text": text} if text else {}
        self.bar.update(self.task, advance=steps, **fields)


@contextmanager
def _live(total: int, title: str, done: int, stream: TextIO) -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            return _rate(task.finished_speed or task.speed or 0.0)

    def fixed(width: int) -> Column:  # only the text gives way on a narrow terminal
        return Column(no_wrap=True, min_width=width)

    bar = progress.Progress(
        progress.TextColumn("[bold]{task.description}", table_column=fixed(len(title))),
        progress.BarColumn(bar_width=12, table_column=fixed(12)),
        progress.TaskProgressColumn(table_column=fixed(4)),
        Rate(table_column=fixed(7)),
        progress.TimeElapsedColumn(table_column=fixed(7)),
        progress.TextColumn("left", table_column=fixed(4)),
        progress.TimeRemainingColumn(table_column=fixed(7)),
        progress.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
        console=Console(file=stream),
        expand=True,
        speed_estimate_period=60.0,
    )
    with bar:
        yield _Live(bar, bar.add_task(title, total=total, completed=done, text=""))


@dataclass
class _Plain:
    total: int
    title: str
    done: int
    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    text: str = ""
    fresh: int = 0
    started: float = field(init=False)
    printed: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.printed = self.clock()

    def advance(self, steps: int = 1, text: str = "") -> None:
        self.done += steps
        self.fresh += steps
        self.text = text or self.text
        if self.clock() - self.printed >= PLAIN_SECONDS:
            self.line()

    def line(self) -> None:
        now = self.clock()
        self.printed = now
        print(_line(self, now - self.started), file=self.stream, flush=True)


@contextmanager
def _plain(total: int, title: str, done: int, stream: TextIO) -> Iterator[Progress]:
    progress = _Plain(total, title, done, stream)
    try:
        yield progress
    finally:
        progress.line()


def _line(progress: _Plain, elapsed: float) -> str:
    share = 100 * progress.done / max(1, progress.total)
    rate = progress.fresh / elapsed if elapsed > 0 else 0.0
    left = (progress.total - progress.done) / rate if rate else None
    parts = [
        f"{progress.title}: {share:3.0f} % ({progress.done}/{progress.total})",
        f"{_rate(rate)}, {_clock(elapsed)} gone",
    ]
    if left is not None and progress.done < progress.total:
        parts.append(f"{_clock(left)} left")
    return ", ".join([*parts, progress.text] if progress.text else parts)


def _rate(per_second: float) -> str:
    if 0 < per_second < 1:
        return f"{60 * per_second:.3g}/min"
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.3g}/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
