"""Predictions on CUDA recorded once and replayed: in small networks kernels take longer to be launched than to run.

A prediction of a captured program launches some hundred kernels, one by one, where the forward pass of the network has
ten. Recorded as a CUDA graph they are one launch. The graph reads inputs and variances from buffers of its own, to
which they are copied, and parameters where they are; what it writes is copied before it is returned.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.plan import Plan
from ..graph.node import TensorInfo
from .prediction import Prediction, each_tensor

PATIENCE = 2  # predictions before anything is recorded, by which libraries set themselves up
LARGEST = 1 / 16  # of the device's memory, that a recording may hold
MOST = 8  # recordings of a program: batches, outputs or parameters that take turns

Work = Callable[..., Prediction]


class PredictionGraph:
    """A prediction recorded as a graph; `work` computes it on the device alone, from inputs of these shapes."""

    def __init__(self, work: Work, inputs: Sequence[Tensor]) -> None:
        self.inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.prediction = work(*self.inputs)

    def run(self, inputs: Sequence[Tensor]) -> Prediction:
        """The prediction for other values of the inputs."""
        torch._foreach_copy_(self.inputs, list(inputs))
        self.graph.replay()
        return each_tensor(self.prediction, Tensor.clone)


class PredictionGraphs:
    """The recordings of a program, for the plans, shapes and addresses that it was last called with.

    A copy of it, and one from a pickle, is empty.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: dict[Any, tuple[int, Plan]] = {}  # by key, the latest last; the plan is held, so that its id stays
        self.recordings: dict[Any, PredictionGraph | None] = {}  # None: cannot be recorded

    def __reduce__(self) -> tuple[Any, ...]:
        return PredictionGraphs, ()

    def run(self, plan: Plan, inputs: Sequence[Tensor], work: Work, compiled: bool = False) -> Prediction:
        """A prediction, replayed where it has been recorded.

        Args:
            plan: Which values are random.
            inputs: What `work` takes: x, the output directions, variances.
            work: Computes the prediction from these and from the program's parameters.
            compiled: Whether that is compiled.
        """
        stream = torch.cuda.current_stream(inputs[0].device)
        if torch.cuda.is_current_stream_capturing() or inputs[0].device.index != torch.cuda.current_device():
            return work(*inputs)
        key = compiled, self._key(plan, inputs, stream)
        with self.lock:
            count = self.calls.pop(key, (0, plan))[0] + 1
            self.calls[key] = count, plan
            for old in list(self.calls)[:-MOST]:
                del self.calls[old]
                self.recordings.pop(old, None)
            if key not in self.recordings and count > PATIENCE:
                most = LARGEST * torch.cuda.get_device_properties(inputs[0].device).total_memory
                small = _bytes(plan, len(inputs[1])) <= most
                self.recordings[key] = _recorded(work, inputs) if small else None
            recording = self.recordings.get(key)
            return work(*inputs) if recording is None else recording.run(inputs)

    def _key(self, plan: Plan, inputs: Sequence[Tensor], stream: torch.cuda.Stream) -> Any:
        state = [value for value in plan.program.tensors().values() if isinstance(value, Tensor)]
        settings = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        return id(plan), shapes, tuple(tensor.data_ptr() for tensor in state), stream.cuda_stream, settings


def _bytes(plan: Plan, directions: int) -> int:
    """About how much memory a prediction takes: moments, slopes and derivatives of all values."""
    infos = (node.info for node in plan.program.nodes if plan.random(node))
    values = sum(info.shape.numel() for info in infos if isinstance(info, TensorInfo))
    return 4 * values * (directions + 3)


def _recorded(work: Work, inputs: Sequence[Tensor]) -> PredictionGraph | None:
    """A recording; None if the work waits for the device or copies from the host, which no graph can hold."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work(*inputs)
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode(before)
    gc.collect()  # a graph that is freed while another is captured, as a part of a reference cycle, breaks that capture
    collecting = gc.isenabled()
    gc.disable()
    generator = torch.cuda.default_generators[inputs[0].device.index]
    state = generator.clone_state()
    try:
        return PredictionGraph(work, inputs)
    except RuntimeError:  # of a module or a rule of the user's
        generator.graphsafe_set_state(state)  # its own still believes that a graph is being recorded
        return None
    finally:
        if collecting:
            gc.enable()
