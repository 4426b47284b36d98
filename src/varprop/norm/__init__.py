"""The analytic normalization: statistics of a layer from parameters alone, folded into its weights."""

from .depth import DepthWarning
from .layers import Normalized
from .normalize import fold, init_, normalize

__all__ = ["DepthWarning", "Normalized", "fold", "init_", "normalize"]
