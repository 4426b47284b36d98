"""What a block of weight rows computes, however it lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class RowDerivatives(NamedTuple):
    """Of the rows of a block: how they are scaled, and the derivatives by their mean and variance."""

    rate: Tensor  # scale over standard deviation
    size: Tensor | None  # what they were divided by first, if by anything
    by_mean: Tensor
    by_var: Tensor


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
        """Writes mean and variance of every row; their spread over positions, where there is one.

        Args:
            unit: The weights.
            entering: Mean and variance of the entering channels, as two rows.
            first: Gets the means.
            second: Gets the variances.
            scratch: Room for as many numbers as the block has weights.
        """
        ...

    def fold(self, unit: Tensor, rate: Tensor, piece: Tensor, weights: Sequence[Tensor]) -> None:
        """Writes the folded weights to a flat buffer in the order of the weights in memory."""
        ...

    def gradient(self, piece: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The derivative by the folded weights, out of such a buffer, in the form of `unit`."""
        ...

    def by_rate(self, unit: Tensor, gradient: Tensor, found: Tensor, scratch: Tensor) -> None:
        """Writes the derivative by the rate of every row, as far as it comes from the weights."""
        ...

    def backward(
        self,
        unit: Tensor,
        gradient: Tensor,
        own: RowDerivatives,
        entering: Tensor,
        levers: Tensor | None,
        piece: Tensor,
        by_entering: Tensor,
        weights: Sequence[Tensor],
        scratch: Tensor,
    ) -> None:
        """Writes the derivatives by the weights and by what enters.

        Args:
            unit: The weights.
            gradient: By the folded weights.
            own: Of its rows.
            entering: What enters, as for `statistics`.
            levers: What `statistics` gave.
            piece: Gets the derivatives by the weights, in their order in memory.
            by_entering: Gets those by mean and variance of the entering channels.
            weights: Of all sites.
            scratch: As for `statistics`.
        """
        ...
