"""Tables, figures and an HTML page of results."""

from .html_page import write_one
from .text import answer, answer_and_table

__all__ = ["answer", "answer_and_table", "write_one"]
