"""Errors of the command line itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import varprop as vp


class Stopped(vp.VarpropError):
    """The user stopped it by Ctrl-C."""


@contextmanager
def stoppable(advice: str) -> Iterator[None]:
    """Within, Ctrl-C ends the command with a word on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"Stopped. {advice}") from None
