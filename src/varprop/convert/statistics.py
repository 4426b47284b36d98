"""Means and variances of the channels in a model, measured on one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ..graph.examples import as_arguments
from ..norm.linear_layers import LinearLayer
from ..training.restore import preserved_modes, preserved_tensors
from .batched import channels_second


@dataclass
class ChannelStatistics:
    """Number, mean and (biased) variance of the values of each channel."""

    count: int
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, values: Tensor) -> ChannelStatistics:
        """Those of a tensor with channels on axis 1."""
        axes = [axis for axis in range(values.ndim) if axis != 1]
        var, mean = torch.var_mean(values, dim=axes, correction=0)
        return cls(values.numel() // max(values.shape[1], 1), mean, var)

    @classmethod
    def pooled(cls, parts: Iterable[ChannelStatistics]) -> ChannelStatistics:
        """Those of all the parts' values together: for a layer called several times."""
        first, *others = parts = list(parts)
        if not others:
            return first
        count = sum(part.count for part in parts)
        mean = torch.stack([part.mean * (part.count / count) for part in parts]).sum(0)
        spread = [(part.var + (part.mean - mean).square()) * (part.count / count) for part in parts]
        return cls(count, mean, torch.stack(spread).sum(0))


@torch.no_grad()
def run(model: nn.Module, batch: Any, training: tuple[nn.Module, ...] = ()) -> None:
    """Run a model on a batch in evaluation mode, but for the modules in `training`."""
    args, kwargs = as_arguments(batch)
    with preserved_modes(model):
        model.eval()
        for module in training:
            module.train()
        model(*args, **kwargs)


@contextlib.contextmanager
def measured_outputs(layers: Mapping[str, LinearLayer]) -> Iterator[dict[str, list[ChannelStatistics]]]:
    """Within, every call of a layer adds the statistics of its output."""
    found: dict[str, list[ChannelStatistics]] = {path: [] for path in layers}

    def measure(path: str, layer: LinearLayer, _args: Any, output: Tensor) -> None:
        found[path].append(ChannelStatistics.of(channels_second(output, layer)))

    with contextlib.ExitStack() as hooks:
        for path, layer in layers.items():
            # First of all hooks: what a user's hook makes of the output comes after the batch norm.
            hooks.enter_context(layer.register_forward_hook(partial(measure, path), prepend=True))
        yield found


def pooled(measured: Mapping[str, list[ChannelStatistics]]) -> dict[str, ChannelStatistics]:
    """One statistics for each layer that was called; refuses a layer without finite variance on the batch."""
    found = {path: ChannelStatistics.pooled(parts) for path, parts in measured.items() if parts}
    for path, one in found.items():
        if one.count < 2:
            raise ValueError(
                f"The batch gives '{path}' one value per channel, which has no variance: give a larger one."
            )
        if not (one.mean.isfinite().all() and one.var.isfinite().all()):
            raise ValueError(f"The output of '{path}' on the batch is not finite.")
    return found


@torch.no_grad()
def set_statistics(norm: _BatchNorm, found: ChannelStatistics) -> None:
    """Make these the running statistics; the variance is the biased one, so that both modes agree on the batch.

    A batch norm that had none has them from now on.
    """
    for name, value in (("running_mean", found.mean), ("running_var", found.var)):
        stored = getattr(norm, name)
        if stored is None:
            norm.register_buffer(name, value.clone())
        else:
            stored.copy_(value)
    norm.track_running_stats = True
    if norm.num_batches_tracked is None:
        norm.register_buffer("num_batches_tracked", torch.tensor(1, device=found.mean.device))
    else:
        norm.num_batches_tracked.fill_(1)


class _BatchNormInputs(TorchFunctionMode):
    """Within, every batch norm operation adds the statistics of what it reads to the module that is called.

    What a module of a class of its own is called with need not be what its batch norm reads.
    """

    def __init__(self, norms: Mapping[str, _BatchNorm]) -> None:
        super().__init__()
        self.measured: dict[str, list[ChannelStatistics]] = {path: [] for path in norms}
        self.called: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.called and function is F.batch_norm:
            values = args[0] if args else kwargs["input"]
            self.measured[self.called[-1]].append(ChannelStatistics.of(values))
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def measured_inputs(norms: Mapping[str, _BatchNorm]) -> Iterator[dict[str, list[ChannelStatistics]]]:
    """Within, every batch norm operation of these modules adds the statistics of what it reads."""
    with _BatchNormInputs(norms) as mode, contextlib.ExitStack() as hooks:
        for path, norm in norms.items():
            enter = norm.register_forward_pre_hook(lambda *_, path=path: mode.called.append(path))
            hooks.enter_context(enter)
            hooks.enter_context(norm.register_forward_hook(lambda *_: mode.called.pop() and None, always_call=True))
        yield mode.measured


def calibrate_(model: nn.Module, norms: Mapping[str, _BatchNorm], batch: Any, pool: bool = False) -> set[str]:
    """Give batch norms the statistics of one batch, each measured with all those before it already normalizing by it.

    Afterwards the model does in evaluation mode, on any input, what it did in training mode on this batch.

    Args:
        model: Changed in place.
        norms: Batch norms of it, by path.
        batch: An input tensor, a tuple of positional arguments, or a dict of keyword arguments.
        pool: Whether a batch norm that is called several times gets the statistics of all its calls together, though
            in training mode each of them has its own.

    Returns:
        The paths of the batch norms that the batch reached; the others are not changed.

    Raises:
        ValueError: If the calls of a batch norm have statistics of their own, and they are not to be pooled.
    """
    # training mode writes to the running statistics
    buffers = [buffer for norm in norms.values() for buffer in norm.buffers()]
    with preserved_tensors(buffers), measured_inputs(norms) as measured:
        run(model, batch, training=tuple(norms.values()))
    for path, calls in measured.items():
        if not pool and any(not _agree(calls[0], call, norms[path].eps) for call in calls[1:]):
            raise ValueError(
                f"Batch norm '{path}' is called {len(calls)} times and in training mode normalizes each call by "
                f"itself, which no plain layer does: leave `batch` out to take its evaluation mode, or give every call "
                f"a batch norm of its own."
            )
    found = pooled(measured)
    for path, statistics in found.items():
        set_statistics(norms[path], statistics)
    return set(found)


def _agree(a: ChannelStatistics, b: ChannelStatistics, eps: float) -> bool:
    """Whether two calls of a batch norm are normalized alike, but for rounding."""
    size = torch.sqrt(a.var + eps)
    near = 64 * torch.finfo(a.var.dtype).eps
    same_mean = ((a.mean - b.mean).abs() <= near * (size + a.mean.abs())).all()
    return bool(same_mean & ((a.var - b.var).abs() <= near * size.square()).all())
