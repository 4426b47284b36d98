"""Lanes by number: all that there are, the functions that make them, and the order in which a fold computes them.

While operations of the graph move lanes, their numbers stand for their values: as means and variances of a `Moments`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..moments import Moments
from .fold.layout import Function, Step

NUMBER = 2**40  # lanes are numbered from here while they are moved, so that no constant looks like one


class NotLanes(Exception):
    """A value that does not consist of lanes."""


class Fixed(NamedTuple):
    """A value that is not random among lanes: a parameter, or what follows from parameters alone.

    Attributes:
        node: The name of its node.
        shape: The shape in which it stands beside a random value.
        lanes: The shape of its lanes, to which it is expanded.
    """

    node: str
    shape: tuple[int, ...]
    lanes: tuple[int, ...]

    def expanded(self, value: Tensor) -> Tensor:
        """The value of every lane."""
        return value.reshape(self.shape).expand(self.lanes).flatten()


@dataclass
class Numbering:
    """The lanes while they are found.

    Attributes:
        level: For every lane, how many steps come before it.
        raw: Every function applied: with the lanes it reads, and the first lane it makes.
        fixed: Values that are not random beside lanes, with the lanes they are.
        known: The lanes of functions applied before, which are the same if applied again.
    """

    level: list[int] = field(default_factory=list)
    raw: list[tuple[Function, tuple[Tensor, ...], int]] = field(default_factory=list)
    fixed: list[tuple[Fixed, Tensor]] = field(default_factory=list)
    known: dict[Any, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many lanes there are."""
        return len(self.level)

    def new(self, count: int, level: int = 0) -> Tensor:
        """Fresh lanes."""
        first = len(self.level)
        self.level += [level] * count
        return torch.arange(first, first + count)

    def fix(self, value: Fixed) -> Moments:
        """Lanes for a value that is not random."""
        numbers = self.new(math.prod(value.lanes))
        self.fixed.append((value, numbers))
        return moving_lanes(numbers.view(value.lanes), value.lanes)

    def apply(self, function: Function, moving: list[Moments], full: Any) -> Moments:
        """Lanes for a function of lanes; each combination of arguments once."""
        spread = torch.broadcast_tensors(*(m.mean for m in moving))
        combinations = torch.stack([_numbers(t).flatten() for t in spread])
        distinct, place = torch.unique(combinations, dim=1, return_inverse=True)
        key = (function.name, *distinct.flatten().tolist())
        if key not in self.known:
            level = 1 + max(self.level[lane] for lane in distinct.flatten().tolist())
            made = self.new(distinct.shape[1], level)
            self.raw.append((function, tuple(distinct), int(made[0])))
            self.known[key] = made
        return moving_lanes(self.known[key][place].view(spread[0].shape), full)

    def steps(self, entering: list[Tensor]) -> tuple[list[Step], Tensor]:
        """The functions that lead to lanes that enter a site, in order, and the new number of every lane.

        Equal functions of one level are together.
        """
        needed, made = (torch.zeros(self.count, dtype=torch.bool) for _ in range(2))
        needed[torch.cat(entering)] = True
        groups: dict[tuple[int, str], list[int]] = {}
        for place, (function, inputs, first) in reversed(list(enumerate(self.raw))):
            own = slice(first, first + len(inputs[0]))
            made[own] = True
            if bool(needed[own].any()):
                needed[torch.cat(inputs)] = True
                groups.setdefault((self.level[first], function.name), []).insert(0, place)
        number = self._numbers_of_unmade(made)
        start, steps = int((~made).sum()), []
        for key in sorted(groups):
            members = [self.raw[place] for place in groups[key]]
            for _, inputs, first in members:
                count = len(inputs[0])
                number[first : first + count] = torch.arange(start, start + count)
                start += count
            function, arity = members[0][0], len(members[0][1])
            lanes = tuple(torch.cat([inputs[k] for _, inputs, _ in members]) for k in range(arity))
            steps.append((function, lanes, start - len(lanes[0]), len(lanes[0])))
        done = [Step(f, tuple(number[lane] for lane in lanes), first, n) for f, lanes, first, n in steps]
        return done, number

    def _numbers_of_unmade(self, made: Tensor) -> Tensor:
        """Lanes that no function makes come first, in their order, those of parameters at their end."""
        fixed = torch.zeros_like(made)
        for _, lanes in self.fixed:
            fixed[lanes] = True
        number = torch.cumsum(~made & ~fixed, 0) - 1
        number[fixed] = int((~made & ~fixed).sum()) + torch.arange(int(fixed.sum()))
        return number


def moving_lanes(numbers: Tensor, full: Any) -> Moments:
    """Lanes on their way through operations."""
    values = numbers.double() + NUMBER
    return Moments(values, values, full)


def lane_numbers(moving: Moments) -> Tensor:
    """Which lanes came through."""
    return _numbers(moving.mean)


def _numbers(values: Tensor) -> Tensor:
    return (values - NUMBER).long()
