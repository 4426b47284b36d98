"""The paper's comparison of normalizations, as a tool: equal starts, learning rates found by Brent, running losses.

- `datasets`, `batches`: data sets and their download; augmentation and batches.
- `protocol`, `starts`: the experiments as plain values, their cells and outcomes; networks and where they begin.
- `training`: one network trained, its step captured as a CUDA graph.
- `execution`: runs an experiment: search, training, checkpoints, processes, Ray.
- `store`, `environment`: the folder of results and their tables; versions, machine, files written whole or not at all.
- `seed_statistics`, `figures`, `report`: when a difference counts; figures; text and HTML from results.
- `paper`: its experiments, and its claims judged on results (`verdicts`).
- `bench`: what a training step costs with each normalization.
- `comparison`: the same for a model of one's own, `varprop_lab.compare`.
- `demo`: the demonstration.
- `commands`: the commands of the command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = ["MethodComparison", "compare"]

if TYPE_CHECKING:
    from .comparison import MethodComparison, compare
else:  # a checker would take a function here for the type of every misspelt name

    def __getattr__(name):
        """Import `compare` and its result when they are asked for: most modules of the lab need neither."""
        if name in __all__:
            return getattr(import_module(".comparison", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
