"""The parser of the command line: typer where it is installed, else a plain one that reads the same declarations."""

from __future__ import annotations

try:
    import typer
except ImportError:
    from . import plain as typer  # type: ignore[no-redef]

__all__ = ["typer"]
