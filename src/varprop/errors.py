"""Errors that say what to do. All derive from `VarpropError`."""

from __future__ import annotations


class VarpropError(Exception):
    """Base class of every error raised on purpose by varprop.

    Example:
        >>> try:
        ...     vp.propagate(nn.Linear(4, 2), torch.zeros(1, 4))
        ... except vp.VarpropError as error:
        ...     print(type(error).__name__)
        CaptureError
    """


class CaptureError(VarpropError):
    """The model could not be turned into a graph, or the input does not fit it.

    Example:
        >>> vp.propagate(nn.Linear(4, 2), vp.Moments(0.0, 1.0))
        Traceback (most recent call last):
        varprop.errors.CaptureError: Moments of one number have no shape: give one, such as example=(1, 3, 32, 32).
    """


class MissingRule(VarpropError):
    """Some operations on the random path have no rule; the message lists each with a stub to fill in.

    Example:
        >>> class Inverse(nn.Module):
        ...     def forward(self, x):
        ...         return torch.linalg.inv(x)
        >>> vp.propagate(Inverse(), vp.Moments(0.0, 1.0), example=(1, 2, 2))
        Traceback (most recent call last):
        varprop.errors.MissingRule: ...
    """


class WrongMode(VarpropError):
    """A batch norm in evaluation mode has no statistics to normalize by.

    Example:
        >>> issubclass(vp.WrongMode, vp.VarpropError)
        True
    """


class RandomChoice(CaptureError):
    """The model chooses by a random number which of several graphs it runs."""
