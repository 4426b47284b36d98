"""One row of the test table: an operation with arguments, random ones given as Moments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from varprop import Moments


@dataclass
class Case:
    """A test row.

    Attributes:
        op: The overload under test.
        args: A function that builds the arguments in float64 (called under a fixed seed); random ones are Moments.
        kwargs: Keyword arguments.
        mean_error: Stated accuracy of the mean, in standard deviations of the output (None: exact).
        std_error: Stated relative accuracy of the standard deviation (None: exact).
        differentiable: Whether gradcheck applies.
        draws: Monte Carlo sample size of the slow tests; the others take an eighth.
        label: Tells rows of one operation apart.
        op_is_random: The operation draws random numbers itself, so that it cannot be reproduced at zero variance.
    """

    op: Any
    args: Callable[[], tuple[Any, ...]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    mean_error: float | None = None
    std_error: float | None = None
    differentiable: bool = True
    draws: int = 40_000
    label: str = ""
    op_is_random: bool = False

    @property
    def id(self) -> str:
        """The row's name in pytest's output."""
        name = self.op.__name__ if callable(self.op) and not hasattr(self.op, "_schema") else str(self.op)
        return f"{name}{'-' + self.label if self.label else ''}"


def normal(*shape: int, spread: float = 1.0, shift: float = 0.0, scale: float = 1.0) -> Moments:
    """Moments with random means around `shift` and random standard deviations around `scale`."""
    mean = shift + spread * torch.randn(*shape, dtype=torch.float64)
    std = scale * (0.5 + torch.rand(*shape, dtype=torch.float64))
    return Moments(mean, std.square())


def weight(*shape: int) -> torch.Tensor:
    """A random constant in float64."""
    return torch.randn(*shape, dtype=torch.float64)
