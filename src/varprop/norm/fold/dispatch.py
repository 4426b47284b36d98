"""The fold as one node of autograd, and the choice of what computes it: kernels, torch, a recording, the reference.

The moment pass and the row pass are chosen separately. An autograd graph holds the executor of its fold, so that it can
be run backwards when the model is gone. For the same reason an executor refers to no modules and to no results with a
history: they hold graphs, and a cycle through nodes of autograd, which Python does not see, is never freed.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import importlib.util
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ...gaussian.normal import Pair
from ...version import __version__
from ..backends import torch as torch_backend
from ..backends.torch import SavedSizes
from . import reference
from .cuda_replay import (
    LARGEST,
    Recorder,
    Recording,
    Replay,
    Results,
    graph_trees_run,
    handed_out,
    runs_on_device_alone,
    stream_to_record,
)
from .layout import Layout, MemoryLayout, memory_layout, memory_order
from .reference import STALE

# by weights (flat), by shifts and scales (two rows), by external means and by external variances
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]

FREED = (
    "The memory of a parameter of a normalized layer was freed (offloaded, or sharded and not gathered): "
    "bring it back before the model runs."
)
RECORDED_ON = ("cuda",)  # types of devices on which a fold is recorded and replayed


class MomentPass(Protocol):
    """Computes mean and variance of all channels that enter the layers, from shifts and scales."""

    replayable: bool  # true if a CUDA graph can hold it; false if it may copy from the host, which a graph cannot

    def forward(self, shift_scale: Tensor, external: Pair | None, backward: bool) -> tuple[Tensor, list[Tensor]]:
        """Mean and variance (with epsilon) of the entering channels, as two rows, and what the backward needs.

        `shift_scale` are the shifts and scales of all layers, as two rows, and `external` mean and variance of the
        channels that are passed in. Without a `backward` to follow derivatives may be left out.
        """

    def backward(
        self, shift_scale: Tensor, saved: Sequence[Tensor], by_entering: Tensor, direct: Pair
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives by shifts and scales, as two rows, by external means and by external variances.

        `by_entering` are those by the results of `forward`, as two rows, and `saved` is what it saved, flat or not.
        `direct` are derivatives by shifts and scales that do not come through the entering channels; they are added.
        """


class RowPass(Protocol):
    """Computes folded weights and biases from the moments of the entering channels."""

    replayable: bool  # true if a CUDA graph can hold it, and gains by that

    def forward(
        self, weights: Sequence[Tensor], shift_scale: Tensor, entering: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Folded weights and biases, flat and in a given dtype, and what the backward needs.

        Flat weights are in the order of the weights in memory. `shift_scale` and `entering`, shifts and scales of all
        layers and the moments of the entering channels with epsilon, are two rows each.
        """

    def backward(
        self,
        weights: Sequence[Tensor],
        shift_scale: Tensor,
        saved: Sequence[Tensor],
        entering: Tensor,
        grad_weight: Tensor,
        grad_bias: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Derivatives by weights (flat, in their dtype), by scales, and by the entering channels (two rows).

        `saved` is what `forward` saved, flat or not; the gradients are those by its results.
        """


@dataclass(frozen=True, eq=False)
class Backend:
    """Folds all layers of a layout on one device: a moment pass and a row pass, each by kernels or by torch."""

    moments: MomentPass
    rows: RowPass
    moments_saved: int  # how many tensors it saves for its backward
    dtype: torch.dtype  # of the statistics
    layouts: ParameterLayouts  # the memory layouts of the weights that it folds, and sizes and dtype of all parameters

    def forward(
        self, parameters: Sequence[Tensor], external: Pair | None, dtype: torch.dtype, backward: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Folded weights and biases, flat, and what the backward needs: first shifts and scales, as two rows.

        `parameters` are the weights of all layers, then their shifts, then their scales; `external` as for
        `MomentPass`.
        """
        weights = list(parameters[: len(self.layouts.weights)])
        shift_scale = join(parameters[len(weights) :]).to(self.dtype).view(2, -1)
        entering, moments_saved = self.moments.forward(shift_scale, external, backward)
        folded, bias, rows_saved = self.rows.forward(weights, shift_scale, entering, dtype)
        return folded, bias, [shift_scale, entering, *moments_saved, *rows_saved]

    def backward(
        self, weights: Sequence[Tensor], saved: Sequence[Tensor], grad_weight: Tensor, grad_bias: Tensor
    ) -> Gradients:
        """Derivatives by everything that `forward` takes, from those by its results and from what it saved."""
        shift_scale, entering, *by_passes = saved
        shift_scale, entering = shift_scale.view(2, -1), entering.view(2, -1)
        by_moments, by_rows = by_passes[: self.moments_saved], by_passes[self.moments_saved :]
        by_weight, by_scale, by_entering = self.rows.backward(
            weights, shift_scale, by_rows, entering, grad_weight, grad_bias
        )
        return by_weight, *self.moments.backward(shift_scale, by_moments, by_entering, (grad_bias, by_scale))


def needs_reference(parameters: Sequence[Tensor]) -> bool:
    """True if the fold has to be made of plain operations, or a backend cannot take the parameters.

    So it is under torch.func's transforms, forward-mode derivatives and export, and for tensors of several dtypes or
    devices or of subclasses.
    """
    dynamo = torch.compiler.is_dynamo_compiling()  # which in some versions of torch calls itself exporting as well
    if not dynamo and (torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active()):
        return True
    if not dynamo and torch.autograd.forward_ad._current_level >= 0:
        return True
    first = parameters[0]
    if not _PLAIN.issuperset(map(type, parameters)):
        return True
    dtype, device = first.dtype, first.get_device()
    if first.is_cpu:  # all that is not on an accelerator has the same number
        return not all([p.dtype is dtype and p.is_cpu for p in parameters])
    return not (first.is_cuda and all([p.dtype is dtype and p.get_device() == device for p in parameters]))


def all_plain(parameters: Sequence[Tensor]) -> bool:
    """True if no tensor is of a subclass."""
    return _PLAIN.issuperset(map(type, parameters))


_PLAIN = {Tensor, nn.Parameter}


def computing_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a layer with parameters of `dtype` computes on a type of device: autocast's, or `dtype`."""
    if dtype is not torch.float64 and device != "meta" and torch.is_autocast_enabled(device):  # which refuses "meta"
        return torch.get_autocast_dtype(device)
    return dtype


def statistics_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of the statistics of a weight."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class Executor:
    """Computes for one layout; parameters are all weights, then all shifts, then all scales."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.count = layout, len(layout.rows)
        self.number = fingerprint(layout)
        self.backends: dict[Any, Backend] = {}
        self.tried: dict[Backend, bool] = {}  # whether a graph can hold them
        self.recorders: dict[bool, Recorder] = collections.defaultdict(Recorder)  # for compiled graphs, and for others
        self.recordable = layout.weight_count <= LARGEST

    def backend(self, parameters: Sequence[Tensor]) -> Backend:
        """The backend for parameters (or weights alone) of their memory layouts on their device.

        Raises a RuntimeError if the memory of one was freed, which torch itself would read.
        """
        if not all(map(Tensor.data_ptr, parameters)) and any(p.numel() and not p.data_ptr() for p in parameters):
            raise RuntimeError(FREED)
        weights = parameters[: self.count]
        key = (weights[0].device, weights[0].dtype, *[w.stride() for w in weights])
        if key not in self.backends:
            self.backends[key] = _make_backend(self.layout, weights, statistics_dtype(weights[0]))
        return self.backends[key]

    def forward_flat(self, dtype: torch.dtype, external: Pair | None, parameters: Any) -> list[Tensor]:
        """Folded weights, biases and all that is saved, each in a flat buffer of its own."""
        weight, bias, saved = self.backend(parameters).forward(parameters, external, dtype, True)
        return _in_own_memory([weight, bias, *(tensor.flatten() for tensor in saved)])

    def backward_flat(self, saved: Any, grads: Sequence[Tensor], weights: Any) -> list[Tensor]:
        """Derivatives by weights, by shifts and scales, and by external moments, each in a buffer of its own."""
        sizes = self.layout.weight_count, self.layout.row_count
        grad_weight, grad_bias = join_gradients(grads, weights).split_with_sizes(sizes)
        return self._backward_in_buffers(weights, saved, grad_weight, grad_bias)

    @torch.no_grad()
    def _backward_in_buffers(self, weights: Any, saved: Any, grad_weight: Tensor, grad_bias: Tensor) -> list[Tensor]:
        """`backward_flat` from derivatives that are flat."""
        weights = list(weights)
        return _in_own_memory(list(self.backend(weights).backward(weights, saved, grad_weight, grad_bias)))

    def recording(self, dtype: torch.dtype, parameters: Any, compiled: bool = False) -> Recording | None:
        """The fold as a CUDA graph to replay; None where it cannot be recorded or has not run often enough."""
        key = self._recording_key(dtype, parameters, compiled)
        if key is None:
            return None
        return self.recorders[compiled].recording(key, lambda: self._record(key, parameters))

    def replayed_backward(
        self, recording: Recording | None, grads: Sequence[Tensor], weights: Any, compiled: bool = False
    ) -> Replay | None:
        """The backward, replayed from derivatives by the folded parameters; None if it cannot be."""
        present = None if recording is None else self._recording_key(recording.key[0], weights, compiled)
        # the backward reads no parameters but the weights, which have to be at the addresses that were recorded
        if recording is None or present is None or present != recording.key[: len(present)]:
            return None
        return recording.derivatives(grads, functools.partial(self._backward_to_record, weights))

    def _recording_key(self, dtype: torch.dtype, parameters: Any, compiled: bool) -> Any:
        """Dtypes, stream, strides and addresses of a recording; None where nothing can be recorded."""
        stream = stream_to_record(parameters[0]) if self.recordable else None
        if stream is None or (compiled and graph_trees_run(parameters[0])):
            return None
        addresses, strides = map(Tensor.data_ptr, parameters), map(Tensor.stride, parameters[: self.count])
        return dtype, parameters[0].dtype, stream, *strides, *addresses

    def _record(self, key: Any, parameters: Any) -> Recording | None:
        if not self._can_be_recorded(self.backend(parameters), key[0], parameters):
            return None
        return Recording(key, functools.partial(self._forward_to_record, key[0], parameters))

    def _can_be_recorded(self, backend: Backend, dtype: torch.dtype, parameters: Any) -> bool:
        """True if a graph can hold the fold: tried once where functions are evaluated by torch."""
        if not backend.rows.replayable or backend.moments.replayable:
            return backend.rows.replayable
        if backend not in self.tried:
            with torch.inference_mode(False), torch.no_grad():
                self.tried[backend] = runs_on_device_alone(lambda: self.forward_flat(dtype, None, parameters))
        return self.tried[backend]

    def _forward_to_record(self, dtype: torch.dtype, parameters: Any) -> Results:
        """The fold in flat buffers, and as folded weights and biases of every layer."""
        flat = self.forward_flat(dtype, None, parameters)
        return flat, split_parts(flat[0], flat[1], self.backend(parameters).layouts)

    def _backward_to_record(self, weights: Any, saved: Any, grad_weight: Tensor, grad_bias: Tensor) -> Results:
        """The backward in flat buffers and by parameter."""
        flat = self._backward_in_buffers(weights, saved, grad_weight, grad_bias)
        return flat, split_gradients(flat, self.backend(weights).layouts)


# --- the fold as one node of autograd ---


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each of some tensors was written to, as autograd counts; -1 for those made in inference mode."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


class Fold(torch.autograd.Function):
    """The fold as one node of autograd.

    It saves nothing by `save_for_backward`, but holds the parameters and checks their versions itself. So it can be run
    backwards again, and looks the same to a gradient checkpoint whether it ran within it or before.
    """

    @staticmethod
    def forward(ctx: Any, executor: Executor, dtype: torch.dtype, recording: Recording | None, *inputs: Any) -> Any:
        """Folded weights of all layers, then their biases."""
        mean, var, *parameters = inputs
        ctx.executor, ctx.recording, ctx.inputs = executor, recording, inputs
        ctx.versions = [-1 if p.is_inference() else p._version for p in parameters]
        if recording is not None:
            return tuple(recording.folded())
        backend, external = executor.backend(parameters), None if mean is None else (mean, var)
        weight, bias, ctx.saved = backend.forward(parameters, external, dtype, any(ctx.needs_input_grad))
        return tuple(split_parts(weight, bias, backend.layouts))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Derivatives by the external moments and by the parameters."""
        executor, parameters = ctx.executor, ctx.inputs[2:]
        layouts = executor.backend(parameters).layouts  # the first of all: it refuses memory that was freed
        if versions_of(parameters) != ctx.versions:
            raise RuntimeError(STALE)
        if torch.is_grad_enabled() or any(map(_is_batched, grads)):
            return None, None, None, *_backward_by_reference(executor.layout, ctx.inputs, grads)
        weights, recording = parameters[: executor.count], ctx.recording
        replayed = executor.replayed_backward(recording, grads, weights)
        if replayed is not None:
            results = handed_out(replayed.views)
        else:
            saved = ctx.saved if recording is None else recording.saved
            results = split_gradients(executor.backward_flat(saved, grads, weights), layouts)
        needed = zip(results, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *[result if is_needed else None for result, is_needed in needed]


# `Function.apply` without what it does for torch.func, whose transforms never meet this node, argument by argument
apply_fold: Any = super(torch.autograd.Function, Fold).apply


def _is_batched(grad: Tensor) -> bool:
    """True if a tensor stands for a batch of them, as in `torch.autograd.grad(..., is_grads_batched=True)`."""
    return torch._C._functorch.is_legacy_batchedtensor(grad) or torch._C._functorch.is_batchedtensor(grad)


def _backward_by_reference(layout: Layout, inputs: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Derivatives by autograd through the reference, which can be differentiated again and takes any tensors."""
    again = torch.is_grad_enabled()  # a derivative of this derivative will be wanted
    with torch.enable_grad():
        # views, so that external moments count as inputs, however they depend on the parameters
        inputs = [t if t is None else t.view_as(t) for t in inputs]
        outputs = reference.fold_parts(layout, None if inputs[0] is None else (inputs[0], inputs[1]), inputs[2:])
    matching = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    results = iter(torch.autograd.grad(outputs, wanted, matching, create_graph=again, allow_unused=True))
    return [next(results) if t is not None and t.requires_grad else None for t in inputs]


# --- flat buffers of all layers ---


class ParameterLayouts(NamedTuple):
    """The memory layouts of all weights, the sizes of weights, shifts and scales, and their dtype."""

    weights: list[MemoryLayout]
    sizes: list[int]
    dtype: torch.dtype


def layouts_with(weights: Any, sizes: list[int]) -> ParameterLayouts:
    """The layouts of weights, and of the shifts and then the scales of these sizes."""
    layouts = [memory_layout(weight) for weight in weights]
    return ParameterLayouts(layouts, [weight.numel() for weight in weights] + sizes, weights[0].dtype)


def split_parts(weight: Tensor, vectors: Tensor, layouts: ParameterLayouts) -> list[Tensor]:
    """Views of flat buffers: a weight for every layer, and then its bias, or all shifts and then all scales."""
    count = len(layouts.weights)
    weights = []
    for piece, (sizes, order) in zip(weight.split_with_sizes(layouts.sizes[:count]), layouts.weights, strict=True):
        weights.append(piece.view(sizes) if order is None else piece.view(sizes).permute(order))
    several = vectors.dim() > 1  # shifts and scales, as two rows
    return [*weights, *vectors.view(-1).split_with_sizes(layouts.sizes[count : None if several else 2 * count])]


def split_gradients(gradients: Sequence[Tensor], layouts: ParameterLayouts) -> list[Tensor]:
    """Derivatives by external means and variances, and then by every parameter, from the flat buffers."""
    by_weight, by_source, by_mean, by_var = gradients
    return [by_mean, by_var, *split_parts(by_weight, by_source.to(layouts.dtype), layouts)]


def join_gradients(grads: Sequence[Tensor], weights: Any) -> Tensor:
    """Derivatives by folded weights and then by biases in one flat buffer."""
    count = len(weights)
    return join([*(in_memory_order(g, w) for g, w in zip(grads[:count], weights, strict=True)), *grads[count:]])


@torch.no_grad()
def join(tensors: Sequence[Tensor]) -> Tensor:
    """Vectors of one dtype, one after the other in a new one."""
    if not tensors[0].is_cuda:
        return torch.cat(list(tensors))
    sizes = [tensor.numel() for tensor in tensors]
    flat = tensors[0].new_empty(sum(sizes))
    torch._foreach_copy_(flat.split_with_sizes(sizes), list(tensors))  # `cat` is slow where sizes differ much
    return flat


def in_memory_order(value: Tensor, weight: Tensor) -> Tensor:
    """A value with the shape of a weight, flat, in the order of the weight in memory."""
    return value.reshape(-1) if weight.is_contiguous() else value.permute(memory_order(weight)).reshape(-1)


def _in_own_memory(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, copied where they share memory with an earlier one, or are not aligned, which Inductor refuses."""
    addresses: set[int] = set()
    result = []
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        result.append(tensor.clone() if address in addresses or tensor.storage_offset() else tensor)
        addresses.add(address)
    return result


_networks: dict[int, weakref.WeakSet[Any]] = {}  # by the number of the layout


def register(network: Any) -> None:
    """Let compiled graphs find a network by the number of its layout; those of equal layouts share the graphs.

    Each has an executor of its own, since tables of the kernels hold the addresses of its weights.
    """
    _networks.setdefault(network.executor.number, weakref.WeakSet()).add(network)


def networks_known_as(number: int) -> list[Any]:
    """The registered networks whose layout has a number."""
    return list(_networks[number])


def executor_known_as(number: int, weight: Tensor | None = None) -> Executor:
    """An executor of the layout with a number: that of the network whose first weight this is, if there is one."""
    networks = networks_known_as(number)
    address = None if weight is None else weight.data_ptr()
    same = (network for network in networks if address and network.first_weight().data_ptr() == address)
    executor: Executor = next(same, networks[0]).executor
    return executor


def fingerprint(layout: Layout) -> int:
    """A number that is equal for layouts that compute the same.

    torch caches compiled graphs on disk, where a later process finds them by their contents. A graph contains this
    number and the sizes of the results of a fold, which depend on the backend: so the number depends on it too.
    """
    channels = layout.channels
    digest = hashlib.sha256(repr((__version__, triton_works(), channels.sources, channels.external)).encode())
    for step in channels.steps:
        digest.update(repr((step.function.name, step.function.kernel, step.start, step.count)).encode())
    for rows in layout.rows:
        shape = (rows.outputs, rows.groups, rows.channels, rows.transposed, rows.centred, rows.calls, rows.taps.shape)
        digest.update(repr(shape).encode())
    tensors = [channels.constant_mean, channels.constant_var, channels.entering]
    tensors += [index for step in channels.steps for index in step.inputs] + [rows.taps for rows in layout.rows]
    for tensor in tensors:
        dense = tensor.contiguous()
        digest.update(ctypes.string_at(dense.data_ptr(), dense.nbytes))  # numpy may be missing
    return int.from_bytes(digest.digest()[:7], "big")


@functools.cache
def triton_works() -> bool:
    """True if Triton is installed and not switched off by ``VARPROP_KERNELS=0``."""
    return os.environ.get("VARPROP_KERNELS", "1") != "0" and importlib.util.find_spec("triton") is not None


def _takes_kernels(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[bool, bool]:
    """Two flags: the moment pass is computed by kernels, the row pass is; `dtype` is that of the statistics.

    The moment pass by torch can feed rows by kernels, not the other way round.
    """
    if weights[0].device.type != "cuda" or dtype != torch.float32 or not triton_works():
        return False, False
    from ..backends import triton

    with unset_fake_temporarily():  # the layout is real also where only the shapes of results are asked for
        moments = triton.supports(layout)
    rows = triton.fits(layout, weights)
    return moments and rows, rows


def _make_backend(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> Backend:
    """The fastest passes that can fold a layout; `dtype` is that of the statistics."""
    by_kernels, device = _takes_kernels(layout, weights, dtype), weights[0].device
    moments: MomentPass
    rows: RowPass
    if any(by_kernels):
        from ..backends import triton

        rows = triton.TritonRows(layout, device)
        rows.tables(weights)
    else:
        rows = torch_backend.TorchRows(layout, weights, dtype)
    if by_kernels[0]:
        moments = triton.TritonMoments(layout.channels, device)
    else:
        moments = torch_backend.TorchMoments(layout.channels, device, dtype)
    moments_saved, _ = _sizes_saved_by_passes(layout, by_kernels, dtype)
    layouts = layouts_with(weights, 2 * [rows.outputs for rows in layout.rows])
    return Backend(moments, rows, len(moments_saved), dtype, layouts)


def saved_sizes(layout: Layout, weights: Sequence[Tensor], dtype: torch.dtype) -> SavedSizes:
    """Length and dtype of what `Backend.forward` saves, known without running it."""
    moments, rows = _sizes_saved_by_passes(layout, _takes_kernels(layout, weights, dtype), dtype)
    return [(2 * layout.row_count, dtype), (2 * len(layout.channels.entering), dtype), *moments, *rows]


def _sizes_saved_by_passes(
    layout: Layout, by_kernels: tuple[bool, bool], dtype: torch.dtype
) -> tuple[SavedSizes, SavedSizes]:
    moments, rows = torch_backend.moments_saved(layout), torch_backend.rows_saved(layout, dtype)
    if any(by_kernels):
        from ..backends import triton

        rows = triton.rows_saved(layout)
        moments = triton.moments_saved(layout) if by_kernels[0] else moments
    return moments, rows
