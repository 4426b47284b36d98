"""Hooks of the user's that look at a model while it is captured, and see tensors without values."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn


class HookWarning(UserWarning):
    """A hook ran on tensors without values, and may have kept some."""


@contextlib.contextmanager
def observers_named(model: nn.Module) -> Iterator[None]:
    """Warn of hooks that run within and return nothing; one that returns something is a part of the model."""
    seen: dict[str, None] = {}
    hooks = list(_user_hooks(model))
    for place, key, hook, name in hooks:
        place[key] = _watched(hook, name, seen)
    try:
        yield
    finally:
        for place, key, hook, _ in hooks:
            place[key] = hook
    if seen:
        warnings.warn(
            f"While the model was captured these hooks ran on tensors without values, of which they must not keep any: "
            f"{', '.join(seen)}.",
            HookWarning,
            stacklevel=4,
        )


def _user_hooks(model: nn.Module) -> Iterator[tuple[Any, int, Any, str]]:
    """Where each is kept, under which key, itself, and what to call it."""
    for path, module in model.named_modules():
        for place in (module._forward_hooks, module._forward_pre_hooks):
            for key, hook in list(place.items()):
                if str(getattr(hook, "__module__", "")).partition(".")[0] not in ("torch", "varprop"):
                    name = getattr(hook, "__name__", type(hook).__name__)
                    yield place, key, hook, f"{name} on '{path or type(module).__name__}'"


def _watched(hook: Any, name: str, seen: dict[str, None]) -> Any:
    @functools.wraps(hook)
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            seen[name] = None
        return result

    return watched
