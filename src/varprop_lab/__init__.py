"""The paper's comparison of normalizations, as a tool: equal starts, learning rates found by Brent, running losses.

- `data`: data sets, their download, augmentation and batches.
- `protocol`: the experiments as plain values, their results, networks and starting points.
- `training`: one network, or many as a stacked ensemble, traced, and captured as CUDA graphs.
- `execution`: runs an experiment: search, training, checkpoints, processes.
- `store`: the folder of results.
- `verdicts`: the paper's claims, judged on results.
- `report`: tables, figures, HTML and Markdown from results.
- `deep`: normalizations in ResNets, a GPT and a ViT.
- `questions`: what the paper leaves open, by short trainings.
- `bench`: what a training step costs with each normalization.
- `comparison`: the same for a model of one's own, `varprop_lab.compare`.
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
