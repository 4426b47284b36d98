"""Where training begins: one plain network for a start, and its function in the parametrization of every method.

Layer and group norm shift and divide every sample by numbers of its own, so that no affine map gives the plain
network's function back. They begin from the nearest that least squares on one batch finds, layer by layer: outputs are
mixed so that they make up for what earlier norms changed, then every channel gets scale and shift. How far that is from
the plain network is kept as the start gap.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

import varprop as vp

from .batches import GENERAL, seed_of, seeded
from .protocol import (
    DOUBLE,
    MOMENTUM,
    SAMPLE_NORMS,
    UNIT_NORM,
    Borders,
    Cell,
    Factory,
    Method,
    OwnWeights,
    Start,
    build,
)


@torch.no_grad()
def watch(
    model: nn.Module, batch: Tensor, layers: Mapping[str, nn.Module], look: Callable[[str, Tensor], Tensor | None]
) -> None:
    """Run a network in evaluation mode; `look` gets the name of every layer called, and what it gives before any norm.

    What `look` returns, unless it is None, is what the network goes on with.
    """
    with contextlib.ExitStack() as undone:
        for module in model.modules():
            undone.callback(setattr, module, "training", module.training)
        for name, layer in layers.items():
            undone.enter_context(
                layer.register_forward_hook(lambda _, __, output, name=name: look(name, output), prepend=True)
            )
        model.eval()(batch)


ROWS_FIRST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # the output channels are the first axis of their weight
_SMALLEST_GROUP = 4  # channels; a group of one would leave nothing of a linear layer's output
_MOST_GROUPS = 32  # as Wu & He 2018
_RIDGE = 0.01  # of the mean square of a channel
_MOST_MIXED = 4096  # channels; of more, such as the words of a language, the matrix of their products is too large


class SampleNorm(nn.GroupNorm):
    """Group norm over the channels of a layer's output; layer norm with one group.

    Behind a linear layer channels are the last axis and all before are samples (`last`), otherwise the second.
    """

    def __init__(self, groups: int, channels: int, last: bool) -> None:
        super().__init__(groups, channels)
        self.last = last

    def forward(self, input: Tensor) -> Tensor:
        """The normalized output."""
        values = input.reshape(-1, input.shape[-1]) if self.last else input
        return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps).reshape(input.shape)


def with_sample_norms(plain: nn.Module, method: str, batch: Tensor) -> nn.Module:
    """A copy of a plain network with a norm behind every linear layer that the batch calls but the last.

    It is fitted to the plain network's function on the batch.
    """
    model = add_sample_norms_(copy.deepcopy(plain), method, batch)
    for path in _called(plain, batch):  # in the order of the calls: what is fitted already changes what follows
        layer: Any = model.get_submodule(path)
        last = isinstance(layer, nn.Linear)
        wanted = _outputs(plain, path, batch, last)
        if getattr(layer, "groups", 1) == 1 and wanted.shape[1] <= _MOST_MIXED:
            _mix_(layer, _outputs(model, path, batch, last), wanted)
        if hasattr(layer, "norm"):
            _fit_(layer.norm, _outputs(model, f"{path}.norm", batch, last), wanted)
    return model


def add_sample_norms_(model: nn.Module, method: str, batch: Tensor) -> nn.Module:
    """The norms alone, with scale 1 and shift 0, in place; each is the `norm` of its layer and runs as a hook of it.

    A hook leaves the layer where it was, with its weight, for code that reads it by hand.
    """
    for path in _called(model, batch)[:-1]:
        layer: Any = model.get_submodule(path)
        channels = int(layer.weight.shape[0])
        norm = SampleNorm(1 if method == "layer" else _groups(channels), channels, isinstance(layer, nn.Linear))
        layer.norm = norm.to(layer.weight.device, layer.weight.dtype)
        layer.register_forward_hook(lambda layer, _, output: layer.norm(output))
    return model


def _groups(channels: int) -> int:
    """The largest number that divides the channels into groups of at least four, 32 at most."""
    most = max(1, min(_MOST_GROUPS, channels // _SMALLEST_GROUP))
    return next(count for count in range(most, 0, -1) if channels % count == 0)


def _called(model: nn.Module, batch: Tensor) -> list[str]:
    """The paths of linear layers in the order of their first calls."""
    paths: dict[str, None] = {}
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, ROWS_FIRST)}
    watch(model, batch, layers, lambda path, _: paths.setdefault(path))
    return list(paths)


def _outputs(model: nn.Module, path: str, batch: Tensor, last: bool) -> Tensor:
    """The outputs of a layer in all its calls: a column for every channel."""
    outputs: list[Tensor] = []
    watch(model, batch, {path: model.get_submodule(path)}, lambda _, output: outputs.append(output))
    return torch.cat([(y if last else y.movedim(1, -1)).flatten(0, -2) for y in outputs]).double()


@torch.no_grad()
def _mix_(layer: Any, outputs: Tensor, wanted: Tensor) -> None:
    """Replace a layer by a mixture of its outputs that is nearest to the wanted ones; nothing changes if it is there.

    Ridge regression of what is missing: with fewer samples than channels it would follow the batch, not the function.
    """
    centred, missing = outputs - outputs.mean(0), wanted - outputs
    gram = centred.t() @ centred
    ridge = _RIDGE * gram.diagonal().mean().clamp_min(1e-12)
    change = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), centred.t() @ missing).t()
    weight = layer.weight.double().flatten(1)
    layer.weight.add_((change @ weight).view_as(layer.weight))
    if layer.bias is not None:
        shift = missing.mean(0) - change @ outputs.mean(0)
        layer.bias.add_(change @ layer.bias.double() + shift)


@torch.no_grad()
def _fit_(norm: SampleNorm, outputs: Tensor, wanted: Tensor) -> None:
    """Scale and shift of every channel by least squares."""
    centred = outputs - outputs.mean(0)
    slope = (centred * (wanted - wanted.mean(0))).mean(0) / centred.square().mean(0).clamp_min(1e-12)
    norm.weight.copy_(slope)
    norm.bias.copy_(wanted.mean(0) - slope * outputs.mean(0))


# Of the log-probabilities, in units of the rounding of their dtype: what nine layers add up to, with room to spare.
_GAP = 1e5
Make = Callable[..., nn.Module]


@dataclass(frozen=True)
class StartData:
    """The data that all starts of a seed are made from."""

    moments: vp.Moments | vp.Tokens  # of the augmented training data
    batch: Tensor  # one augmented batch; its statistics are those of batch norm at the start
    probe: Tensor  # images on which functions are compared
    classes: bool = True  # whether outputs are scores of classes, which are compared as log-probabilities
    borders: Borders = "pooled"  # as for `Experiment`

    def analytic(self, make: Make, model: nn.Module, **options: Any) -> nn.Module:
        """Apply a function of varprop to a model, these moments and an example, with borders as asked for."""
        make_analytic = functools.partial(make, example=self.batch[:1], **options)
        return (
            make_analytic(model, self.moments)
            if self.borders == "pooled"
            else without_borders(make_analytic, model, self.moments)
        )


def without_borders(make: Make, model: nn.Module, moments: vp.Moments | vp.Tokens) -> nn.Module:
    """The result of a function of a model and moments, with statistics that are sums of whole kernels, as the paper's.

    While they are laid out, images are continued beyond their border by their other end instead of zeros: every tap
    meets the same moments at every position. What is made computes with zeros there, as the model does.
    """
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, ROWS_FIRST[1:])}
    padded = [path for path, layer in layers.items() if layer.padding_mode == "zeros"]
    for path in padded:
        layers[path].padding_mode = "circular"
    try:
        result = make(model, moments)
    finally:
        for path in padded:
            layers[path].padding_mode = "zeros"
    for path in padded:
        result.get_submodule(path).padding_mode = "zeros"  # type: ignore[assignment]
    return result


@dataclass(frozen=True)
class StartingPoint:
    """A network ready to be trained, and how far its function is from that of the plain network of its start."""

    model: nn.Module
    gap: float


def original_network(factory: str | Factory, start: Start, seed: int, data: StartData) -> nn.Module:
    """The network whose scales and biases a start projects out; for ``none`` there is nothing to project."""
    placed = {"device": data.batch.device} | ({"dtype": data.batch.dtype} if data.batch.is_floating_point() else {})
    model = without_own_batch_norms(build(factory, seed_of(GENERAL, seed), **placed), data.batch[:1])
    if start == "orthogonal":
        generator = seeded(GENERAL, seed, 2)
        for parameter in (parameter for parameter in model.parameters() if parameter.ndim > 1):
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype)
            parameter.data.copy_(nn.init.orthogonal_(drawn, generator=generator))
    return model


def without_own_batch_norms(model: nn.Module, example: Tensor) -> nn.Module:
    """A new model without those batch norms that directly follow a layer: whether there are any is for a method to say.

    As long as they have seen no data they do nothing, and the layer takes that over.
    """
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    plain = vp.reparametrize(model, "standard", example=example)
    for path, module in list(plain.named_modules()):
        if isinstance(module, nn.Identity):  # which may know what stood there, for "batch" to put it back
            plain.set_submodule(path, nn.Identity())
    return plain


def plain_network(factory: str | Factory, start: Start, seed: int, data: StartData) -> nn.Module:
    """The plain network of a start, with weights of a seed.

    ``none``: PyTorch's weights. ``bn``: as batch norm begins, s uniform on (0, 1), b = 0, statistics of one batch.
    ``ap2``: the projection, s = 1, b = 0. ``orthogonal``: the projection of orthogonal weights. ``wn``: as weight
    normalization begins, every unit with mean 0 and variance 1 on one batch.
    """
    model = original_network(factory, start, seed, data)
    if start == "none":
        return model
    if start == "bn":
        return vp.batch_norm_start(model, data.batch, seeded(GENERAL, seed, 1))
    if start == "wn":
        return _whitened_(model, data.batch)
    return data.analytic(vp.init_, model, shift=False, orthogonal=False)


def _whitened_(model: nn.Module, batch: Tensor) -> nn.Module:
    """The data-dependent start of Salimans & Kingma 2016, in place: layer by layer, as the batch passes through."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, ROWS_FIRST)}
    done: set[str] = set()

    def whiten(path: str, output: Tensor) -> Tensor:
        layer = layers[path]
        assert layer.bias is not None
        channels = -1 if isinstance(layer, nn.Linear) else 1
        if path not in done:
            done.add(path)
            std, mean = torch.std_mean(output.movedim(channels, -1).flatten(0, -2), 0, correction=0)
            layer.weight.div_(std.view(-1, *[1] * (layer.weight.ndim - 1)))
            layer.bias.sub_(mean).div_(std)
            output = ((output.movedim(channels, -1) - mean) / std).movedim(-1, channels)
        return output

    watch(model, batch, layers, whiten)
    return model


OWN_STARTS: dict[Method, tuple[Start, ...]] = {"weight": ("wn",), "batch": ("bn",), "analytic": ("ap2", "orthogonal")}


def with_original_weights(model: nn.Module, original: nn.Module, method: Method, data: StartData) -> nn.Module:
    """A normalized model of equal function on the weights that its own start was made from."""
    if method == "analytic":
        return data.analytic(vp.normalize, original, form="paper")
    for path, layer in original.named_modules():
        if method == "weight" and isinstance(layer, ROWS_FIRST):
            normalized: Any = model.get_submodule(path)
            normalized.parametrizations.weight.original1.data.copy_(layer.weight)  # another vector of that direction
    for path, wrapper in list(model.named_modules()):
        norm, layer = getattr(wrapper, "norm", None), getattr(wrapper, "layer", None)
        if isinstance(norm, _BatchNorm) and isinstance(layer, ROWS_FIRST):
            _rescale_(layer, norm, original.get_submodule(path).weight)  # type: ignore[arg-type]
    return model


@torch.no_grad()
def _rescale_(layer: nn.Module, norm: _BatchNorm, weight: Tensor) -> None:
    """Give a layer under batch norm a weight whose rows are multiples of its own; what follows stays the same."""
    current = layer.weight
    assert isinstance(current, Tensor) and norm.running_mean is not None and norm.running_var is not None
    factor = current.flatten(1).norm(dim=1) / weight.flatten(1).norm(dim=1)
    current.copy_(weight)
    norm.running_mean.div_(factor)
    norm.running_var.div_(factor.square())
    norm.weight.copy_(factor * torch.sqrt(norm.running_var + norm.eps))


def parametrized(plain: nn.Module, method: Method, data: StartData, variant: str = "") -> nn.Module:
    """The plain network's function in the parametrization of a method and variant."""
    if variant == DOUBLE:
        return doubled(plain)
    if method in SAMPLE_NORMS:
        return with_sample_norms(plain, method, data.batch)
    if method == "analytic":
        model = data.analytic(
            lambda net, moments, **more: vp.reparametrize(net, "analytic", moments=moments, **more), plain
        )
    else:
        model = vp.reparametrize(plain, cast(Any, method), batch=data.batch if method == "batch" else None)
    if variant == MOMENTUM:
        for norm in (module for module in model.modules() if isinstance(module, _BatchNorm)):
            norm.momentum = 0.01
    return vp.unit_norm_(model) if variant == UNIT_NORM else model


def without_parametrization(model: nn.Module, method: Method) -> nn.Module:
    """A trained network as a plain one that does the same in evaluation mode; layer and group norms stay."""
    model = model.eval()
    for layer in model.modules():
        if parametrize.is_parametrized(layer, "weight") and isinstance(layer.parametrizations["weight"][0], _Double):  # type: ignore[index]
            parametrize.remove_parametrizations(layer, "weight")
    return model if method in SAMPLE_NORMS else vp.reparametrize(model, "standard")


def trained_network(factory: Factory, method: Method, weights: dict[str, Tensor], batch: Tensor) -> nn.Module:
    """The network that `without_parametrization` gave, from its weights alone, in evaluation mode."""
    model = without_own_batch_norms(build(factory, 0), batch)
    if method in SAMPLE_NORMS:
        add_sample_norms_(model, method, batch)
    for path, layer in model.named_modules():  # layers without bias may have gained one
        name = f"{path}.bias" if path else "bias"
        if name in weights and getattr(layer, "bias", None) is None:
            layer.bias = nn.Parameter(weights[name].clone())
    model.load_state_dict(weights)
    return model.eval()


class _Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def doubled(plain: nn.Module) -> nn.Module:
    """A copy with every weight written as w = 2w': no normalization, only other units of measurement."""
    model = copy.deepcopy(plain)
    for layer in model.modules():
        if isinstance(getattr(layer, "weight", None), nn.Parameter):
            parametrize.register_parametrization(layer, "weight", _Double())
    return model


@torch.no_grad()
def gap(model: nn.Module, plain: nn.Module, probe: Tensor, classes: bool = True) -> float:
    """Largest difference between two networks in evaluation mode: of log-probabilities, or relative to the outputs."""
    outputs = [network.eval()(probe).double() for network in (model, plain)]
    if classes:
        outputs = [F.log_softmax(output, -1) for output in outputs]
    scale = 1.0 if classes else float(outputs[1].abs().max().clamp_min(1e-12))
    return float((outputs[0] - outputs[1]).abs().max()) / scale


def starting_point(
    factory: str | Factory, cell: Cell, data: StartData, own_weights: OwnWeights = "original"
) -> StartingPoint:
    """The network of a cell.

    Raises a RuntimeError if it computes something else than the plain network of its start.
    """
    plain = plain_network(factory, cell.start, cell.seed, data)
    model = parametrized(plain, cell.method, data, cell.variant)
    at_home = own_weights == "original" and cell.start in OWN_STARTS.get(cell.method, ())
    if at_home and cell.variant != UNIT_NORM:  # unit norm is another choice of the same length
        original = original_network(factory, cell.start, cell.seed, data)
        model = with_original_weights(model, original, cell.method, data)
    distance = gap(model, plain, data.probe, data.classes)
    limit = _GAP * torch.finfo(next(plain.parameters()).dtype).eps
    if not distance <= limit and cell.method not in SAMPLE_NORMS:
        raise RuntimeError(
            f"{cell.key} does not start from the same function as the plain network: log-probabilities differ by "
            f"{distance:.2g}, more than the {limit:.2g} that rounding explains."
        )
    return StartingPoint(model.train(), distance)
