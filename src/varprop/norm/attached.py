"""Folded parts with the autograd node they come from, which serve pass after pass.

To make a node of many parameters and many parts takes autograd as long as all the rest of a replayed fold. The node
keeps nothing of a pass but the versions of the parameters. So it can serve the next pass, with the same parts over the
same buffers, if nothing of the last one is left that could see the difference:

- nobody holds a part, neither in Python nor saved for a backward pass;
- the last pass went backwards through every part, in one go that let go of its graph. Layers save what enters them, so
  that no way is left through which this node could be reached again on behalf of that pass.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .recording import Recording


class Attached:
    """Parts that belong to an autograd graph.

    Args:
        parts: As `apply_fold` returned them.
        parameters: That they depend on.
    """

    def __init__(self, parts: Sequence[Tensor], parameters: list[Tensor]) -> None:
        self.parts = list(parts)
        self.node: Any = parts[0].grad_fn
        self.parameters, self.wanted = parameters, _wanted(parameters)

    def is_free(self) -> bool:
        """Whether nobody else holds a part."""
        return set(_holders(self.parts)) == _ALONE

    def suits(self, parameters: list[Tensor]) -> bool:
        """Whether a node made for these parameters now would be the same, and the last pass is over."""
        same = all(map(operator.is_, parameters, self.parameters)) and _wanted(parameters) == self.wanted
        return same and bool(self.node.is_over)

    def for_versions(self, versions: list[int]) -> list[Tensor]:
        """The parts for a pass with the parameters in these versions."""
        self.node.versions, self.node.is_over = versions, False
        return self.parts


class Attachments:
    """The attached parts of recordings, one set for each at most.

    They keep autograd's nodes of the parameters alive too, which remember the stream on which they were made: whoever
    is going to run on another one (a capture, say) has to `clear` them before.
    """

    def __init__(self) -> None:
        self.of: dict[Recording, Attached] = {}

    def is_free(self, recording: Recording) -> bool:
        """Whether nobody holds what was folded in an earlier pass."""
        attached = self.of.get(recording)
        return recording.is_free() and (attached is None or attached.is_free())

    def again(self, recording: Recording, parameters: list[Tensor], versions: list[int]) -> list[Tensor] | None:
        """Folded anew, the parts that can serve again; None if there are none."""
        attached = self.of.get(recording)
        if attached is None:
            return None
        if not attached.suits(parameters):
            self._drop(recording)
            return None
        recording.folded()
        return attached.for_versions(versions)

    def attach(self, recording: Recording, parts: Sequence[Tensor], parameters: list[Tensor]) -> None:
        """Keep parts to serve again."""
        if _ALONE is not None and parts[0].requires_grad:
            self.of[recording] = Attached(parts, parameters)
            recording.there.count_as_own(parts, 1)

    def keep(self, recordings: list[Recording]) -> None:
        """Drop those of all other recordings."""
        for recording in [known for known in self.of if known not in recordings]:
            self._drop(recording)

    def clear(self) -> None:
        """Drop all."""
        self.keep([])

    def _drop(self, recording: Recording) -> None:
        recording.there.count_as_own(self.of.pop(recording).parts, -1)


def _wanted(parameters: list[Tensor]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _holders(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """How many hold each tensor, in Python and in torch."""
    return [(sys.getrefcount(tensor), tensor._use_count()) for tensor in tensors]  # type: ignore[attr-defined]


# whether a backward pass keeps its graph; where torch does not tell this or who holds a tensor, nothing serves again
_keeps_graph: Any = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
_ALONE = set(_holders([torch.empty(0, device="cpu")])) if _keeps_graph and hasattr(Tensor, "_use_count") else None


def keeps_graph() -> bool:
    """In a backward pass: whether its graph may be run again, as far as torch tells."""
    return _keeps_graph is None or bool(_keeps_graph())
