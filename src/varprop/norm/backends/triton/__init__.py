"""Triton kernels that fold a whole normalized network in a handful of launches.

Forward: one launch for the moments of all lanes, whatever the depth, and one for all rows; few more where some rows are
very long, or have many taps. Backward: the same and one that adds partial sums. No host synchronisation, no atomics:
results are bitwise reproducible and everything can be captured in a CUDA graph once the tables exist.
"""

from .backend import TritonBackend, fits, kept_sizes, supported
from .launch import moments_backward, moments_forward, rows_backward, rows_forward
from .tables import TritonTables

__all__ = [
    "TritonBackend",
    "TritonTables",
    "fits",
    "kept_sizes",
    "moments_backward",
    "moments_forward",
    "rows_backward",
    "rows_forward",
    "supported",
]
