"""Showing reports and comparisons: as text, as a page, in a notebook, as a picture."""
