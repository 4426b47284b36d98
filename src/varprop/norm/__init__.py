"""The analytic normalization: statistics of a layer from parameters alone, folded into its weights."""

from .depth import DepthWarning
from .fold import fold, init_
from .layers import Normalized
from .native import describe_native
from .normalize import normalize
from .united import unchanged

__all__ = ["DepthWarning", "Normalized", "describe_native", "fold", "init_", "normalize", "unchanged"]
