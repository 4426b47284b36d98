"""Triton kernels that fold a whole normalized network in a handful of launches.

Forward: one launch for the moments of all channels, whatever the depth, and one for all rows; few more where some rows
are very long, or have many taps, or where a function has no kernel and is evaluated by torch between two launches.
Backward: one launch for each pass and one that adds partial sums. No host synchronization, no atomics: results are
bitwise reproducible and everything can be captured in a CUDA graph once the tables exist.
"""

from .moments import TritonMoments, moments_saved, supports
from .rows import TritonRows, fits, rows_saved

__all__ = ["TritonMoments", "TritonRows", "fits", "moments_saved", "rows_saved", "supports"]
