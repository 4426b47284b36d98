"""Small networks on CUDA in eager mode: the fold recorded once and replayed, since starting its kernels takes longest.

A dozen launches from Python cost more than the arithmetic of a network of a few million weights. Recorded as CUDA
graphs, the way there and the way back are one launch each. A graph works on buffers of its own; results are copied out
of them, so that whoever holds the results of an earlier pass keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

LARGEST = 2**22  # weights: beyond, copies cost more than launches, and the GPU is busy while they are made
PATIENCE = 2  # passes before anything is recorded: those of a trial need no graph

Fold = Callable[[], tuple[list[Tensor], list[Tensor]]]  # folded parts, and what the way back needs
Unfold = Callable[[list[Tensor], list[Tensor]], list[Tensor]]  # derivatives, from what was kept and those of the parts


class Recording:
    """A fold at certain addresses.

    Args:
        fold: Computes the folded parts of the present parameters, which stay where they are.
        unfold: The way back.
    """

    def __init__(self, fold: Fold, unfold: Unfold) -> None:
        self.unfold = unfold
        self.there, (self.parts, self.kept) = _recorded(fold)
        self.copier = Copier(self.parts)
        self.back: torch.cuda.CUDAGraph | None = None
        self.grads: list[Tensor] = []
        self.results: Copier | None = None

    def folded(self) -> list[Tensor]:
        """The folded parts for the parameters as they are now."""
        self.there.replay()
        return self.copier.copies()

    def derivatives(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Derivatives by the parameters, from those by the parts."""
        if self.back is None or self.results is None:
            self.grads = [torch.empty_like(part) for part in self.parts]
            torch._foreach_copy_(self.grads, list(grads))
            self.back, results = _recorded(lambda: self.unfold(self.kept, self.grads))
            self.results = Copier(results)
        torch._foreach_copy_(self.grads, list(grads))
        self.back.replay()
        return self.results.copies()


def _recorded(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    return graph, results


class Copier:
    """Copies tensors that are parts of a few buffers: the buffers are copied, and parts taken at the same places.

    One launch for each buffer, and far less work on the host than an allocation for each part.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        buffers = {_home(t): _whole(t) for t in tensors}
        self.buffers, homes = list(buffers.values()), list(buffers)
        self.parts = [(homes.index(_home(t)), t.shape, t.stride(), t.storage_offset()) for t in tensors]

    def copies(self) -> list[Tensor]:
        """What the tensors hold now, apart from them."""
        fresh = [buffer.clone() for buffer in self.buffers]
        return [fresh[index].as_strided(size, stride, start) for index, size, stride, start in self.parts]


def _home(tensor: Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def _whole(tensor: Tensor) -> Tensor:
    """The buffer that a tensor is a part of."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)
