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
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .autograd_node import apply_fold, fold_to_record, unfold_to_record, working
from .backends import Backend, TorchBackend, make_backend
from .blueprint import Site, make_layout, walk_of
from .execution import alike, capturing, computing_dtype, inside_backward, plain_execution
from .layout import Pair
from .native import NativeBackend, make_native
from .recording import LARGEST, Recorder, Recording, Replay, graph_trees_run, stream_to_record
from .statistics import Statistics

PARAMETERS = ("weight", "shift", "scale")  # of a layer, in the order in which they are folded
_numbers = itertools.count()
_known: weakref.WeakValueDictionary[int, Together] = weakref.WeakValueDictionary()


class Folded(NamedTuple):  # of which one is made for every pass: a dataclass takes longer
    """The folded weight and bias of every layer, and the state of the parameters they follow from."""

    layers: list[Pair]
    parameters: list[Tensor]
    versions: list[int]
    device: str
    own_dtype: torch.dtype  # of the parameters
    dtype: torch.dtype  # of the folded ones
    differentiable: bool
    copies: list[Tensor] | None  # of the parameters, to compare with

    def suits(self) -> bool:
        """Whether it can serve the present mode."""
        wanted = computing_dtype(self.device, self.own_dtype)
        return self.dtype == wanted and (self.differentiable or not torch.is_grad_enabled())

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
        self.layout, self.given = make_layout(joint, sites)
        self.walk = walk_of(joint, sites, self.given)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """As if nothing had been computed, under a number of its own."""
        self.number = next(_numbers)
        _known[self.number] = self
        self.active: Folded | None = None
        self.folded: Folded | None = None
        self.depth = 0  # of modules that run inside each other
        self.promised = False  # that the parameters do not change
        self.repeats = False  # the model was seen to run twice with the same parameters
        self.backends: dict[Any, Backend] = {}
        self.natives: dict[Any, NativeBackend | None] = {}
        self.recorders = {compiled: Recorder() for compiled in (False, True)}
        self.recordable = self.layout.weight_count <= LARGEST

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
        if folded is None or not folded.suits():
            folded = self._present()
        return None if folded is None else folded.layers[place]

    def forget(self) -> None:
        """Let go of what was computed."""
        self.active = self.folded = None

    def _present(self) -> Folded | None:
        if not plain_execution():
            return None
        parameters = self.parameters()
        if not alike(parameters):
            return None
        if torch.compiler.is_compiling() or capturing(parameters[0]):
            return self._compute(parameters)
        if not self._is_current(parameters):
            self.folded = None  # so that old and new never take memory at once
            self.folded = self._compute(parameters)
        return self.folded

    def parameters(self) -> list[Tensor]:
        """All weights, then all shifts, then all scales."""
        if not torch.compiler.is_compiling():  # a module's own dictionary is found faster than its attributes
            own = [layer._parameters for layer in self.layers]
            found = [parameters.get(name) for name in PARAMETERS for parameters in own]
            if all([parameter is not None for parameter in found]):
                return found
        return [getattr(layer, name) for name in PARAMETERS for layer in self.layers]

    def _is_current(self, parameters: list[Tensor]) -> bool:
        known, sure = self.folded, self.promised or inside_backward()
        if known is None or (parameters[0].is_cuda and not sure):
            return False
        if not known.suits() or not known.is_of(parameters):
            return False
        if self.walk is not None and known.differentiable:
            return False  # a walk's autograd graph serves one backward pass only
        if sure:
            return True
        self.repeats = True
        return known.has_contents_of(parameters)

    def _compute(self, parameters: list[Tensor]) -> Folded:
        device, own, count = parameters[0].device.type, parameters[0].dtype, len(self.layers)
        dtype, given = computing_dtype(device, own), self._given()
        versions: list[int] = []
        copies = None
        if torch.compiler.is_compiling():
            parts = _traced(self, dtype, given, parameters)
        else:
            versions = [p._version for p in parameters]
            parts = apply_fold(self, dtype, versions, *(given or (None, None)), *parameters)
            if self.repeats and not parameters[0].is_cuda:
                copies = [p.detach().clone() for p in parameters]
        layers = list(zip(parts[:count], parts[count:], strict=True))
        return Folded(layers, parameters, versions, device, own, dtype, parts[0].requires_grad, copies)

    def _given(self) -> Pair | None:
        """Moments that only the walk can tell, for every channel that reads them."""
        if self.walk is None:
            return None
        found = [self.layers[place].entering_moments(x) for place, x in zip(self.given, self.walk(), strict=True)]
        mean, var = (torch.cat([pair[k].double() for pair in found]) for k in (0, 1))
        return mean, var

    def backend(self, weights: Sequence[Tensor]) -> Backend:
        """Who computes, for weights as they lie on their device."""
        key = (weights[0].device, weights[0].dtype, *[w.stride() for w in weights])
        found = self.backends.get(key)
        if found is None:
            found = self.backends[key] = make_backend(self.layout, weights, working(weights[0]))
        return found

    def native(self, parameters: Sequence[Tensor]) -> NativeBackend | None:
        """Compiled code for parameters (weights come first) as they lie in memory; None if others are to compute."""
        if not parameters[0].is_cpu:
            return None
        key = (parameters[0].dtype, *map(Tensor.stride, parameters))
        try:
            return self.natives[key]
        except KeyError:
            found = self.natives[key] = make_native(self.layout, parameters, working(parameters[0]))
            return found

    def recording(self, dtype: torch.dtype, parameters: Any, compiled: bool = False) -> Recording | None:
        """The fold as a graph to replay, where it can be recorded and has run before; None else."""
        key = self._recording_key(dtype, parameters, compiled)
        return None if key is None else self.recorders[compiled].recording(key, lambda: self._record(key, parameters))

    def replayed_back(
        self, recording: Recording | None, grads: Sequence[Tensor], weights: Any, compiled: bool = False
    ) -> Replay | None:
        """The way back replayed, from derivatives by the parts; None if it cannot be."""
        if recording is None or not self._was_recorded_with(recording.key, weights, compiled):
            return None
        return recording.derivatives(grads, functools.partial(unfold_to_record, self, weights))

    def _was_recorded_with(self, key: Any, weights: Any, compiled: bool) -> bool:
        """Whether the weights, which alone of all parameters are read again, lie where they lay."""
        own = self._recording_key(key[0], weights, compiled)
        return own is not None and own == key[: len(own)]

    def _recording_key(self, dtype: torch.dtype, parameters: Any, compiled: bool) -> Any:
        """What a recording depends on; None where nothing can be recorded."""
        stream = stream_to_record(parameters[0]) if self.recordable else None
        if stream is None or (compiled and graph_trees_run(parameters[0])):
            return None
        addresses, strides = map(Tensor.data_ptr, parameters), map(Tensor.stride, parameters[: len(self.layers)])
        return dtype, parameters[0].dtype, stream, *strides, *addresses

    def _record(self, key: Any, parameters: Any) -> Recording | None:
        if isinstance(self.backend(parameters[: len(self.layers)]), TorchBackend):
            return None  # functions without a kernel may copy from the host, which a graph cannot
        return Recording(key, functools.partial(fold_to_record, self, key[0], parameters))

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
        made._begin_anew()
        return made


def _traced(together: Together, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> list[Tensor]:
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
