"""The noise that enters a network: how much variance it has, where it enters, and what it adds to the outputs.

A source keeps the variance of its own entries. Its covariance follows from the derivatives of all outputs by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..graph.node import Node
from .samples import Samples, samples_apart

FIRST = Samples(1, 1, 0)  # until it is known
ONLY = -1  # noise that enters inside an operation, but can be told from its result
Outcomes = tuple[Tensor, float]  # the difference of the means of two outcomes, and the chance of the second


@dataclass
class ChannelCurve:
    """A curved function of channels, whose positions vary together if they share random weights."""

    node: Node  # the function
    value: Tensor  # its mean
    reads: list[tuple[Node, Tensor, Tensor]]  # the values it reads, with their means and its slopes by them
    channels: int  # the axis of channels, 1 or -1
    left: Tensor | None = None  # what its line leaves in some runs of the network, (runs, *entry), once they are made


@dataclass
class ElementNoise:
    """Independent noise on every element of a value."""

    name: str  # path of the module in which it enters, or the name of the input
    kind: str  # ``input``, ``dropout``, ``draw`` or the name of a non-linear operation
    entry: Tensor  # the mean to which it is added, by which the outputs are differentiated
    var: Tensor  # its variance, element by element
    node: Node  # the operation or input
    jump: Tensor | None = (
        None  # where one of two values is taken at random, as by dropout: the difference of their means
    )
    chance: float = 1.0  # of the second value, which dropout keeps
    by_channel: bool = False  # whether all positions of a channel are decided together, without use of `var`
    inside: int = 0  # if it enters inside an operation, where real draws do not show it: the number of its draw, from 1
    curve: ChannelCurve | None = None  # of a function whose positions may vary together, in place of `var`
    samples: Samples = FIRST  # where the samples are in the entry

    @property
    def drawn_var(self) -> Tensor | None:
        """The variance of what a real draw of this noise adds to first order; None if nothing is drawn here."""
        if self.inside:
            return None
        if self.jump is not None:
            return self.chance * (1 - self.chance) * self.jump.square()
        return self.var if self.kind in ("input", "dropout", "draw") else None

    @property
    def place(self) -> tuple[Node, int]:
        """Which value the entry is."""
        return self.node, self.inside

    @property
    def entries(self) -> list[Tensor]:
        """The means by which the outputs are differentiated."""
        return [self.entry]

    @property
    def width(self) -> int:
        """Elements of the factors of one output, all samples together."""
        return self.entry.numel()

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """A = J √var, (outputs, batch, elements): this noise adds A Aᵀ to the covariance of a sample's outputs.

        Args:
            gradients: For each entry, the derivatives of all outputs by it, (outputs, *entry).
        """
        (gradient,) = gradients
        if self.by_channel:
            assert self.jump is not None
            if self.samples.axis not in (0, 1):
                raise samples_apart(self.node)
            by_channel = (gradient * self.jump).unsqueeze(-1).flatten(3).sum(3)
            return self.samples.rows(by_channel * math.sqrt(self.chance * (1 - self.chance)))
        if (left := self._left_by_positions()) is not None:
            assert self.curve is not None
            axis = 3 if self.curve.channels == 1 else -1  # of (outputs, samples, *entry): summed over positions
            by_run = [self.samples.apart(gradient * run).movedim(axis, 2).flatten(3).sum(3) for run in left]
            return torch.cat(by_run, 2) / math.sqrt(len(left))
        return self.samples.rows(gradient * self.var.sqrt())

    def _left_by_positions(self) -> Tensor | None:
        """Remainders of its lines in some runs, if samples and channels have axes of their own; None otherwise."""
        if self.curve is None or self.curve.left is None or self.samples.axis is None:
            return None
        own = self.samples.axis == 0 if self.curve.channels == 1 else self.samples.axis < self.entry.ndim - 1
        return self.curve.left if own else None

    def along(self, gradients: Sequence[Tensor], noise: Tensor) -> Tensor:
        """The change of the outputs by a draw of this noise, to first order: (batch, outputs)."""
        return self.samples.rows(gradients[0] * noise).sum(2).T

    def covariance(self, gradients: Sequence[Tensor]) -> Tensor:
        """The covariance of a sample's outputs that this noise adds, (batch, outputs, outputs)."""
        if self.by_channel or self._left_by_positions() is not None:
            return gram(self.factors(gradients))
        return gram(self.samples.rows(gradients[0]), self.samples.rows(self.var.unsqueeze(0))[0])


@dataclass
class AttentionDropout(ElementNoise):
    """Dropout of the weights of an attention: all channels of a value drop together."""

    std: Tensor = field(default_factory=lambda: torch.empty(0))  # of the weights, (..., queries, keys)
    values: Tensor = field(default_factory=lambda: torch.empty(0))  # what they weigh, (..., keys, channels)

    @property
    def width(self) -> int:
        """Elements of the factors of one output, all samples together."""
        return self.std.numel()

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """A with A Aᵀ what this noise adds to the covariance of a sample's outputs, (outputs, batch, elements)."""
        (gradient,) = gradients
        if self.samples.axis is None or self.samples.axis >= gradient.ndim - 3:
            raise samples_apart(self.node)
        return self.samples.rows((gradient @ self.values.mT) * self.std)

    def covariance(self, gradients: Sequence[Tensor]) -> Tensor:
        """The covariance of a sample's outputs that this noise adds, (batch, outputs, outputs)."""
        return gram(self.factors(gradients))


@dataclass
class ParameterUse:
    """An operation that reads a random parameter."""

    entry: Tensor  # the mean of its result
    node: Node  # the operation
    # from derivatives by the entry and what the parameter is multiplied with, both with samples apart (`Samples`), to
    # derivatives by the parameter, (outputs, batch, *parameter)
    pull: Callable[[Tensor, Any], Tensor]
    read: Any = None  # what the parameter is multiplied with
    # the same from the operation's arguments in a run of the network; None if it is a constant, or if the operation's
    # own rule knows what is left of the product
    reading: Callable[[Sequence[Any]], Tensor] | None = None
    # the variance that the parameter adds to every element of the result, if these are independent: of a linear layer's
    # weight that every sample meets once, Var W (E x)²
    spread: Tensor | None = None
    images: bool = False  # whether results have channels along axis 1, so that samples have to be along axis 0
    samples: Samples = FIRST  # where the samples are in the entry, and in what the parameter is multiplied with

    @property
    def place(self) -> tuple[Node, int]:
        """Which value the entry is."""
        return self.node, 0

    def by_parameter(self, gradient: Tensor, read: Tensor | None) -> Tensor:
        """Derivatives by the parameter, (outputs, batch, *parameter), from those by the result, (outputs, *entry)."""
        if self.samples.axis != 0 and (self.images or self.samples.axis is None):
            raise samples_apart(self.node)
        read = None if read is None else self.samples.apart(read.unsqueeze(0))[0]
        return self.pull(self.samples.apart(gradient), read)


@dataclass
class ParameterNoise:
    """A random parameter, whose noise all its uses and positions share, sample by sample."""

    name: str
    var: Tensor
    kind: str = "parameter"
    uses: list[ParameterUse] = field(default_factory=list)  # the operations that read it

    @property
    def entries(self) -> list[Tensor]:
        """One for every use."""
        return [use.entry for use in self.uses]

    @property
    def width(self) -> int:
        """Elements of the factors of one output, all samples together."""
        return self.entries[0].numel() if self._spread() is not None else self.uses[0].samples.count * self.var.numel()

    def _spread(self) -> Tensor | None:
        return self.uses[0].spread if len(self.uses) == 1 else None

    def factors(self, gradients: Sequence[Tensor]) -> Tensor:
        """A with A Aᵀ what this noise adds to the covariance of a sample's outputs, (outputs, batch, elements)."""
        spread = self._spread()
        return self.by_weight(gradients) if spread is None else gradients[0] * spread.sqrt()

    def by_weight(self, gradients: Sequence[Tensor]) -> Tensor:
        """Per-sample derivatives by the parameter, times its standard deviation, (outputs, batch, weights)."""
        return self.scaled(use.by_parameter(g, use.read) for use, g in zip(self.uses, gradients, strict=True))

    def scaled(self, derivatives: Iterable[Tensor]) -> Tensor:
        """The sum of what its uses make of it, times its standard deviation, (outputs, batch, weights)."""
        total = sum(derivatives)
        assert isinstance(total, Tensor)
        return (total * self.var.sqrt()).reshape(*total.shape[:2], -1)

    def covariance(self, gradients: Sequence[Tensor]) -> Tensor:
        """The covariance of a sample's outputs that this noise adds, (batch, outputs, outputs)."""
        return gram(self.factors(gradients))


@dataclass
class SharedProducts:
    """Products of the noise of a parameter that positions share and the noise of what it is multiplied with.

    They are common to all positions: with g the derivative of an output by the result, x what the parameter w is
    multiplied with, they add Var w E[(sum over positions of g (x - E x))²]. Some runs of the network give x with its
    correlations between positions; for given x the expectation over w is exact, so that few are enough.
    """

    name: str  # path of the first module that reads the parameter
    parameter: ParameterNoise
    noises: list[list[Tensor | None]]  # for each run and each use x - E x, None where it is a constant
    kind: str = "shared product"

    @property
    def entries(self) -> list[Tensor]:
        """The entries of the parameter."""
        return self.parameter.entries

    @property
    def width(self) -> int:
        """Elements of the factors of one output and one run, all samples together."""
        return self.parameter.uses[0].samples.count * self.parameter.var.numel()

    def covariance(self, gradients: Sequence[Tensor]) -> Tensor:
        """The covariance of a sample's outputs that these products add, (batch, outputs, outputs)."""
        uses = list(zip(self.parameter.uses, gradients, strict=True))
        total = gradients[0].new_zeros(())
        for noises in self.noises:
            by_use = [use.by_parameter(g, n) for (use, g), n in zip(uses, noises, strict=True) if n is not None]
            total = total + gram(self.parameter.scaled(by_use))
        return total / len(self.noises)


Source = ElementNoise | ParameterNoise | SharedProducts


def gram(factors: Tensor, var: Tensor | None = None) -> Tensor:
    """A diag(var) Aᵀ of every sample, (batch, outputs, outputs), for factors A (outputs, batch, elements)."""
    weighted = factors if var is None else factors * var
    if len(factors) == 1:
        products: Tensor = torch.linalg.vecdot(weighted, factors)
        return products.view(-1, 1, 1)
    # samples come first without a copy: matrix products take rows from where they are
    return torch.bmm(weighted.movedim(0, 1), factors.movedim(0, 1).mT)
