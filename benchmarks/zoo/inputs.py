"""What a model of the zoo is fed: standard normal values, or tokens of equal probability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import varprop as vp


@dataclass(frozen=True)
class Normal:
    """Standard normal values; all axes but the channels are uniform."""

    shape: tuple[int, ...]
    channels: int = 1

    def drawn(self) -> Tensor:
        return torch.randn(self.shape)

    @property
    def has_positions(self) -> bool:
        """Whether it is an image, or several."""
        return len(self.shape) > 3

    def moments(self, apart: bool = False) -> vp.Moments:
        """Of every element where positions are to be kept apart, else of every channel."""
        stored = [n if axis == self.channels and len(self.shape) > 2 else 1 for axis, n in enumerate(self.shape)]
        stored = [1, *self.shape[1:]] if apart and self.has_positions else stored
        return vp.Moments(torch.zeros(stored), torch.ones(stored))

    def __str__(self) -> str:
        return "x".join(map(str, self.shape[1:]))


@dataclass(frozen=True)
class Words:
    """A row of tokens, every one of the vocabulary equally likely."""

    vocabulary: int
    length: int = 16

    def drawn(self) -> Tensor:
        return torch.randint(self.vocabulary, (1, self.length))

    has_positions = False

    def moments(self, apart: bool = False) -> vp.Tokens:
        return vp.Tokens.uniform(self.vocabulary)

    def __str__(self) -> str:
        return f"{self.length} tokens"


Kind = Normal | Words
Inputs = dict[str, Any] | tuple[Any, ...]  # positional or by name; numbers and None are constants
KINDS = (Normal, Words)


def per_input(inputs: Inputs, change: Callable[[Kind], Any]) -> Any:
    """The same structure with every random input replaced."""
    return pytree.tree_map_only(KINDS, change, inputs)


def drawn(inputs: Inputs) -> Any:
    """One random example."""
    return per_input(inputs, lambda kind: kind.drawn())


def moments(inputs: Inputs, apart: bool = False) -> Any:
    """The moments of the same, with positions alike or each by itself."""
    return per_input(inputs, lambda kind: kind.moments(apart))


def has_positions(inputs: Inputs) -> bool:
    """Whether there is an image among them."""
    return any(isinstance(leaf, KINDS) and leaf.has_positions for leaf in pytree.tree_leaves(inputs))


def described(inputs: Inputs) -> str:
    """The extents, for the table."""
    return ", ".join(str(leaf) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, KINDS))
