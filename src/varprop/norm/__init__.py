"""The analytic normalization: statistics of a layer from parameters alone, folded into its weights."""

from .api import PlainWarning, fold, init_, normalize
from .depth import DepthWarning
from .layers import Normalized
from .scope import unchanged

__all__ = ["DepthWarning", "Normalized", "PlainWarning", "fold", "init_", "normalize", "unchanged"]
