"""Batch norms that have seen no data: what they have stored says nothing yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ...norm.batchnorm import has_seen_nothing


@contextmanager
def new_ones_by_batch(model: nn.Module) -> Iterator[int]:
    """Within, such batch norms normalize by the batch, as they will in training; how many there are."""
    chosen = [module for module in model.modules() if not module.training and has_seen_nothing(module)]
    for module in chosen:
        module.training = True
    try:
        yield len(chosen)
    finally:
        for module in chosen:
            module.training = False
