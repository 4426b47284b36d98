"""Differentially private training of normalized models with Opacus (the extra `varprop[opacus]`).

Opacus needs the gradient of every sample by the parameters of single layers. A normalized layer cannot give it: its
scale and shift count in the layers behind it too. Its folded weights W' and b' can: they are the parameters of a plain
model, the twin, that computes the same. So the twin is what Opacus sees. Gradients of single samples by W' and b' are
clipped, summed and made noisy there, and one backward pass through the fold (W', b') = F(parameters) turns the noisy
sum into a gradient of the normalized model. F is computed from the parameters and the moments of the input and sees no
sample: what follows the noise is post-processing, and the guarantee is that of Opacus, so long as the input moments are
public.

What is clipped is worth a choice. The gradient of a sample by W' is d xᵀ, with d its gradient by the output, and most
of x is the mean of the layer's input, which is positive behind a rectifier: it uses up the bound and says nothing about
the sample. The normalization knows that mean m without data. So the twin computes W' (x - m) + c, and where rows are
centred takes their mean from W' itself: gradients by the new parameters are d (x - m)ᵀ and d. The function is the same,
the map from old to new parameters follows from parameters alone, and the guarantee stays.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .graph.tracing import preserved_modes
from .norm.api import fold
from .norm.layers import Normalized, normalized_layers
from .norm.linear_layers import replace
from .norm.recurrent import NormalizedRecurrent
from .norm.scope import shared_fold

try:
    import opacus
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
    from opacus.grad_sample.conv import compute_conv_grad_sample
    from opacus.grad_sample.linear import compute_linear_grad_sample, compute_linear_norm_sample
    from opacus.grad_sample.utils import register_grad_sampler, register_norm_sampler
    from opacus.layers import DPGRU, DPLSTM, DPRNN
except ImportError as error:
    raise ImportError("Private training needs Opacus: pip install '.[opacus]' in a checkout of varprop.") from error


class PrivacyEngine(opacus.PrivacyEngine):  # type: ignore[misc]
    """Opacus' engine, for normalized models too.

    >>> model = vp.normalize(plain, moments, form="deep")  # public moments
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.5)
    >>> private, private_optimizer, loader = PrivacyEngine().make_private(
    ...     module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)

    Train `private` as always with Opacus: with virtual steps, all ways to clip, and the `grad_sample_mode` hooks,
    functorch, ew or ghost. Each step changes the parameters of `model`, which is the one to evaluate, save and fold.
    In several processes wrap it in Opacus' `DifferentiallyPrivateDistributedDataParallel`. Models that are not
    normalized are left to Opacus.
    """

    def make_private(self, *, module: nn.Module, optimizer: Optimizer, **settings: Any) -> Any:
        """Make model, optimizer and loader private as Opacus does, a normalized model through its plain twin.

        Warns if the normalization has the paper's form: the deep one does better in private training.

        Raises:
            ValueError: If the optimizer has parameters that are not the model's, or the model cannot have a twin.
        """
        if not normalized_layers(module):
            return super().make_private(module=module, optimizer=optimizer, **settings)
        _check(module, optimizer, settings)
        if not any(layer.centred_rows for layer in normalized_layers(module).values()):
            warnings.warn(PAPER_FORM, UserWarning, stacklevel=2)
        distributed = isinstance(module, DPDDP)
        # torch's ExpandedWeights can compute nothing from a weight before a layer uses it
        centred = settings.get("grad_sample_mode") != "ew"
        twin = Twin(module.get_submodule("module") if distributed else module, centred)
        plain = DPDDP(twin.plain) if distributed else twin.plain
        return super().make_private(module=plain, optimizer=PullBack(twin, optimizer), **settings)

    def save_checkpoint(self, *, module: nn.Module, **settings: Any) -> None:
        """Save a checkpoint as Opacus does; for a normalized model its parameters, not those of the twin."""
        super().save_checkpoint(module=_trained_model(module), **settings)

    def load_checkpoint(self, *, path: Any, module: nn.Module, **settings: Any) -> Any:
        """Load a checkpoint as Opacus does, but refuse a file that contains code, which Opacus would run.

        Raises:
            ValueError: If the file contains more than tensors, numbers and lists of them, or is no checkpoint.
        """
        start = path.tell() if hasattr(path, "tell") else None
        try:
            torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever the damage in the file happens to cause
            raise ValueError(f"{path} is no checkpoint of tensors and numbers alone, or is damaged.") from error
        if start is not None:
            path.seek(start)
        return super().load_checkpoint(path=path, module=_trained_model(module), **settings)


def _check(model: nn.Module, optimizer: Optimizer, settings: dict[str, Any]) -> None:
    parameters = {id(parameter) for parameter in model.parameters()}
    if any(id(p) not in parameters for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("The optimizer has parameters that are not the model's: make it of model.parameters().")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        name = "opacus.distributed.DifferentiallyPrivateDistributedDataParallel"
        raise ValueError(f"Private training in several processes needs {name} around the model, not torch's DDP.")
    if not settings.get("wrap_model", True):
        raise ValueError("Private training of a normalized model needs wrap_model=True: Opacus wraps its plain twin.")


def _trained_model(module: nn.Module) -> nn.Module:
    """The normalized model behind what `make_private` returned; any other module itself."""
    plain = getattr(module, "_module", None)
    twin = getattr(plain.module if isinstance(plain, DPDDP) else plain, TWIN, None)
    return module if twin is None else twin.model


PAPER_FORM = (
    'The model is normalized in the paper\'s form; in private training on CIFAR-10 vp.normalize(..., form="deep") '
    "did better, 62.8 against 57.9 % (docs/private.md)."
)
TWIN = "varprop_twin"  # an attribute of the plain model


class _Centred:
    """A plain layer W (x - m) + c: its parameters are W and c, and m is no parameter."""

    # m, in a shape that broadcasts with the weight; no buffer, since Opacus refuses layers that have any
    offset: Tensor
    centred_rows: bool  # true if the mean of every row is taken from the weight

    def plain_parameters(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer W x + b that computes the same."""
        if self.centred_rows:
            weight = weight - weight.mean(tuple(range(1, weight.ndim)), keepdim=True)
        return weight, bias - (weight * self.offset).flatten(1).sum(1)


class CentredLinear(_Centred, nn.Linear):
    """A linear layer of inputs minus their predicted mean."""

    def forward(self, input: Tensor) -> Tensor:
        """The plain layer's output."""
        return F.linear(input, *self.plain_parameters(self.weight, self.bias))


class _CentredConv(_Centred):
    def forward(self, input: Tensor) -> Tensor:
        """The plain layer's output."""
        layer: Any = self
        output: Tensor = layer._conv_forward(input, *self.plain_parameters(layer.weight, layer.bias))
        return output


class CentredConv1d(_CentredConv, nn.Conv1d):
    """A convolution of inputs minus their predicted mean."""


class CentredConv2d(_CentredConv, nn.Conv2d):
    """A convolution of inputs minus their predicted mean."""


class CentredConv3d(_CentredConv, nn.Conv3d):
    """A convolution of inputs minus their predicted mean."""


CENTRED: dict[type[nn.Module], Any] = {
    nn.Linear: CentredLinear,
    nn.Conv1d: CentredConv1d,
    nn.Conv2d: CentredConv2d,
    nn.Conv3d: CentredConv3d,
}


def _plain(layer: Any) -> Any:
    """A centred layer under the class that Opacus goes by, with the same parameters."""
    plain = copy.copy(layer)
    plain.__class__ = next(kind for kind, centred in CENTRED.items() if centred is type(layer))
    return plain


@register_grad_sampler([CentredConv1d, CentredConv2d, CentredConv3d])  # type: ignore[untyped-decorator]
def _conv_gradients(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    gradients: dict[nn.Parameter, Tensor] = compute_conv_grad_sample(_plain(layer), activations, backprops)
    by_weight = gradients.get(layer.weight)
    if by_weight is not None:  # the largest tensors of a step, so in place
        by_bias = backprops.flatten(2).sum(2)
        by_weight.addcmul_(by_bias.view(*by_bias.shape, *[1] * (by_weight.ndim - 2)), layer.offset, value=-1)
        if layer.centred_rows:
            by_weight.sub_(by_weight.mean(tuple(range(2, by_weight.ndim)), keepdim=True))
    return gradients


def _centred_input(layer: Any, activations: list[Tensor]) -> list[Tensor]:
    """The inputs of a linear layer as its centred weight multiplies them."""
    x = activations[0] - layer.offset
    return [x - x.mean(-1, keepdim=True) if layer.centred_rows else x]


@register_grad_sampler(CentredLinear)  # type: ignore[untyped-decorator]
def _linear_gradients(layer: Any, activations: list[Tensor], backprops: Tensor) -> Any:
    return compute_linear_grad_sample(_plain(layer), _centred_input(layer, activations), backprops)


@register_norm_sampler(CentredLinear)  # type: ignore[untyped-decorator]
def _linear_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> Any:
    return compute_linear_norm_sample(_plain(layer), _centred_input(layer, activations), backprops)


class Twin:
    """A plain model that computes what a normalized one does, with a parameter for every folded tensor.

    If `centred`, layers are those of inputs minus their predicted mean.
    """

    def __init__(self, model: nn.Module, centred: bool = True) -> None:
        self.model = model
        with warnings.catch_warnings():  # of layers that gain a bias or are no longer tied: here all do, and all are
            warnings.simplefilter("ignore", UserWarning)
            self.plain = fold(model, keep_batchnorm=False)
        self._centred: dict[str, Any] = {}
        for path, normalized in normalized_layers(model).items():
            self.plain = _prepared(self.plain, path, normalized)
            layer: Any = self.plain.get_submodule(path)
            if centred and type(layer) in CENTRED and normalized.networks:
                layer.__class__ = CENTRED[type(layer)]
                layer.centred_rows = normalized.centred_rows
                self._centred[path] = layer
        self._refresh_offsets()
        present = dict(self.plain.named_modules())
        self._modules = [(present[path], module) for path, module in model.named_modules() if path in present]
        with torch.enable_grad():  # what is trained does not depend on where the twin is made
            trained = {name: value.requires_grad for name, value in self._values()}
        self.parameters = {name: self.plain.get_parameter(name).requires_grad_(on) for name, on in trained.items()}
        setattr(self.plain, TWIN, self)
        # Computed anew in each call: nobody has to notice that the model was stepped, loaded or written to.
        self.plain.register_forward_pre_hook(lambda *_: self.refresh())

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the plain model by name, as a function of those of the normalized one."""
        seen: set[nn.Parameter] = set()
        inside = tuple(f"{path}." if path else "" for path in normalized_layers(self.model))
        for path, normalized in normalized_layers(self.model).items():
            folded = _folded(normalized)
            if path in self._centred:
                moved = (folded["weight"] * self._centred[path].offset).flatten(1).sum(1)
                folded["bias"] = folded["bias"] + moved
            yield from ((f"{path}.{name}".lstrip("."), value) for name, value in folded.items())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if not name.startswith(inside) and parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def values(self) -> list[Tensor]:
        """The values of `parameters`, in the modes that the modules of the plain model are in."""
        with preserved_modes(self.model), shared_fold():
            for plain, module in self._modules:
                module.training = plain.training
            return [value for _, value in self._values()]

    def _refresh_offsets(self) -> None:
        """Give centred layers the means of their inputs that follow from the present parameters."""
        means: dict[int, list[Tensor]] = {}
        for path, layer in self._centred.items():
            normalized: Any = self.model.get_submodule(path)
            network, index = normalized.networks.get(normalized.training) or next(iter(normalized.networks.values()))
            if id(network) not in means:
                means[id(network)] = network.entering_means()
            groups = getattr(layer, "groups", 1)
            offset = means[id(network)][index].view(groups, -1, *[1] * (layer.weight.ndim - 2)).to(layer.weight)
            layer.offset = offset if groups == 1 else offset.repeat_interleave(len(layer.weight) // groups, 0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the plain model the folded weights of the present parameters."""
        self._refresh_offsets()
        for parameter, value in zip(self.parameters.values(), self.values(), strict=True):
            parameter.data.copy_(value)

    def pull_back(self) -> None:
        """Set the gradients of the normalized model to those of the plain one, taken through the fold."""
        with torch.enable_grad():
            values = self.values()
        pairs = [(v, p.grad) for v, p in zip(values, self.parameters.values(), strict=True) if v.requires_grad]
        outputs, grads = zip(*((value, grad) for value, grad in pairs if grad is not None), strict=True)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(outputs, trained, grads, allow_unused=True)
        for parameter, grad in zip(trained, gradients, strict=True):
            parameter.grad = grad


def _folded(normalized: Normalized) -> dict[str, Tensor]:
    """The folded parameters of a layer by name."""
    if isinstance(normalized, NormalizedRecurrent):
        return normalized.folded()
    return dict(zip(("weight", "bias"), normalized.folded(), strict=True))


def _prepared(plain: nn.Module, path: str, normalized: Normalized) -> nn.Module:
    """The plain model with a layer that has a parameter, its own, for every folded tensor."""
    layer = plain.get_submodule(path)
    if isinstance(layer, nn.RNNBase):
        return replace(plain, layer, _with_visible_gates(path, layer))
    with torch.no_grad():
        for name, value in _folded(normalized).items():
            layer.register_parameter(name, nn.Parameter(value.clone()))
    return plain


def _with_visible_gates(path: str, layer: nn.RNNBase) -> nn.Module:
    """Opacus' own layer, which computes the same step by step."""
    kinds = {"RNN_TANH": DPRNN, "RNN_RELU": DPRNN, "LSTM": DPLSTM, "GRU": DPGRU}
    if layer.proj_size:
        raise ValueError(f"Opacus has no LSTM with a projection: '{path}' cannot be trained privately.")
    settings = {"nonlinearity": layer.mode[4:].lower()} if layer.mode.startswith("RNN") else {}
    names = ("input_size", "hidden_size", "num_layers", "batch_first", "dropout", "bidirectional")
    recurrent: nn.Module = kinds[layer.mode](**{name: getattr(layer, name) for name in names}, **settings)
    recurrent.to(next(layer.parameters())).load_state_dict(layer.state_dict())
    return recurrent.train(layer.training)


class PullBack(Optimizer):
    """Takes the plain twin's noisy gradients back to the model and lets the model's optimizer step, for Opacus."""

    def __init__(self, twin: Twin, optimizer: Optimizer) -> None:
        private = [parameter for parameter in twin.parameters.values() if parameter.requires_grad]
        super().__init__(private, {})
        self.twin, self.optimizer = twin, optimizer
        groups = [Group(private if k == 0 else [], theirs) for k, theirs in enumerate(optimizer.param_groups)]
        self.param_groups = groups  # type: ignore[assignment]  # schedules of either optimizer reach both

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step the normalized model."""
        self.twin.pull_back()
        self.optimizer.step()
        for parameter in self.twin.model.parameters():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of the model's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the model's optimizer."""
        self.optimizer.load_state_dict(state_dict)
        for group, settings in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            group.settings = settings  # type: ignore[attr-defined]  # torch has replaced the old ones


class Group(MutableMapping[str, Any]):
    """Parameters of the twin under the settings of a group of the model's optimizer."""

    def __init__(self, params: Sequence[Tensor], settings: dict[str, Any]) -> None:
        self.params, self.settings = params, settings

    def __getitem__(self, key: str) -> Any:
        return self.params if key == "params" else self.settings[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.settings[key] = value

    def __delitem__(self, key: str) -> None:
        del self.settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)
