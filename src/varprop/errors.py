"""Errors that say what to do. All derive from `VarpropError`."""

from __future__ import annotations


class VarpropError(Exception):
    """Base class of every error raised on purpose by varprop."""


class CaptureError(VarpropError):
    """The model could not be turned into a graph, or the input does not fit it."""


class MissingRule(VarpropError):
    """Some operations on the random path have no rule; the message lists each with a stub to fill in."""


class WrongMode(VarpropError):
    """A batch norm in evaluation mode has no statistics to normalize by."""
