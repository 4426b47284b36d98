"""What a block of weight rows computes, however it lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class RowBackward(NamedTuple):
    """What the backward pass of a block reads."""

    unit: Tensor  # its weights
    gradient: Tensor  # by the folded weights, in the same form
    rate: Tensor  # of every row: scale over standard deviation
    size: Tensor | None  # what every row was divided by first, if by anything
    by_mean: Tensor  # derivative by the mean of every row
    by_var: Tensor  # and by its variance
    entering: Tensor  # mean and variance of the entering channels, as two rows
    levers: Tensor | None  # what `RowBlock.statistics` gave


class RowBlock(Protocol):
    """Some sites whose rows are folded together; the argument `unit` are its weights as `unit` gives them."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, entering channels, and weights."""
        ...

    @property
    def spreads(self) -> bool:
        """Whether the means of its rows differ by position."""
        ...

    def unit(self, weights: Sequence[Tensor], size: Tensor | None) -> Tensor:
        """What is folded: the weights, rows divided by their sizes, if any, and centred, if they are to be."""
        ...

    def peak(self, weights: Sequence[Tensor]) -> Tensor:
        """The largest weight of every row."""
        ...

    def statistics(
        self, unit: Tensor, entering: Tensor, first: Tensor, second: Tensor, scratch: Tensor
    ) -> Tensor | None:
        """Write mean and variance of every row; their spread over positions, where there is one.

        Args:
            unit: The weights.
            entering: Mean and variance of the entering channels, as two rows.
            first: Gets the means.
            second: Gets the variances.
            scratch: Room for as many numbers as the block has weights.
        """
        ...

    def fold(self, unit: Tensor, rate: Tensor, piece: Tensor) -> None:
        """Write the folded weights to a flat buffer in the order of the weights in memory."""
        ...

    def gradient(self, piece: Tensor) -> Tensor:
        """What such a buffer holds, in the form of `unit`."""
        ...

    def by_rate(self, unit: Tensor, gradient: Tensor, found: Tensor, scratch: Tensor) -> None:
        """Write the derivative by the rate of every row, as far as it comes from the weights."""
        ...

    def backward(self, given: RowBackward, piece: Tensor, by_entering: Tensor, scratch: Tensor) -> None:
        """Write the derivatives by the weights, in their order in memory, and by mean and variance of what enters."""
        ...
