"""Tables, figures, an HTML page and documentation, from a folder of results."""

from .output import write, write_docs

__all__ = ["write", "write_docs"]
