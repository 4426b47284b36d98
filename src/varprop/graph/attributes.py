"""What a model's own code keeps in attributes while it runs on tensors without values: put back as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Attributes of modules, and the lists and dicts among them, are afterwards what they were before."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    held = [(value, value.copy()) for _, own in before for value in own.values() if type(value) in (list, dict)]
    try:
        yield
    finally:
        for module, own in before:
            vars(module).clear()
            vars(module).update(own)
        for value, contents in held:
            value.clear()
            value.extend(contents) if isinstance(value, list) else value.update(contents)
