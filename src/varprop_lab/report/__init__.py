"""Tables, figures, an HTML page and documentation, from a folder of results."""

from .answer import answer, answer_and_table
from .output import write, write_docs, write_one

__all__ = ["answer", "answer_and_table", "write", "write_docs", "write_one"]
