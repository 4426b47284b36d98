"""Mean and variance of every unit of a PyTorch model, computed from its weights instead of measured on data."""

import typing as _typing
from importlib import import_module as _import_module

from .convert import batch_norm_start, param_groups, reparametrize, unit_norm_
from .engine.api import capture, coverage, propagate
from .engine.report import Coverage, Entry, Result
from .errors import CaptureError, MissingRule, VarpropError, WrongMode
from .graph.program import Program
from .inspection import Comparison, Report, Summary, inspect, summary
from .moments import Mixture, Moments, Tokens
from .norm import FoldReport, PlainWarning, fold_report, init_, normalize, unchanged
from .norm.api import fold
from .predict import Prediction, predict
from .rules.registry import elementwise, rule, structural
from .training.input_moments import input_moments
from .training.learning_rate import LRSearch, find_lr, training_objective
from .version import __version__ as __version__

__all__ = [
    "CaptureError",
    "Comparison",
    "Coverage",
    "Entry",
    "FoldReport",
    "LRSearch",
    "MissingRule",
    "Mixture",
    "Moments",
    "PlainWarning",
    "Prediction",
    "Program",
    "Report",
    "Result",
    "Summary",
    "Tokens",
    "VarpropError",
    "WrongMode",
    "batch_norm_start",
    "capture",
    "coverage",
    "elementwise",
    "find_lr",
    "fold",
    "fold_report",
    "init_",
    "input_moments",
    "inspect",
    "normalize",
    "param_groups",
    "predict",
    "propagate",
    "reparametrize",
    "rule",
    "structural",
    "summary",
    "training_objective",
    "unchanged",
    "unit_norm_",
]


if _typing.TYPE_CHECKING:
    from . import callbacks as callbacks
else:  # a checker would take a function here for the type of every misspelt name

    def __getattr__(name):
        """`vp.callbacks` is imported when it is asked for."""
        if name == "callbacks":
            return _import_module(".callbacks", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
