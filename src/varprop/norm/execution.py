"""What torch is doing at present: whether all layers may be folded together, and whether anything may be compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def plain_execution() -> bool:
    """Not under torch.func's transforms nor while exporting, where every operation has to be seen."""
    if torch.compiler.is_dynamo_compiling():  # which in some versions of torch calls itself exporting as well
        return True
    return not (torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active())


def alike(parameters: list[Tensor]) -> bool:
    """Plain tensors of one dtype on one device: what a backend can take."""
    first = parameters[0]
    if not _PLAIN.issuperset(map(type, parameters)):
        return False
    dtype, device = first.dtype, first.get_device()
    if first.is_cpu:  # all that is not on an accelerator has the same number
        return all([p.dtype is dtype and p.is_cpu for p in parameters])
    return first.is_cuda and all([p.dtype is dtype and p.get_device() == device for p in parameters])


def computing_dtype(device: str, own: torch.dtype) -> torch.dtype:
    """What a layer on a type of device computes in: autocast's dtype, or its own."""
    if own is not torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return own


_PLAIN = {Tensor, nn.Parameter}


def inside_backward() -> bool:
    """Whether autograd is at work: a gradient checkpoint computes again what the forward pass computed."""
    return torch._C._current_graph_task_id() != -1


def capturing(parameter: Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()
