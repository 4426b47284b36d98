"""Names that users type: what they may have meant by one that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to add to a sentence; empty if nothing looks alike."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence on a name that does not exist."""
    names = list(known)
    return f"There is no {kind} {name!r}; known are {', '.join(names)}.{did_you_mean(name, names)}"
