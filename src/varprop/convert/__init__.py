"""From model to model: other parametrizations of the same function, and what training them asks for."""

from .decay import param_groups, unit_norm_
from .reparametrize import batch_norm_start, reparametrize

__all__ = ["batch_norm_start", "param_groups", "reparametrize", "unit_norm_"]
