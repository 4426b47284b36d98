"""Who computes a fold and its way back, wherever the parameters lie: a backend, compiled code, or what was recorded.

An autograd graph holds the executor of its fold, so that it can be run backwards when the model is gone. For the same
reason an executor knows nothing of modules and of results with a history: they hold graphs, and whatever is held by
what it holds is never freed, since Python does not see through the nodes of autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd_node import fold_backward, fold_forward, fold_to_record, unfold_to_record, working
from .backends import Backend, TorchBackend, make_backend
from .layout import Layout
from .memory import forms_of, joined_grads, parted
from .native import NativeBackend, make_native
from .recording import LARGEST, Recorder, Recording, Replay, graph_trees_run, stream_to_record


class Executor:
    """Computes for one layout; parameters are all weights, then all shifts, then all scales."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.count = layout, len(layout.rows)
        self.backends: dict[Any, Backend] = {}
        self.natives: dict[Any, NativeBackend | None] = {}
        self.recorders = {compiled: Recorder() for compiled in (False, True)}
        self.recordable = layout.weight_count <= LARGEST

    def backend(self, weights: Sequence[Tensor]) -> Backend:
        """Who computes, for weights as they lie on their device."""
        key = (weights[0].device, weights[0].dtype, *[w.stride() for w in weights])
        found = self.backends.get(key)
        if found is None:
            found = self.backends[key] = make_backend(self.layout, weights, working(weights[0]))
        return found

    def native(self, parameters: Sequence[Tensor]) -> NativeBackend | None:
        """Compiled code for parameters as they lie in memory; None if others are to compute."""
        if not parameters[0].is_cpu:
            return None
        key = (parameters[0].dtype, *map(Tensor.stride, parameters))
        try:
            return self.natives[key]
        except KeyError:
            found = self.natives[key] = make_native(self.layout, parameters, working(parameters[0]))
            return found

    def recording(
        self,
        dtype: torch.dtype,
        parameters: Any,
        is_free: Callable[[Recording], bool] = Recording.is_free,
        compiled: bool = False,
    ) -> Recording | None:
        """The fold as a graph to replay, where it can be recorded and has run before; None else."""
        key = self._recording_key(dtype, parameters, compiled)
        if key is None:
            return None
        return self.recorders[compiled].recording(key, lambda: self._record(key, parameters), is_free)

    def replayed_back(
        self, recording: Recording | None, grads: Sequence[Tensor], weights: Any, compiled: bool = False
    ) -> Replay | None:
        """The way back replayed, from derivatives by the parts; None if it cannot be."""
        if recording is None or not self._was_recorded_with(recording.key, weights, compiled):
            return None
        return recording.derivatives(grads, functools.partial(unfold_to_record, self, weights))

    def in_pieces(self, dtype: torch.dtype, parameters: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """What a pass does besides the fold, to be measured: the way back, and the joining of what it takes."""
        weights = parameters[: self.count]
        weight, bias, kept = fold_forward(self, dtype, None, parameters)
        flat, grads = (torch.ones_like(weight), torch.ones_like(bias)), parted(weight, bias, forms_of(parameters))
        return lambda: fold_backward(self, kept, *flat, weights), lambda: joined_grads(grads, weights)

    def _was_recorded_with(self, key: Any, weights: Any, compiled: bool) -> bool:
        """Whether the weights, which alone of all parameters are read again, lie where they lay."""
        own = self._recording_key(key[0], weights, compiled)
        return own is not None and own == key[: len(own)]

    def _recording_key(self, dtype: torch.dtype, parameters: Any, compiled: bool) -> Any:
        """What a recording depends on; None where nothing can be recorded."""
        stream = stream_to_record(parameters[0]) if self.recordable else None
        if stream is None or (compiled and graph_trees_run(parameters[0])):
            return None
        addresses, strides = map(Tensor.data_ptr, parameters), map(Tensor.stride, parameters[: self.count])
        return dtype, parameters[0].dtype, stream, *strides, *addresses

    def _record(self, key: Any, parameters: Any) -> Recording | None:
        if isinstance(self.backend(parameters[: self.count]), TorchBackend):
            return None  # functions without a kernel may copy from the host, which a graph cannot
        return Recording(key, functools.partial(fold_to_record, self, key[0], parameters))
