"""Random numbers that a model draws elsewhere than from torch: they decide in Python what it computes."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

from torch import nn


def drawn_elsewhere() -> Any:
    """The states of the global generators of Python and numpy, equal if nothing was drawn in between."""
    numpy = sys.modules.get("numpy")  # the core does not need numpy, the user's model may
    if numpy is None:
        return random.getstate(), None
    kind, keys, *rest = numpy.random.get_state()
    return random.getstate(), (kind, keys.tobytes(), *rest)


def warn_of_draws(model: nn.Module) -> None:
    """Say what becomes of a model that decides by such numbers what it does in training, which layers to skip say."""
    warnings.warn(
        f"{type(model).__name__} draws from Python's random or from numpy in training mode, so that no single graph "
        "tells what it does: its statistics are those of evaluation mode in training, too. Draw with torch (a mask by "
        "torch.bernoulli, say) for statistics that count what is drawn.",
        stacklevel=5,
    )
