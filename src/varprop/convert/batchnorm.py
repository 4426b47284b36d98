"""Batch norm into a plain model, with the statistics of one batch, and out of it again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from ..graph.capture import as_arguments
from ..graph.tracing import preserved_modes
from ..moments import autocast_off
from ..norm.batchnorm import (
    Absorbed,
    absorb_,
    batch_norms_after,
    computes_as_torch_batch_norm,
    find_notes,
    folded,
    is_batch_norm,
    note_of,
    put_back_,
    take_out_,
)
from ..norm.checks import check_dtypes, listed_paths
from ..norm.layers import computes_as_torch
from ..norm.linear_layers import LinearLayer, find_linear_layers, is_linear_layer, output_size, replace
from ..training.restore import preserved_tensors


class Batched(nn.Module):
    """A linear layer and torch's batch norm over its outputs, standing where the layer stood.

    The layer is `.layer`, without bias, and the batch norm is `.norm`, whose own bias does that work. Other attributes
    (`in_features`, `stride`, ...) are the layer's; `weight` and `bias` are those of the plain layer that does the same
    in evaluation mode, so that code which reads them by hand stays right. `had_bias` tells whether the layer had a bias
    of its own when it was wrapped, and is to have one again.
    """

    def __init__(self, layer: LinearLayer) -> None:
        super().__init__()
        self.layer = layer
        kinds = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        kind = nn.BatchNorm1d if isinstance(layer, nn.Linear) else kinds[layer.weight.ndim]
        norm: _BatchNorm = kind(output_size(layer), device=layer.weight.device, dtype=layer.weight.dtype)
        self.norm = norm.requires_grad_(layer.weight.requires_grad).train(layer.training)
        self.had_bias = layer.bias is not None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output, normalized per channel."""
        output = self.layer(*args, **kwargs)
        normalized: Tensor = self.norm(channels_second(output, self.layer))
        return normalized.reshape(output.shape)

    @property
    def weight(self) -> Tensor:
        """The weight with the running statistics folded in."""
        return folded(self.layer, self.norm)[0]

    @property
    def bias(self) -> Tensor:
        """The bias with the running statistics folded in."""
        return folded(self.layer, self.norm)[1]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "layer" or name.startswith("__"):  # not there yet, while a pickle is being read
                raise
            return getattr(self.layer, name)


def channels_second(output: Tensor, layer: LinearLayer) -> Tensor:
    """A layer's output with exactly one axis before its channels, as batch norm takes it."""
    if isinstance(layer, nn.Linear):
        return output.reshape(-1, output.shape[-1])
    return output if output.ndim == layer.weight.ndim else output.unsqueeze(0)


def from_batch_norm_(model: nn.Module, example: Any) -> nn.Module:
    """Let the linear layers do the work of the batch norms directly after them, as in evaluation mode.

    A batch norm put in by `to_batch_norm_` goes with its wrapper; one of the model's own, for which an example is
    needed, becomes an `nn.Identity`, or where its class does more than normalize, runs its forward without the batch
    norm in it. A layer without bias gains one where it is needed; a weight tied to others is untied first, with a
    warning. A batch norm elsewhere (before a layer, after a sum, after a layer with a forward of its own) stays.

    Returns the model, which is another module only where the model was itself a wrapped layer.
    """
    norms = own_batch_norms(model)
    if norms and example is None:
        raise ValueError(
            f"Batch norm '{next(iter(norms))}' is the model's own: give `example`, to find the layer before it."
        )
    following = batch_norms_after(model, example) if norms else {}
    pairs = {
        layer: norm
        for layer, norm in following.items()
        if norm in norms and computes_as_torch(model.get_submodule(layer))  # others need not scale with their weight
    }
    wrapped = {path: module.layer for path, module in model.named_modules() if isinstance(module, Batched)}
    for path, module in {**{path: model.get_submodule(path) for path in pairs}, **wrapped}.items():
        if parametrize.is_parametrized(module, "weight"):
            raise ValueError(f"The weight of '{path}' is parametrized and cannot take a factor: remove that first.")
    for layer_path, norm_path in pairs.items():
        layer, norm = model.get_submodule(layer_path), model.get_submodule(norm_path)
        assert is_linear_layer(layer) and isinstance(norm, _BatchNorm)
        check_dtypes(layer_path, layer, norm_path, norm)
        note = Absorbed(layer=layer, bias=layer.bias is not None, norm=norm)
        absorb_(model, layer_path, layer, norm)
        model = take_out_(model, note)
    for path, module in list(model.named_modules()):
        if isinstance(module, Batched):
            absorb_(model, path, module.layer, module.norm, keep_bias=module.had_bias)
            model = replace(model, module, module.layer)
    return model


def own_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch norms of a model that are not in a `Batched`."""
    wrapped = {module.norm for module in model.modules() if isinstance(module, Batched)}
    named = model.named_modules()
    return {path: m for path, m in named if is_batch_norm(m) and m not in wrapped}


def layers_as_torch(model: nn.Module, batch: Any) -> dict[str, LinearLayer]:
    """The linear layers that compute as torch's own, with their own parameters; others are warned of."""
    layers = find_linear_layers(model)
    others = [path for path, layer in layers.items() if not computes_as_torch(layer)]
    if others:
        warnings.warn(f"These have a forward of their own and get no batch norm: {listed_paths(others)}.", stacklevel=5)
    layers = {path: layer for path, layer in layers.items() if computes_as_torch(layer)}
    for path, layer in layers.items():
        if layer.weight.is_complex():
            raise ValueError(f"The weight of '{path}' is complex, which torch's batch norm does not take.")
    with _called_with_computed(layers) as computed:
        run(model, batch)
    if computed:
        warnings.warn(
            f"These compute with weights or biases that are no parameters of theirs and get no batch norm: "
            f"{listed_paths(sorted(computed))}.",
            stacklevel=5,
        )
    return {path: layer for path, layer in layers.items() if path not in computed}


@contextlib.contextmanager
def _called_with_computed(modules: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Within, collects the paths of modules that are called with a weight or bias that is no parameter of theirs."""
    own = {path: [module._parameters.get(name) for name in ("weight", "bias")] for path, module in modules.items()}
    found: set[str] = set()

    def compare(path: str, module: nn.Module, _args: Any) -> None:
        present = [getattr(module, name, None) for name in ("weight", "bias")]
        if is_linear_layer(module) and parametrize.is_parametrized(module, "weight"):
            present[0] = None  # another tensor at every look, and no parameter under this name
        if any(a is not b for a, b in zip(present, own[path], strict=True)):
            found.add(path)

    with contextlib.ExitStack() as hooks:
        for path, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(compare, path)))
        yield found


def to_batch_norm_(model: nn.Module, batch: Any) -> nn.Module:
    """Put a batch norm after every linear layer that leaves the function as it is.

    gamma = sqrt(var + eps) and beta = mean + the layer's bias, with the mean and variance of the given batch. The
    running variance is set to the biased one, where torch would store the unbiased one, so that the function is the
    same in evaluation mode on every input and in training mode on this batch. (In training mode a layer called several
    times normalizes each call by itself: for such a layer only evaluation mode is exact, which is warned of.)
    Statistics are taken in evaluation mode, so without dropout. A layer the batch does not reach stays as it is. The
    model's own batch norms elsewhere take the statistics of this batch as well, and parameters that undo the change.

    Returns the model, which is another module only where the model was itself a linear layer.
    """
    layers = layers_as_torch(model, batch)
    notes, staying = find_notes(model, layers), own_batch_norms(model)
    with (
        measured_outputs(layers) as measured,
        measured_inputs(staying) as entering,
        _called_with_computed(staying) as computed,
        _directly_read(layers, notes) as direct,
    ):
        run(model, batch)
    several = [path for path, calls in {**measured, **entering}.items() if len(calls) > 1]
    if several:
        warnings.warn(
            f"These are called several times, and in training mode a batch norm normalizes each call by itself, so "
            f"that only evaluation mode computes the same: {listed_paths(several)}.",
            stacklevel=4,
        )
    for path, statistics in pooled(entering).items():
        _move_to(staying[path], path, statistics, path in computed)
    for path, statistics in pooled(measured).items():
        layer, module = layers[path], notes.get(path)
        if module is not None and path in direct and note_of(module)["norm"].affine:
            norm = note_of(module)["norm"].to(device=layer.weight.device, dtype=layer.weight.dtype)
            _fill(norm, layer, statistics, move_bias=not note_of(module)["bias"])
            model = put_back_(model, module, norm)
        else:
            batched = Batched(layer)
            _fill(batched.norm, layer, statistics, move_bias=True)
            model = replace(model, layer, batched)
    return model


@contextlib.contextmanager
def _directly_read(layers: Mapping[str, LinearLayer], notes: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Within, collects the paths of layers whose output the module of their note reads: notes may be out of date."""
    latest, direct, wrong = dict[str, Tensor](), set[str](), set[str]()

    def note(path: str, _layer: nn.Module, _args: Any, output: Tensor) -> None:
        latest[path] = output

    def compare(path: str, _module: nn.Module, args: Any) -> None:
        (direct if args[0] is latest.get(path) else wrong).add(path)

    with contextlib.ExitStack() as hooks:
        hooks.callback(direct.difference_update, wrong)
        for path, module in notes.items():
            hooks.enter_context(layers[path].register_forward_hook(partial(note, path), prepend=True))
            hooks.enter_context(module.register_forward_pre_hook(partial(compare, path)))
        yield direct


@torch.no_grad()
def _move_to(norm: _BatchNorm, path: str, statistics: ChannelStatistics, computed: bool) -> None:
    """Give a batch norm that stays other statistics, and parameters with which it computes the same."""
    if norm.running_mean is None or norm.running_var is None:
        return  # which normalizes by the batch in both modes
    if computed or norm.weight is None or norm.bias is None or not computes_as_torch_batch_norm(norm):
        warnings.warn(
            f"Batch norm '{path}' has no parameters of its own to undo other statistics, or a class of its own that "
            f"may read them otherwise: in training mode it computes something else than in evaluation mode.",
            stacklevel=5,
        )
        return
    rate = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    norm.bias.add_((statistics.mean - norm.running_mean) * rate)
    norm.weight.copy_(rate * torch.sqrt(statistics.var + norm.eps))
    set_statistics(norm, statistics)


@torch.no_grad()
def _fill(norm: _BatchNorm, layer: LinearLayer, statistics: ChannelStatistics, move_bias: bool) -> None:
    """Statistics and parameters that undo each other; on request the layer's bias goes over into the norm's."""
    bias = layer.bias if move_bias else None
    centre = statistics.mean if bias is None else statistics.mean - bias
    set_statistics(norm, ChannelStatistics(statistics.count, centre, statistics.var))
    norm.weight.copy_(torch.sqrt(statistics.var + norm.eps))
    norm.bias.copy_(statistics.mean)
    if bias is not None:
        norm.bias.requires_grad_(bias.requires_grad)
        layer.bias = None


@dataclass
class ChannelStatistics:
    """Number, mean and (biased) variance of the values of each channel."""

    count: int
    mean: Tensor
    var: Tensor

    @classmethod
    def of(cls, values: Tensor) -> ChannelStatistics:
        """The statistics of a tensor with channels on axis 1."""
        axes = [axis for axis in range(values.ndim) if axis != 1]
        var, mean = torch.var_mean(values, dim=axes, correction=0)
        return cls(values.numel() // max(values.shape[1], 1), mean, var)

    @classmethod
    def pooled(cls, calls: list[ChannelStatistics]) -> ChannelStatistics:
        """The statistics of the values of all calls together."""
        if len(calls) == 1:
            return calls[0]
        count = sum(call.count for call in calls)
        mean = torch.stack([call.mean * (call.count / count) for call in calls]).sum(0)
        spread = [(call.var + (call.mean - mean).square()) * (call.count / count) for call in calls]
        return cls(count, mean, torch.stack(spread).sum(0))


@torch.no_grad()
@autocast_off()
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
    measured: dict[str, list[ChannelStatistics]] = {path: [] for path in layers}

    def measure(path: str, layer: LinearLayer, _args: Any, output: Tensor) -> None:
        measured[path].append(ChannelStatistics.of(channels_second(output, layer)))

    with contextlib.ExitStack() as hooks:
        for path, layer in layers.items():
            # First of all hooks: what a user's hook makes of the output comes after the batch norm.
            hooks.enter_context(layer.register_forward_hook(partial(measure, path), prepend=True))
        yield measured


def pooled(measured: Mapping[str, list[ChannelStatistics]]) -> dict[str, ChannelStatistics]:
    """One statistics for each layer that was called; refuses a layer without finite variance on the batch."""
    by_path = {path: ChannelStatistics.pooled(calls) for path, calls in measured.items() if calls}
    for path, statistics in by_path.items():
        if statistics.count < 2:
            raise ValueError(
                f"The batch gives '{path}' one value per channel, which has no variance: give a larger batch."
            )
        if not (statistics.mean.isfinite().all() and statistics.var.isfinite().all()):
            raise ValueError(f"The output of '{path}' on the batch is not finite.")
    return by_path


@torch.no_grad()
def set_statistics(norm: _BatchNorm, statistics: ChannelStatistics) -> None:
    """Make these the running statistics; the variance is the biased one, so that both modes agree on the batch.

    A batch norm that had none has them from now on.
    """
    for name, value in (("running_mean", statistics.mean), ("running_var", statistics.var)):
        stored = getattr(norm, name)
        if stored is None:
            norm.register_buffer(name, value.clone())
        else:
            stored.copy_(value)
    norm.track_running_stats = True
    if norm.num_batches_tracked is None:
        norm.register_buffer("num_batches_tracked", torch.tensor(1, device=statistics.mean.device))
    else:
        norm.num_batches_tracked.fill_(1)


class _BatchNormInputs(TorchFunctionMode):
    """Within, every batch norm operation adds the statistics of its input to the module that is called.

    A module of another class need not pass on to its batch norm what it was called with.
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

    Afterwards the model does in evaluation mode, on any input, what it did in training mode on this batch. Where calls
    of a batch norm have statistics of their own they are pooled, or without `pool` a ValueError is raised.

    Returns the paths of the batch norms that the batch reached; the others are not changed.
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
    by_path = pooled(measured)
    for path, statistics in by_path.items():
        set_statistics(norms[path], statistics)
    return set(by_path)


def _agree(a: ChannelStatistics, b: ChannelStatistics, eps: float) -> bool:
    """True if two calls of a batch norm are normalized alike, but for rounding."""
    size = torch.sqrt(a.var + eps)
    near = 64 * torch.finfo(a.var.dtype).eps
    same_mean = ((a.mean - b.mean).abs() <= near * (size + a.mean.abs())).all()
    return bool(same_mean & ((a.var - b.var).abs() <= near * size.square()).all())
