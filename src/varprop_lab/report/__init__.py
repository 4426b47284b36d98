"""Tables, figures and an HTML page of results."""

from .answer import answer, answer_and_table
from .output import write_one

__all__ = ["answer", "answer_and_table", "write_one"]
