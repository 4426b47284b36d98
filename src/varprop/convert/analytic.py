"""The way over to `varprop.norm`: what the conversions need of it."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..norm import Normalized, fold
from ..norm.api import captured_for, normalized_


def normalized_sites(model: nn.Module) -> dict[str, Normalized]:
    """The analytically normalized layers of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Normalized)}


def normalize_(model: nn.Module, given: Any, example: Any) -> nn.Module:
    """Put the analytic normalization in, in place, with the function as it is; a failure leaves the model half done."""
    return normalized_(model, captured_for(model, given, example), "preserve")


def fold_(model: nn.Module) -> nn.Module:
    """Take the analytic normalization out, in place; the batch norms it has absorbed stay away."""
    return fold(model, inplace=True, keep_batchnorm=False)
