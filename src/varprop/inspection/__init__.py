"""A look inside a network without data: statistics, gradients and findings, layer by layer."""

from .report import Report
from .run import inspect

__all__ = ["Report", "inspect"]
