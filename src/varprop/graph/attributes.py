"""What a model's own code keeps in attributes while it runs on tensors without values: put back as it was."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Attributes of modules, and the lists and dicts among them, are afterwards what they were before."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    held = [(value, value.copy()) for _, own in before for value in own.values() if type(value) in (list, dict)]
    try:
        yield
    finally:
        # What has not changed is not touched: other threads may be using the model.
        for module, own in before:
            _put_back(vars(module), own)
        for value, contents in held:
            if isinstance(value, dict):
                _put_back(value, contents)
            elif len(value) != len(contents) or any(map(operator.is_not, value, contents)):
                value[:] = contents


def _put_back(changed: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in [name for name in changed if name not in before]:
        del changed[name]
    for name, value in before.items():
        if name not in changed or changed[name] is not value:
            changed[name] = value
