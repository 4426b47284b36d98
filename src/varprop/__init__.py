"""Mean and variance of every unit of a PyTorch model, computed from its weights instead of measured on data."""

from .capture import Program
from .data import input_moments
from .engine import capture, coverage, propagate
from .errors import CaptureError, MissingRule, VarpropError, WrongMode
from .moments import Moments, Tokens
from .registry import elementwise, rule, structural
from .report import Coverage, Entry, Result

__all__ = [
    "CaptureError",
    "Coverage",
    "Entry",
    "MissingRule",
    "Moments",
    "Program",
    "Result",
    "Tokens",
    "VarpropError",
    "WrongMode",
    "capture",
    "coverage",
    "elementwise",
    "input_moments",
    "propagate",
    "rule",
    "structural",
]
__version__ = "0.1.0"
