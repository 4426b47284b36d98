"""A look inside a network without data: statistics, gradients and findings, layer by layer."""

from .comparison import Comparison
from .report import Report
from .run import inspect

__all__ = ["Comparison", "Report", "inspect"]
