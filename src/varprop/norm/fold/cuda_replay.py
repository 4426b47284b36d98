"""The fold on CUDA recorded once and replayed: launching its kernels one by one takes longer than running them.

Recorded as CUDA graphs, the forward and the backward are one launch each. A graph writes to buffers of its own, which
are returned without a copy: a copy for every pass would cost as much as the launches that are saved. They are written
again only when nobody holds them any more, which the reference counts of their storages tell. While somebody does (an
earlier pass that waits for its backward, gradients that are being accumulated), a second set of buffers is used; while
both are held, the kernels are launched as if nothing had been recorded.

All passes of a recording run on one stream, in its order. A caller that reads results on another stream has to wait for
it before releasing them, as with any CUDA graph: `record_stream` keeps memory from being freed, not from being written
again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# the reference count of the storage at an address; where torch has no such function, nothing is recorded
_users: Any = getattr(torch._C, "_storage_Use_Count", None)

LARGEST = 2**26  # weights: beyond, the buffers take too much memory, and launches too little of the time
PATIENCE = 3  # passes before anything is recorded: a trial, or the warm-up of a capture by the user, needs no graph
SETS = 2  # of buffers
ADDRESSES = 4  # sets of parameters that take turns (a teacher and its student), each with its own recordings

Results = tuple[list[Tensor], list[Tensor]]  # flat buffers, and views of them by layer or by parameter
Backward = Callable[[list[Tensor], Tensor, Tensor], Results]


class Replay:
    """Work recorded as a graph: `flat` are the buffers it writes, `views` of them by layer or by parameter."""

    def __init__(self, work: Callable[[], Results]) -> None:
        with torch.inference_mode(False), torch.no_grad():  # buffers may later be part of an autograd graph
            self.graph, (self.flat, self.views) = _recorded(work)
        storages = (tensor.untyped_storage() for tensor in (*self.flat, *self.views))
        self.storages = {storage._cdata: storage for storage in storages}  # held, so that their addresses stay valid
        self.counts = {address: _users(address) for address in self.storages}  # while nobody else holds them

    def is_free(self) -> bool:
        """True if nobody holds a result of an earlier run."""
        return all([_users(address) == count for address, count in self.counts.items()])

    def run(self) -> None:
        """Write the results anew."""
        self.graph.replay()


class Recording:
    """A fold and its backward, with one set of buffers for what is folded.

    The key holds addresses, strides, dtypes and stream; `fold` returns folded weights, biases and what is saved for the
    backward, flat, and views of them by layer.
    """

    def __init__(self, key: Any, fold: Callable[[], Results]) -> None:
        self.key, self.forward = key, Replay(fold)
        self.weight, self.bias, *self.saved = self.forward.flat
        self.grads: Results | None = None  # by folded weights and biases
        self.backwards: list[Replay] = []
        self.claimed = False  # by a thread that is about to return the buffers

    def is_free(self) -> bool:
        """True if nobody holds what was folded."""
        return not self.claimed and self.forward.is_free()

    def folded(self, flat: bool = False) -> list[Tensor]:
        """The fold of the present parameters, by layer or in flat buffers."""
        try:
            self.forward.run()
            return handed_out(self.forward.flat if flat else self.forward.views)
        finally:
            self.claimed = False

    def derivatives(self, grads: Sequence[Tensor], backward: Backward) -> Replay | None:
        """Derivatives by the parameters from those by folded weights and biases; None if all buffers for them are held.

        `backward` returns them for what was saved and flat derivatives.
        """
        replay = next((replay for replay in self.backwards if replay.is_free()), None)
        if replay is None and len(self.backwards) == SETS:
            return None
        self.grads = self.grads or self._buffers_for_grads()
        torch._foreach_copy_(self.grads[1], list(grads))
        if replay is None:
            by_weight, by_bias = self.grads[0]
            replay = Replay(lambda: backward(self.saved, by_weight, by_bias))
            self.backwards.append(replay)
        replay.run()
        return replay

    def _buffers_for_grads(self) -> Results:
        flat, views = [torch.empty_like(self.weight), torch.empty_like(self.bias)], self.forward.views
        count = len(views) // 2
        by_weight = [_same_view(view, self.weight, flat[0]) for view in views[:count]]
        return flat, by_weight + [_same_view(view, self.bias, flat[1]) for view in views[count:]]


class Recorder:
    """The recordings of a fold, for the parameters with which it ran last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.passes: dict[Any, int] = {}  # by key, the latest last
        self.recordings: dict[Any, list[Recording]] = {}

    def recording(self, key: Any, make: Callable[[], Recording | None]) -> Recording | None:
        """A recording whose buffers nobody holds, to be replayed next; None where the kernels are to be launched."""
        with self.lock:
            self.passes[key] = self.passes.pop(key, 0) + 1
            for old in list(self.passes)[:-ADDRESSES]:
                del self.passes[old]
                self.recordings.pop(old, None)
            recordings = self.recordings.setdefault(key, [])
            free = next((recording for recording in recordings if recording.is_free()), None)
            if free is None and self.passes[key] > PATIENCE and len(recordings) < SETS:
                free = make()
                recordings += [] if free is None else [free]
            if free is not None:
                free.claimed = True
            return free

    def recording_with(self, saved: Sequence[Tensor]) -> Recording | None:
        """The recording that wrote what was saved; None if none did."""
        first = saved[0].data_ptr()
        every = [recording for recordings in self.recordings.values() for recording in recordings]
        return next((recording for recording in every if recording.saved[0].data_ptr() == first), None)


def _same_view(view: Tensor, base: Tensor, buffer: Tensor) -> Tensor:
    """A view of `buffer` with the shape, strides and offset that `view` has in `base`."""
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset() - base.storage_offset())


def handed_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """New tensors on the memory of others, which its reference count includes."""
    return [tensor.detach() for tensor in tensors]


def stream_to_record(parameter: Tensor) -> int | None:
    """The current stream; None where work cannot be recorded, as on a device that is not the current one."""
    if _users is None or not parameter.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    device = parameter.get_device()
    if device != torch._C._cuda_getDevice():  # as torch.cuda.current_device() asks, which looks around first
        return None
    return int(torch._C._cuda_getCurrentRawStream(device))  # a `Stream` made to be asked costs several launches


def runs_on_device_alone(work: Callable[[], Any]) -> bool:
    """True if work neither waits for the device nor copies from memory of the host, which a CUDA graph cannot hold."""
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
    """True if CUDA graphs of torch.compile are in use: they take all memory allocated within them for their own."""
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
