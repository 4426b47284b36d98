"""Progress of long work: rich's live line on a terminal, now and then a plain line elsewhere or without rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TextIO

PLAIN_SECONDS = 10.0  # between two plain lines, at least


class Progress:
    """Counts steps: in a bar of rich's (`rich.progress.Progress`) where there is one, otherwise as plain lines."""

    def __init__(
        self, total: int, title: str, stream: TextIO | None = None, bar: Any = None, seconds: float = PLAIN_SECONDS
    ) -> None:
        self.total, self.title, self.stream, self.bar, self.seconds = total, title, stream, bar, seconds
        self.done: float = 0
        self.text = ""
        self.started = self.printed = time.monotonic()
        self.task = bar.add_task(title, total=total, text="") if bar else None

    def advance(self, steps: float = 1, text: str = "") -> None:
        """Count steps done, and say what is going on; an empty text leaves the one before."""
        self.done += steps
        self.text = text or self.text
        if self.bar:
            self.bar.update(self.task, advance=steps, text=self.text)
            if self.done > self.total:
                self.bar.update(self.task, total=self.done + 1)  # short of its end: nobody knows how much is left
        elif time.monotonic() - self.printed >= self.seconds:
            self.print_line()

    def reach(self, text: str, done: float, total: int) -> None:
        """For work that counts its steps itself, and knows how many there are when it begins."""
        self.total = total
        if self.bar:
            self.bar.update(self.task, total=total)
        self.advance(done - self.done, text)

    def print_line(self) -> None:
        """The state of things as a plain line, whenever the last one was."""
        self.printed = time.monotonic()
        elapsed = self.printed - self.started
        rate = self.done / elapsed if elapsed > 0 else 0.0
        done = round(self.done, 2)
        if self.done > self.total:  # a search that was widened
            counted = f"{done}, more than the {self.total} expected"
        else:
            counted = f"{100 * self.done / max(1, self.total):3.0f} % ({done}/{self.total})"
        texts = [f"{self.title}: {counted}", _rate(rate), f"{_clock(elapsed)} elapsed"]
        if rate and self.done < self.total:
            texts.append(f"{_clock((self.total - self.done) / rate)} left")
        if self.stream is not None:
            print(", ".join([*texts, self.text] if self.text else texts), file=self.stream, flush=True)


@contextmanager
def show(total: int, title: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """Show the progress of what happens within; arguments as of `Progress`, standard error by default."""
    stream = sys.stderr if stream is None else stream  # results on standard output stay clean
    if stream.isatty() and find_spec("rich") is not None:
        with _rich_bar(title, stream) as bar:
            yield Progress(total, title, bar=bar)
        return
    progress = Progress(total, title, stream)
    try:
        yield progress
    finally:
        progress.print_line()


def _rich_bar(title: str, stream: TextIO) -> Any:
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            return _rate(task.finished_speed or task.speed or 0.0)

    def fixed(width: int) -> Column:  # only the text gives way on a narrow terminal
        return Column(no_wrap=True, min_width=width)

    return progress.Progress(
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


def _rate(per_second: float) -> str:
    if 0 < per_second < 1:
        return f"{60 * per_second:.3g}/min"
    return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.3g}/s"


def _clock(seconds: float) -> str:
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{remainder:02d}" if hours else f"{minutes}:{remainder:02d}"
