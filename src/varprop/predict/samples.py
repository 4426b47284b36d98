"""Where the samples of a batch are inside a network, which may move their axis or merge it with others.

A network whose samples do not meet has derivatives that tell: with the outputs of every sample weighted by a number,
neighbours by different ones, the derivative by a value is the number of its sample times the plain derivative. Two
backward passes find the samples in all values at once; what a graph does with them does not change. The numbers are
powers of two, by which nothing is rounded in any precision, TF32 included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import VarpropError
from ..graph.node import Node

Place = tuple[Node, int]  # an operation, and the number of a value inside it
LOOKED_AT = 4096  # elements of a value; of every candidate at least some thousand are told apart
APART = 1e-2  # between numbers found and expected, should kernels differ in their rounding
SMALL = 1e-3  # of the largest derivative
MIXED = 1e-6  # of the squared derivatives, which may belong to another sample


@dataclass(frozen=True)
class Samples:
    """Where the samples are in a value: its elements in order are (before, count, behind).

    Attributes:
        count: How many samples there are.
        before: The product of all extents before theirs.
        axis: The axis that holds them; None if no single one does.
        outer: How many groups of samples that axis holds one after another.

    Example:
        >>> Samples.of(2, 3, (3, 2, 5)).axis  # time, samples, units
        1
    """

    count: int
    before: int
    axis: int | None
    outer: int = 1

    @staticmethod
    def of(count: int, before: int, shape: Iterable[int]) -> Samples:
        """Samples in a value of a shape, behind so many places."""
        passed = 1
        for axis, extent in enumerate(shape):
            if before % passed == 0 and extent % (before // passed * count) == 0:
                return Samples(count, before, axis, before // passed)
            passed *= extent
        return Samples(count, before, None)

    def apart(self, values: Tensor) -> Tensor:
        """Values (outputs, shape...) with samples as second axis; what is left of the axis they were in stays there."""
        if self.axis is None:
            return values.reshape(len(values), self.before, self.count, -1).movedim(2, 1)
        axis = self.axis + 1
        if values.shape[axis] == self.count:
            return values.movedim(axis, 1).unsqueeze(axis + 1)
        split: Tensor = values.unflatten(axis, (self.outer, self.count, -1))
        return split.movedim(axis + 1, 1).flatten(axis + 1, axis + 2)

    def rows(self, values: Tensor) -> Tensor:
        """Values (outputs, shape...) as (outputs, samples, elements)."""
        return self.apart(values).flatten(2)


class SampleTrace:
    """The samples in the values of a program, as far as they are known; a copy of it is empty."""

    def __init__(self) -> None:
        self.known: dict[Place, Samples] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleTrace, ()

    def complete(self, entries: dict[Place, Tensor], mean: Tensor) -> dict[Place, Samples]:
        """Where the samples are in some values.

        Args:
            entries: The values by node and number, as means that the output's mean depends on.
            mean: The output's mean, whose first axis holds the samples.

        Raises:
            VarpropError: If samples share a value, or meet in one.
        """
        count = len(mean)
        found = {place: self.known[place] for place in entries if place in self.known}
        missing = {place: entry for place, entry in entries.items() if place not in found}
        if count == 1:
            return {place: Samples.of(1, 1, entry.shape) for place, entry in entries.items()}
        if not missing:
            return found
        turns = torch.arange(count, dtype=torch.float64).mul(0.5 * (5**0.5 - 1)).frac()
        marks = (4 * turns).floor().exp2().to(mean)  # 1, 4, 1, 8, 2, ...
        direction = torch.cos(torch.arange(mean[0].numel(), device=mean.device, dtype=mean.dtype)).view(mean.shape[1:])
        plain, marked = (
            torch.autograd.grad(
                mean, list(missing.values()), weights.expand_as(mean), retain_graph=True, materialize_grads=True
            )
            for weights in (direction, direction * marks.view(-1, *[1] * (mean.ndim - 1)))
        )
        for (place, entry), by_all, by_mark in zip(missing.items(), plain, marked, strict=True):
            candidates = _candidates(entry.shape, by_all.flatten(), by_mark.flatten(), marks)
            if not candidates:
                raise samples_apart(place[0])
            found[place] = candidates[0]
            if len(candidates) == 1:  # else few elements matter, for now
                self.known[place] = candidates[0]
        return found


def samples_apart(node: Node) -> VarpropError:
    """The error where samples have no elements of their own."""
    return VarpropError(
        f"Samples, which are along the first axis of x, share noise or meet in {node.packet or node.target or node} of "
        f"'{node.module or '(model)'}': if they only share noise, predict one at a time, as in x[:1]."
    )


def _candidates(shape: torch.Size, plain: Tensor, marked: Tensor, marks: Tensor) -> list[Samples]:
    """All places in which the samples may be, the usual ones first."""
    count = len(marks)
    if len(plain) % count:
        return []
    each = len(plain) // count
    divisors = {d for small in range(1, math.isqrt(each) + 1) if each % small == 0 for d in (small, each // small)}
    places = [Samples.of(count, before, shape) for before in sorted(divisors)]
    places.sort(key=lambda samples: samples.axis is None)
    size = plain.abs()
    index = (size > SMALL * size.max()).nonzero().flatten()
    if not len(index):  # derivatives may cancel over the samples, as behind a subtraction of the batch's mean
        return [] if bool(marked.any()) else places
    index = index[:: -(-len(index) // LOOKED_AT)]
    found = marked[index] / plain[index]

    def fits(samples: Samples) -> bool:
        behind = each // samples.before
        return bool((found - marks[index // behind % count]).abs().max() < APART)

    places = [samples for samples in places if fits(samples)]
    if places:
        expected = plain.view(places[0].before, count, -1) * marks.view(-1, 1)
        if (expected.flatten() - marked).square().sum() > MIXED * marked.square().sum():
            return []
    return places
