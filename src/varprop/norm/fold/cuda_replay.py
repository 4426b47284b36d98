"""The fold on CUDA recorded once and replayed: starting its kernels one by one takes longer than running them.

Recorded as CUDA graphs, the forward and the backward are one launch each. A graph writes to buffers of its own, and
these are handed out as they are. They are written again only when nobody holds them any more, which the number of users
of their memory tells: a copy for every pass would cost as much as the launches that are saved. While somebody does (an
earlier pass that waits for its backward, gradients that are being accumulated), a second set of buffers serves; while
both are held, the kernels are launched as if nothing had been recorded.

One stream serves all passes of a recording, so that what it does in its order needs no care. Another stream that reads
results has to be waited for before they are let go of, as with any CUDA graph: `record_stream` keeps memory from being
freed, not from being written again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# how many hold the storage at an address; where torch does not tell, nothing is recorded
_users: Any = getattr(torch._C, "_storage_Use_Count", None)

LARGEST = 2**26  # weights: beyond, buffers that stay are too much memory, and launches too little of the time
PATIENCE = 3  # passes before anything is recorded: a trial, or what comes before a capture by the user, needs no graph
SETS = 2  # of buffers
ADDRESSES = 4  # models of one layout that take turns (a teacher beside its student) each keep their recordings

Results = tuple[list[Tensor], list[Tensor]]  # in flat buffers, and their pieces by layer or by parameter
Backward = Callable[[list[Tensor], Tensor, Tensor], Results]


class Replay:
    """Work recorded as a graph.

    Args:
        work: Computes its results from what lies at the same addresses each time.

    Attributes:
        flat: The buffers that it writes.
        parts: Pieces of them.
    """

    def __init__(self, work: Callable[[], Results]) -> None:
        with torch.inference_mode(False), torch.no_grad():  # buffers may later be part of an autograd graph
            self.graph, (self.flat, self.parts) = _recorded(work)
        storages = (tensor.untyped_storage() for tensor in (*self.flat, *self.parts))
        self.storages = {storage._cdata: storage for storage in storages}  # held, so that their addresses stay good
        self.own = {address: _users(address) for address in self.storages}

    def is_free(self) -> bool:
        """Whether nobody holds a result of an earlier run."""
        return all([_users(address) == count for address, count in self.own.items()])

    def run(self) -> None:
        """Write the results anew."""
        self.graph.replay()


class Recording:
    """A fold and its backward, with one set of buffers for what is folded.

    Args:
        key: What it holds for: addresses, strides, dtypes, a stream.
        fold: Folded weights, biases, and what is kept for the backward, flat; the folded parts of all layers.
    """

    def __init__(self, key: Any, fold: Callable[[], Results]) -> None:
        self.key, self.forward = key, Replay(fold)
        self.weight, self.bias, *self.kept = self.forward.flat
        self.grads: Results | None = None  # by folded weights and biases
        self.backwards: list[Replay] = []
        self.claimed = False  # by a thread that is about to hand the buffers out

    def is_free(self) -> bool:
        """Whether nobody holds what was folded."""
        return not self.claimed and self.forward.is_free()

    def folded(self, flat: bool = False) -> list[Tensor]:
        """The fold of the parameters as they are now, in parts or in flat buffers."""
        try:
            self.forward.run()
            return handed_out(self.forward.flat if flat else self.forward.parts)
        finally:
            self.claimed = False

    def derivatives(self, grads: Sequence[Tensor], backward: Backward) -> Replay | None:
        """Derivatives by the parameters; None if all buffers for them are held.

        Args:
            grads: By the folded parts.
            backward: From what was kept and the flat derivatives.
        """
        found = next((replay for replay in self.backwards if replay.is_free()), None)
        if found is None and len(self.backwards) == SETS:
            return None
        self.grads = self.grads or self._buffers_for_grads()
        torch._foreach_copy_(self.grads[1], list(grads))
        if found is None:
            by_weight, by_bias = self.grads[0]
            found = Replay(lambda: backward(self.kept, by_weight, by_bias))
            self.backwards.append(found)
        found.run()
        return found

    def _buffers_for_grads(self) -> Results:
        flat, parts = [torch.empty_like(self.weight), torch.empty_like(self.bias)], self.forward.parts
        count = len(parts) // 2
        by_weight = [_at_the_same_place(part, self.weight, flat[0]) for part in parts[:count]]
        return flat, by_weight + [_at_the_same_place(part, self.bias, flat[1]) for part in parts[count:]]


class Recorder:
    """The recordings of a fold, at the addresses where it ran last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.passes: dict[Any, int] = {}  # by key, the latest last
        self.recordings: dict[Any, list[Recording]] = {}

    def recording(self, key: Any, make: Callable[[], Recording | None]) -> Recording | None:
        """One whose buffers nobody holds, to be replayed next; None where the kernels are to be launched."""
        with self.lock:
            self.passes[key] = self.passes.pop(key, 0) + 1
            for old in list(self.passes)[:-ADDRESSES]:
                del self.passes[old]
                self.recordings.pop(old, None)
            known = self.recordings.setdefault(key, [])
            found = next((recording for recording in known if recording.is_free()), None)
            if found is None and self.passes[key] > PATIENCE and len(known) < SETS:
                found = make()
                known += [] if found is None else [found]
            if found is not None:
                found.claimed = True
            return found

    def recording_with(self, kept: Sequence[Tensor]) -> Recording | None:
        """The one that wrote what was kept; None if none did."""
        first = kept[0].data_ptr()
        known = [recording for recordings in self.recordings.values() for recording in recordings]
        return next((recording for recording in known if recording.kept[0].data_ptr() == first), None)


def _at_the_same_place(part: Tensor, home: Tensor, other: Tensor) -> Tensor:
    """What lies in another buffer where a part lies in its own."""
    return other.as_strided(part.shape, part.stride(), part.storage_offset() - home.storage_offset())


def handed_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same memory as tensors of their own, which count as its users."""
    return [tensor.detach() for tensor in tensors]


def stream_to_record(parameter: Tensor) -> int | None:
    """The current stream; None where work cannot be recorded: it would have to run on the current device."""
    if _users is None or not parameter.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    device = parameter.get_device()
    if device != torch._C._cuda_getDevice():  # as torch.cuda.current_device() asks, which looks around first
        return None
    return int(torch._C._cuda_getCurrentRawStream(device))  # a `Stream` made to be asked costs several launches


def runs_on_device_alone(work: Callable[[], Any]) -> bool:
    """Whether work neither waits for the device nor copies from memory of the host, which a CUDA graph cannot hold."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return True


def graph_trees_run(parameter: Tensor) -> bool:
    """Whether torch.compile's own CUDA graphs are in use: they take the memory of all that is computed for theirs."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        return trees.get_manager(parameter.get_device(), create_if_none_exists=False) is not None
    except AssertionError:  # in a thread that has none, some versions of torch refuse to look
        return False


def _recorded(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = work()
    return graph, results
