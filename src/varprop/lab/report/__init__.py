"""Tables, figures, an HTML page and documentation, from a folder of results."""

from .answer import answer
from .output import write, write_docs, write_one

__all__ = ["answer", "write", "write_docs", "write_one"]
