"""Progress of an inspection, on standard error where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Step = Callable[[str, int, int], None]


@contextlib.contextmanager
def shown() -> Iterator[Step | None]:
    """What `vp.inspect` takes to report its steps; None where nobody would see them."""
    if not sys.stderr.isatty():
        yield None
        return
    from varprop.lab import progress

    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def step(text: str, done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(progress.show(total, "inspect", stream=sys.stderr)))
            bars[0].advance(1 if done else 0, text)

        yield step
