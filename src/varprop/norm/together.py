"""All layers of a model folded together: once for every state of the parameters, not once for every call.

The folded weights of all layers come from one autograd node that keeps the parameters themselves and a few vectors. It
can be run backwards any number of times, so that the passes of a gradient accumulation, repeated calls of a layer, and
recomputation in a gradient checkpoint can share it.

A change of the parameters must never be missed. Autograd's version counters tell most of them, but not writes through
`p.data`. So, before a model runs, the versions are compared, and on a CPU the contents too; on CUDA, where comparing
costs as much as folding, everything is folded anew, unless the user promises that nothing changes (`unchanged`).
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .backends import Backend, Gradients, TorchBackend, make_backend
from .blueprint import Site, make_layout, walk_of
from .layout import Layout, Pair
from .passes import flattened, in_memory_order
from .recording import LARGEST, PATIENCE, Recording
from .statistics import Statistics

_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Together] = weakref.WeakValueDictionary()
STALE = (
    "A parameter of a normalized layer was changed in place between the forward and the backward pass; "
    "its gradient can no longer be computed."
)


@dataclass(frozen=True)
class Folded:
    """The folded weight and bias of every layer, and the state of the parameters they follow from."""

    layers: list[Pair]
    parameters: list[Tensor]
    versions: list[int]
    dtype: torch.dtype
    differentiable: bool
    copies: list[Tensor] | None  # of the parameters, to compare with

    def suits(self, dtype: torch.dtype) -> bool:
        """Whether it can serve the present mode."""
        return self.dtype == dtype and (self.differentiable or not torch.is_grad_enabled())

    def is_of(self, parameters: list[Tensor]) -> bool:
        """Whether the parameters are the same and unchanged."""
        pairs = zip(parameters, self.parameters, self.versions, strict=True)
        return all(p is known and p._version == version for p, known, version in pairs)

    def has_contents_of(self, parameters: list[Tensor]) -> bool:
        """Whether the parameters hold the same numbers as when it was computed; False if that cannot be told."""
        pairs = zip(parameters, self.copies or [], strict=False)
        return self.copies is not None and all(torch.equal(p, copied) for p, copied in pairs)


class Together:
    """The layers of a model in one mode that are folded together.

    Args:
        joint: The graph between all of them.
        sites: What is known of each.
        layers: The modules, in the same order.
    """

    def __init__(self, joint: Statistics, sites: list[Site], layers: list[Any]) -> None:
        self.joint, self.sites, self.layers = joint, sites, layers
        self.active: Folded | None = None
        self.folded: Folded | None = None
        self.depth = 0  # of modules that run inside each other
        self.promised = False  # that the parameters do not change
        self.repeats = False  # the model was seen to run twice with the same parameters
        self.backends: dict[Any, Backend] = {}
        self.recorded: Recording | None = None
        self.recorded_key: Any = None
        self.passes = 0  # with parameters at the same addresses
        self._plan()

    def _plan(self) -> None:
        self.number = next(_numbers)
        _known[self.number] = self
        self.layout, self.given = make_layout(self.joint, self.sites)
        self.walk = walk_of(self.joint, self.sites, self.given)

    def begin(self) -> None:
        """Before a module that holds layers runs: make the folded weights ready for all of them."""
        if not self.depth:
            self.active = self._present()
        self.depth += 1

    def end(self) -> None:
        """After it ran."""
        self.depth -= 1
        if not self.depth:
            self.active = None

    def of(self, place: int) -> Pair | None:
        """The folded weight and bias of a layer; None where each layer has to do it by itself."""
        folded = self.active
        if folded is None and torch.compiler.is_compiling():
            return None
        if folded is None or not folded.suits(self._dtype()):
            folded = self._present()
        return None if folded is None else folded.layers[place]

    def forget(self) -> None:
        """Let go of what was computed."""
        self.active = self.folded = None

    def _dtype(self) -> torch.dtype:
        """What the layers compute in: autocast's dtype, or their own."""
        weight = self.layers[0].weight
        device = weight.device.type
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return weight.dtype  # type: ignore[no-any-return]

    def _present(self) -> Folded | None:
        if not _plain_execution():
            return None
        parameters = [getattr(layer, name) for name in ("weight", "shift", "scale") for layer in self.layers]
        if not _alike(parameters):
            return None
        if torch.compiler.is_compiling() or _capturing(parameters[0]):
            return self._compute(parameters)
        if not self._is_current(parameters):
            self.folded = None  # so that old and new never take memory at once
            self.folded = self._compute(parameters)
        return self.folded

    def _is_current(self, parameters: list[Tensor]) -> bool:
        known, sure = self.folded, self.promised or _inside_backward()
        if known is None or (parameters[0].is_cuda and not sure):
            return False
        if not known.suits(self._dtype()) or not known.is_of(parameters):
            return False
        if self.walk is not None and known.differentiable:
            return False  # a walk's autograd graph serves one backward pass only
        if sure:
            return True
        self.repeats = True
        return known.has_contents_of(parameters)

    def _compute(self, parameters: list[Tensor]) -> Folded:
        dtype, given, count = self._dtype(), self._given(), len(self.layers)
        versions, copies = [], None
        if torch.compiler.is_compiling():
            weight, bias = _traced(self, dtype, given, parameters)
            parts = parted(weight, bias, parameters, self.layout)
        else:
            parts = _Fold.apply(self, dtype, *(given or (None, None)), *parameters)  # type: ignore[no-untyped-call]
            versions = [p._version for p in parameters]
            if self.repeats and not parameters[0].is_cuda:
                copies = [p.detach().clone() for p in parameters]
        layers = list(zip(parts[:count], parts[count:], strict=True))
        return Folded(layers, parameters, versions, dtype, parts[0].requires_grad, copies)

    def _given(self) -> Pair | None:
        """Moments that only the walk can tell, for every channel that reads them."""
        if self.walk is None:
            return None
        found = [self.layers[place].entering_moments(x) for place, x in zip(self.given, self.walk(), strict=True)]
        mean, var = (torch.cat([pair[k].double() for pair in found]) for k in (0, 1))
        return mean, var

    def backend(self, weights: list[Tensor]) -> Backend:
        """Who computes, for weights as they lie on their device."""
        first = weights[0]
        key = (first.device, first.dtype, *[w.stride() for w in weights])
        found = self.backends.get(key)
        if found is None:
            found = self.backends[key] = make_backend(self.layout, weights, working(first))
        return found

    def recording(self, dtype: torch.dtype, parameters: Any) -> Recording | None:
        """The fold as a graph to replay, for a small network on CUDA that has run before; None else."""
        if not parameters[0].is_cuda or self.layout.weight_count > LARGEST or _capturing(parameters[0]):
            return None
        stream = torch.cuda.current_stream(parameters[0].device).cuda_stream
        key = (dtype, stream, *[p.data_ptr() for p in parameters])
        if key != self.recorded_key:
            self.recorded_key, self.recorded, self.passes = key, None, 0
        self.passes += 1
        if isinstance(self.backend(list(parameters[: len(self.layers)])), TorchBackend):
            return None  # functions without a kernel may copy from the host, which a graph cannot
        if self.recorded is None and self.passes > PATIENCE:
            self.recorded = Recording(
                lambda: fold_parts(self, dtype, None, parameters),
                lambda kept, grads: unfold_parts(self, kept, grads, parameters),
            )
        return self.recorded

    def __getstate__(self) -> dict[str, Any]:
        return {"joint": self.joint, "sites": self.sites_apart(), "layers": self.layers}

    def sites_apart(self) -> list[Any]:
        """Sites for pickling: what they read is known as the target of the same place in `joint`."""
        return [(s.path, s.use, s.shape, s.groups, s.transposed) for s in self.sites]

    def __setstate__(self, state: dict[str, Any]) -> None:
        joint, layers = state["joint"], state["layers"]
        targets = zip(state["sites"], joint.targets, strict=True)
        sites = [Site(path, use, target, *form) for (path, use, *form), target in targets]
        self.__init__(joint, sites, layers)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Together:
        """A copy for copied layers; the layout never changes and is shared."""
        made = object.__new__(Together)
        memo[id(self)] = made
        made.joint, made.layers = copy.deepcopy(self.joint, memo), copy.deepcopy(self.layers, memo)
        made.sites, made.layout, made.given = self.sites, self.layout, self.given
        made.walk = copy.deepcopy(self.walk, memo)
        made.active = made.folded = None
        made.depth, made.promised, made.repeats = 0, False, False
        made.backends, made.number = {}, next(_numbers)
        made.recorded, made.recorded_key, made.passes = None, None, 0
        _known[made.number] = made
        return made


def _plain_execution() -> bool:
    """Not under torch.func's transforms nor while exporting, where every operation has to be seen."""
    if torch.compiler.is_dynamo_compiling():  # which in some versions of torch calls itself exporting as well
        return True
    return not (torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active())


def _alike(parameters: list[Tensor]) -> bool:
    """Plain tensors of one dtype on one device: what a backend can take."""
    device, dtype = parameters[0].device, parameters[0].dtype
    if device.type not in ("cpu", "cuda"):
        return False
    return all(type(p) in _PLAIN and p.dtype is dtype and p.device == device for p in parameters)


_PLAIN = (Tensor, nn.Parameter)


def _inside_backward() -> bool:
    """Whether autograd is at work: a gradient checkpoint computes again what the forward pass computed."""
    return torch._C._current_graph_task_id() != -1


def _capturing(parameter: Tensor) -> bool:
    return parameter.is_cuda and torch.cuda.is_current_stream_capturing()


def _split(parameters: Any) -> tuple[list[Tensor], Tensor]:
    """The weights, and the shifts and scales of all layers as two rows."""
    count = len(parameters) // 3
    weights = list(parameters[:count])
    return weights, torch.cat(parameters[count:]).to(working(weights[0])).view(2, -1)


def parted(weight: Tensor, bias: Tensor, parameters: Any, layout: Layout) -> list[Tensor]:
    """The folded weights of all layers and then their biases, from the flat buffers."""
    pieces = zip(weight.split_with_sizes([r.weights for r in layout.rows]), parameters, strict=False)
    biases = bias.split_with_sizes([r.outputs for r in layout.rows])
    return [in_memory_order(piece, w) for piece, w in pieces] + list(biases)


def fold_forward(together: Together, dtype: torch.dtype, given: Pair | None, parameters: Any) -> Any:
    """Folded weights and biases, flat, and what the backward needs."""
    weights, shift_scale = _split(parameters)
    return together.backend(weights).forward(weights, shift_scale, given, dtype)


@torch.no_grad()
def fold_backward(together: Together, kept: Any, grad_weight: Tensor, grad_bias: Tensor, parameters: Any) -> Gradients:
    """Derivatives by weights, by scales and shifts (flat), and by given moments."""
    weights, shift_scale = _split(parameters)
    return together.backend(weights).backward(weights, shift_scale, kept, grad_weight, grad_bias)


def working(weight: Tensor) -> torch.dtype:
    """The dtype of a weight's statistics."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


class _Fold(torch.autograd.Function):
    """Keeps nothing by `save_for_backward`: what it keeps are the parameters, whose versions it checks itself.

    So it can be run backwards again, and looks the same to a gradient checkpoint whether it ran there or before.
    """

    @staticmethod
    def forward(ctx: Any, together: Together, dtype: torch.dtype, mean: Any, var: Any, *parameters: Tensor) -> Any:
        given = None if mean is None else (mean, var)
        ctx.together, ctx.parameters, ctx.versions = together, parameters, [p._version for p in parameters]
        ctx.recording = together.recording(dtype, parameters) if given is None else None
        if ctx.recording is not None:
            return tuple(ctx.recording.folded())
        parts, ctx.kept = fold_parts(together, dtype, given, parameters)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if [p._version for p in ctx.parameters] != ctx.versions:
            raise RuntimeError(STALE)
        if torch.is_grad_enabled():  # a derivative of this derivative will be wanted
            return _differentiable_backward(ctx, grads)
        if ctx.recording is not None and not _capturing(grads[0]):
            results = ctx.recording.derivatives(grads)
        else:
            kept = ctx.recording.kept if ctx.recording is not None else ctx.kept
            results = unfold_parts(ctx.together, kept, grads, ctx.parameters)
        needed = ctx.needs_input_grad[2:]
        return None, None, *(r if need else None for r, need in zip(results, needed, strict=True))


def fold_parts(
    together: Together, dtype: torch.dtype, given: Pair | None, parameters: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Folded weights and biases, layer by layer, and what the backward needs."""
    weight, bias, kept = fold_forward(together, dtype, given, parameters)
    return parted(weight, bias, parameters, together.layout), kept


@torch.no_grad()
def unfold_parts(together: Together, kept: Any, grads: Sequence[Tensor], parameters: Any) -> list[Tensor]:
    """Derivatives by given moments and by parameters, from those by the parts."""
    count = len(together.layout.rows)
    grad_weight = torch.cat([flattened(g, w) for g, w in zip(grads[:count], parameters, strict=False)])
    found = fold_backward(together, kept, grad_weight, torch.cat(list(grads[count:])), parameters)
    return by_parameter(found, parameters, together.layout)


def by_parameter(found: Gradients, parameters: Any, layout: Layout) -> list[Tensor]:
    """One derivative for each given moment and each parameter, in their order."""
    flat, by_source, d_mean, d_var = found
    pieces = zip(flat.split_with_sizes([rows.weights for rows in layout.rows]), parameters, strict=False)
    sizes = [rows.outputs for rows in layout.rows]
    vectors = by_source.to(parameters[-1].dtype).view(-1).split_with_sizes(sizes * 2)
    return [d_mean, d_var, *(in_memory_order(piece, weight) for piece, weight in pieces), *vectors]


def _differentiable_backward(ctx: Any, grads: Sequence[Tensor]) -> Any:
    """The same by autograd through the layers' own formulas, which can be differentiated again."""
    folded = [layer.folded() for layer in ctx.together.layers]
    outputs = [weight for weight, _ in folded] + [bias for _, bias in folded]
    matching = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    wanted = [p for p in ctx.parameters if p.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, matching, create_graph=True, allow_unused=True))
    return None, None, None, None, *(next(found) if p.requires_grad else None for p in ctx.parameters)


def _traced(together: Together, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> Pair:
    from .traced import traced_fold

    return traced_fold(together.number, dtype, given, parameters)


def known(number: int) -> Together:
    """The layers that a compiled graph refers to."""
    return _known[number]


class Folding:
    """What the hooks of the modules that hold layers call: it knows when they run, and in which mode."""

    def __init__(self, by_mode: dict[bool, Together]) -> None:
        self.by_mode = by_mode

    def begin(self, module: nn.Module, _arguments: Any) -> None:
        """Before a module's forward."""
        self.by_mode[module.training].begin()

    def end(self, module: nn.Module, _arguments: Any, _output: Any) -> None:
        """After it."""
        self.by_mode[module.training].end()
