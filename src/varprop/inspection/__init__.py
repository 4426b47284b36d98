"""A look inside a network without data: statistics, gradients and findings, layer by layer."""

from .report import Comparison, Report
from .run import inspect
from .summary import Summary, summary

__all__ = ["Comparison", "Report", "Summary", "inspect", "summary"]
