"""The normalization as an initialization without data: projected, and folded away at once."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn

from .api import captured_for, fold, normalized_
from .batchnorm import has_seen_nothing, is_batch_norm
from .checks import check_copyable
from .linear_layers import Only


def init_(
    model: nn.Module,
    input: Any,
    *,
    example: Any = None,
    center: bool = True,
    shift: bool = True,
    only: Only | None = None,
) -> nn.Module:
    """Initialize a plain model without data, so that every unit starts with variance 1 and a mean that is known.

    The normalization is projected onto the present weights (random, orthogonal, ...) and folded into them: weights are
    scaled and keep their means. Batch norms elsewhere than after a layer normalize by the batch, unless they are in
    evaluation mode and have seen data.

    Args:
        model: The model; its weights and biases are changed.
        input: Moments of the data, as for `propagate`.
        example: The real shape, ``(1, 3, 224, 224)`` or an input of it, where `input` does not know it.
        center: Whether to set the mean of every unit by its bias. Without, weights are scaled by the second moment
            alone and biases are zero: He's rule for any activation and graph.
        shift: Whether means start, before activations that let errors of scale grow at mean 0 (rectifiers), at the
            smallest value where they die out: 0.377 for ReLU. Otherwise, and everywhere else, they start at 0.
        only: The layers to initialize, as for `normalize`: without those that are to start at zero, say.

    Returns:
        The model.
    """
    check_copyable(model)
    captured = captured_for(model, input, example, only, by_batch=_normalizes_by_batch)
    projected = functools.partial(
        normalized_, captured=captured, init="project", only=only, center=center, shifted=center and shift
    )
    projected(copy.deepcopy(model))  # a trial: where it fails, the model is as before
    return fold(projected(model), inplace=True)


def _normalizes_by_batch(module: nn.Module) -> bool:
    """Whether a batch norm is in training mode or will be: what it has stored says nothing."""
    return is_batch_norm(module) and (module.training or has_seen_nothing(module))
