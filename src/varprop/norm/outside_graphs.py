"""What torch.compile is to leave alone; imported where somebody compiles, for the decorator imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def call_outside_graphs(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function as it is written, between two compiled graphs."""
    return function(*args)
