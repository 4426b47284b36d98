"""Names that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence on a name that is not known, with those that look like it; with all of them where they are few."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listed = near or names[:8]
    ending = ", ..." if not near and len(names) > len(listed) else ""
    lead = "did you mean" if near else "known are"
    return f"{what} {name!r}; {lead} {', '.join(map(repr, listed))}{ending}{'?' if near else ''}"
