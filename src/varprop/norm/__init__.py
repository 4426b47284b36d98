"""The analytic normalization: statistics of a layer from parameters alone, folded into its weights."""

from .api import init_, normalize
from .layers import Normalized
from .report import FoldReport, PlainWarning, fold_report
from .scope import unchanged

__all__ = ["FoldReport", "Normalized", "PlainWarning", "fold_report", "init_", "normalize", "unchanged"]
