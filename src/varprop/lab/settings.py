"""How torch is set while an experiment runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from .protocol import Experiment


@contextlib.contextmanager
def reproducible(experiment: Experiment, device: torch.device) -> Iterator[None]:
    """One thread where operations are too small for several; the same numbers every time."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type == "cpu" and experiment.together:
        torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
