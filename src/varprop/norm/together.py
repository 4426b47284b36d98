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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attached import Attachments
from .autograd_node import Pass, apply_fold
from .blueprint import Site, make_layout, walk_of
from .execution import alike, capturing, computing_dtype, inside_backward, plain_execution
from .executor import Executor
from .layout import Pair
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
        self.executor, self.attachments = Executor(self.layout), Attachments()

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
        self.active = None
        self.release()

    def release(self) -> None:
        """Let go of what earlier passes left: it holds nodes of autograd that remember the stream of those passes."""
        self.folded = None
        self.attachments.clear()

    def _present(self) -> Folded | None:
        if not plain_execution():
            return None
        parameters = self.parameters()
        if not alike(parameters):
            return None
        if torch.compiler.is_compiling():
            return self._compute(parameters)
        if capturing(parameters[0]):
            self.release()
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
            parts = self._folded_parts(dtype, versions, given, parameters)
            if self.repeats and not parameters[0].is_cuda:
                copies = [p.detach().clone() for p in parameters]
        layers = list(zip(parts[:count], parts[count:], strict=True))
        return Folded(layers, parameters, versions, device, own, dtype, parts[0].requires_grad, copies)

    def _folded_parts(
        self, dtype: torch.dtype, versions: list[int], given: Pair | None, parameters: list[Tensor]
    ) -> list[Tensor]:
        """Folded weights and then biases, from the node of an earlier pass where one can serve again."""
        recording = None if given else self.executor.recording(dtype, parameters, self.attachments.is_free)
        self.attachments.keep(self.executor.recorders[False].recordings)
        to_attach = recording if torch.is_grad_enabled() and not self.promised else None
        found = None if to_attach is None else self.attachments.again(to_attach, parameters, versions)
        if found is not None:
            return found
        call = Pass(self.executor, weakref.ref(self), dtype, versions, recording)
        parts: list[Tensor] = list(apply_fold(call, *(given or (None, None)), *parameters))
        if to_attach is not None:
            self.attachments.attach(to_attach, parts, parameters)
        return parts

    def _given(self) -> Pair | None:
        """Moments that only the walk can tell, for every channel that reads them."""
        if self.walk is None:
            return None
        found = [self.layers[place].entering_moments(x) for place, x in zip(self.given, self.walk(), strict=True)]
        mean, var = (torch.cat([pair[k].double() for pair in found]) for k in (0, 1))
        return mean, var

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
