"""The normalized layers of a model in one mode: what they are folded from, and the fold as a function of that."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..gaussian.normal import Pair
from ..moments import Tokens
from .fold import reference
from .fold.autograd import fold_parts, own_saved_tensors, reference_parts
from .fold.dispatch import Executor, computing_dtype, needs_reference, register
from .fold.layout import Layout, restricted
from .intact import Intact
from .layer_layout import Found, Site, Use, make_layout, walk_of
from .linear_layers import is_linear_layer, require_weight_of_its_own
from .partition import by_bytes, layout_of_part
from .sharded import refuse_sharded
from .statistics import CapturedMode, Statistics

Vectors = Mapping[nn.Module, Pair]  # shifts and scales of layers
PARAMETERS = ("weight", "shift", "scale")  # of a layer, in the order in which they are folded


class Folded(NamedTuple):
    """The folded weights and then biases of all layers, and what they were computed from and in."""

    parts: list[Tensor]
    parameters: list[Tensor]
    versions: list[int]
    dtypes: tuple[torch.dtype, torch.dtype]  # of the parameters, and of the parts
    inference: bool  # computed in inference mode
    serves_one_backward: bool
    originals: dict[
        int, list[tuple[Tensor, int]]
    ]  # by place: what a parametrized weight is computed from, with versions
    between: list[tuple[Tensor, int]]  # what a walk has read besides, with versions

    def layer(self, place: int) -> Pair:
        """Weight and bias of a layer."""
        return self.parts[place], self.parts[place + len(self.parts) // 2]

    def serves(self, layer: Any, place: int, compiling: bool) -> bool:
        """Whether it is what would be computed now for a layer, as far as autograd can tell.

        `compiling` is whether its caller is being compiled: Dynamo may compile this function alone as well.
        """
        own, used = self.dtypes
        if used != computing_dtype(self.parts[place].device.type, own):
            return False
        if torch.is_grad_enabled() and not self.parts[place].requires_grad and _wants_gradient(self.parameters):
            return False
        if compiling:
            return True
        return self.inference == torch.is_inference_mode_enabled() and not self.changed(layer, place)

    def changed(self, layer: Any, place: int) -> bool:
        """Whether a layer has other parameters than it was computed from, or they were written to."""
        if not self.versions:  # computed in a graph
            return True
        own = layer._parameters  # found faster than attributes
        for name in PARAMETERS:
            parameter = self.parameters[place]
            if place in self.originals:  # computed anew at every access, and so never the same tensor
                if not _same(self.originals[place], _originals(layer)):
                    return True
            elif (own[name] if name in own else getattr(layer, name)) is not parameter:
                return True
            if parameter._version != self.versions[place]:
                return True
            place += len(self.parts) // 2
        return False


def _originals(layer: Any) -> list[Tensor]:
    """What the weight of a parametrized layer is computed from; empty if it is a parameter."""
    if "weight" in layer._parameters or not is_parametrized(layer, "weight"):
        return []
    steps = layer.parametrizations["weight"]
    return [*steps.parameters(), *steps.buffers()]


def _same(versions: list[tuple[Tensor, int]], tensors: list[Tensor]) -> bool:
    """Whether tensors are those that were recorded, and were not written to since, as far as autograd can tell."""
    if len(versions) != len(tensors):
        return False
    return all(a is b and b._version == version for (a, version), b in zip(versions, tensors, strict=True))


def _with_versions(tensors: list[Tensor]) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors]


def _wants_gradient(parameters: list[Tensor]) -> bool:
    return any([parameter.requires_grad for parameter in parameters])


class Network:
    """The layers of a model in one mode that are folded together: all of them, or a part.

    Args:
        joint: The graph between all of them.
        sites: What is known of each.
        layers: The modules, in the same order.
        intact: The model as it was when it was normalized.
        found: Their layout, and what its given lanes stand for; found if it is not given.

    Attributes:
        outside: Layers of other parts, whose outputs enter this one.
        whole: The network of which it is a part; itself, if of none.
        places: For places in the whole, the places here.
        latest: Shifts and scales as the latest call has met them, where they are sharded between the calls.
    """

    def __init__(
        self,
        joint: Statistics,
        sites: list[Site],
        layers: list[Any],
        intact: Intact,
        found: Found | None = None,
    ) -> None:
        self.joint, self.sites, self.layers, self.intact = joint, sites, layers, intact
        self.layout, self.given, self.fixed = found or make_layout(joint, sites)
        self.walk = walk_of(joint, sites, self.given, self.fixed)
        self.executor = Executor(self.layout)
        register(self)
        self._alone: dict[int, Layout] = {}
        self.outside: list[Any] = []
        self.whole, self.places = self, {place: place for place in range(len(self.layers))}
        self.latest: Vectors = {}
        self._parts: dict[tuple[int, ...], Network] = {}
        self._by_bytes: list[Network] | None = None
        self._reads: dict[int, set[int]] = {}

    def part(self, places: list[int]) -> Network:
        """The network of some of the layers, in ascending order."""
        found = self._parts.get(tuple(places))
        if found is None:
            found = self._parts[tuple(places)] = self._make_part(places)
        return found

    def parts_by_bytes(self) -> list[Network]:
        """Parts of limited size, in the order of their calls; the whole if it is not larger."""
        if self._by_bytes is None:
            calls = {
                path: n for n, path in enumerate(self.joint.graph.calls.values())
            }  # not of those nobody reads from
            order = sorted(range(len(self.sites)), key=lambda place: calls.get(self.sites[place].path, len(calls)))
            cut = by_bytes((place, self.layers[place].weight.nbytes) for place in order)
            self._by_bytes = [self] if len(cut) == 1 else [self.part(places) for places in cut]
        return self._by_bytes

    def read_by(self, place: int) -> set[int]:
        """The layers whose shifts and scales are needed to fold one."""
        if place not in self._reads:
            read = set(layout_of_part(self.layout, [place], self._fixed_sizes()).others)
            walk = walk_of(self.joint, self.sites, [place] if place in self.given else [], [])
            paths = set(walk.graph.calls.values()) if walk is not None else set()
            self._reads[place] = read | {n for n, site in enumerate(self.sites) if site.path in paths}
        return self._reads[place]

    def _make_part(self, places: list[int]) -> Network:
        layout, outside, fixed = layout_of_part(self.layout, places, self._fixed_sizes())
        given = {n: self.given[place] for n, place in enumerate(places) if place in self.given}
        found = Found(layout, given, [self.fixed[n] for n in fixed])
        sites, layers = ([of[place] for place in places] for of in (self.sites, self.layers))
        made = Network(self.joint, sites, layers, self.intact, found)
        made.outside = [self.layers[place] for place in outside]
        made.whole, made.places = self, {place: n for n, place in enumerate(places)}
        return made

    def _fixed_sizes(self) -> list[int]:
        return [math.prod(value.lanes) for value in self.fixed]

    def first_weight(self) -> Tensor:
        """The weight that comes first among the parameters."""
        weight: Tensor = self.layers[0].weight
        return weight

    def parameters(self) -> list[Tensor]:
        """All weights, then all shifts, then all scales."""
        if not torch.compiler.is_compiling():  # a module's own dictionary is found faster than its attributes
            own = [layer._parameters for layer in self.layers]
            found = [parameters.get(name) for name in PARAMETERS for parameters in own]
            if all([parameter is not None for parameter in found]):
                return found
            for site, layer in zip(self.sites, self.layers, strict=True):
                require_weight_of_its_own(site.path, layer)
        return [getattr(layer, name) for name in PARAMETERS for layer in self.layers]

    def fold(self, known: Vectors | None = None) -> Folded:
        """The folded weights and biases of all layers, as they follow from the present parameters.

        Args:
            known: Shifts and scales of other layers that are sharded now, as they were when those ran.

        Raises:
            ValueError: If a layer was replaced since the model was normalized.
        """
        self.intact.require()
        parameters = self.parameters()
        first, compiling = parameters[0], torch.compiler.is_compiling()
        dtype = computing_dtype(first.device.type, first.dtype)
        with own_saved_tensors():
            parts = self._folded(dtype, self._given(known), parameters)
        once = (self.walk is not None or bool(self.outside)) and parts[0].requires_grad
        versions = [] if compiling else [p._version for p in parameters]
        inference = not compiling and torch.is_inference_mode_enabled()
        originals, between = {}, []
        if not compiling:
            computed = {n: _originals(layer) for n, layer in enumerate(self.layers)}
            originals = {n: _with_versions(tensors) for n, tensors in computed.items() if tensors}
            between = _with_versions(self._read_between())
        return Folded(parts, parameters, versions, (first.dtype, dtype), inference, once, originals, between)

    def _read_between(self) -> list[Tensor]:
        """The parameters and buffers besides those of its layers that a fold reads."""
        return self.walk.tensors_read() if self.walk is not None else []

    def changed_between(self, folded: Folded) -> bool:
        """Whether others of the parameters and buffers that a fold has read were replaced or written to."""
        return not _same(folded.between, self._read_between())

    def fold_one(self, place: int) -> Pair:
        """The folded weight and bias of one layer, by plain operations on no more than it depends on."""
        self.intact.require()
        parameters, count = self.parameters(), len(self.layers)
        refuse_sharded(parameters)
        if place not in self._alone:
            self._alone[place] = restricted(self.layout, [place])
        dtype = computing_dtype(parameters[place].device.type, parameters[place].dtype)
        with own_saved_tensors():
            weight, bias = reference_parts(self._alone[place], self._given(), [parameters[place], *parameters[count:]])
        return weight.to(dtype), bias.to(dtype)

    def require_in_use(self, place: int, called: nn.Module | None) -> None:
        """Raise if what a layer's statistics follow from is not in use: it was copied without that.

        Args:
            place: The layer.
            called: The module whose call asks for the layer; None if it is called by itself.
        """
        if self.intact.apart:
            target = self.joint.nodes_by_name()[self.sites[place].target]
            reads = Statistics(self.joint.graph, [target]).modules_read()
            self.intact.require_in_use(reads, (called, self.layers[place]))

    def _folded(self, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> list[Tensor]:
        if needs_reference(parameters):
            refuse_sharded(parameters)
            return [part.to(dtype) for part in reference_parts(self.layout, given, parameters)]
        if torch.compiler.is_compiling():
            return _compiled(self.executor.number, dtype, given, parameters)
        return fold_parts(self.executor, dtype, given, parameters)

    @torch.no_grad()
    def output_statistics(self, place: int) -> Pair:
        """Mean and standard deviation of a layer's output channels before the normalization, without bias."""
        parameters, count = self.parameters(), len(self.layers)
        own = restricted(self.layout, [place])
        weights, shifts, scales = [parameters[place]], parameters[count : 2 * count], parameters[2 * count :]
        return reference.output_statistics(own, weights, shifts, scales, self._given())[0]

    def facts(self) -> Tensor:
        """What besides parameters defines the function: the sizes of what enters, the moments of the data, the form.

        The form is left out where all rows are free, as it was before there was another one.
        """
        sizes = [size for site in self.sites for size in site.form.shape[1:]]
        lanes, centred = self.layout.channels, [site.centred for site in self.sites]
        form = torch.tensor(centred if any(centred) else []).double()
        sizes_told = torch.tensor([len(sizes), *sizes]).double()
        return torch.cat([sizes_told, lanes.constant_mean, lanes.constant_var, form, self.joint.facts(Tokens)])

    def _given(self, known: Vectors | None = None) -> Pair | None:
        """Moments of outputs of layers outside, then what only the walk can tell, then parameters between layers."""
        found = [_output_moments(layer, known) for layer in self.outside]
        if self.walk is not None:
            values = self.walk(known)
            walked = zip(self.given, values, strict=False)
            found += [self.layers[place].entering_moments(x) for place, x in walked]
            fixed = [f.expanded(x.mean) for f, x in zip(self.fixed, values[len(self.given) :], strict=True)]
            refuse_sharded(fixed)
            found += [(value, torch.zeros_like(value)) for value in fixed]
        if not found:
            return None
        mean, var = (torch.cat([pair[k].double() for pair in found]) for k in (0, 1))
        return mean, var

    def __getstate__(self) -> dict[str, Any]:
        return {"intact": self.intact, "joint": self.joint, "sites": self.sites, "layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        """A copy for copied layers; the layout never changes and is shared."""
        made = object.__new__(Network)
        memo[id(self)] = made
        intact = copy.deepcopy(self.intact, memo)  # before anything that leads to the model
        joint, layers = copy.deepcopy(self.joint, memo), copy.deepcopy(self.layers, memo)
        made.__init__(joint, self.sites, layers, intact, Found(self.layout, self.given, self.fixed))  # type: ignore[misc]
        return made


def _output_moments(layer: Any, known: Vectors | None) -> Pair:
    """Mean and variance of a layer's output channels."""
    shift, scale = (known or {}).get(layer) or (layer.shift, layer.scale)
    return shift, scale.double().square()


def make_network(graph: CapturedMode, layers: dict[str, Any], intact: Intact) -> Network | None:
    """The network of all layers that are called once and whose statistics have the form of a layout."""
    sites = [site for path, layer in layers.items() if (site := _site(graph, path, layer)) is not None]
    fitting = (site for site in sites if site.taps() is not None)
    sites = sorted(fitting, key=lambda site: site.shape)  # equal ones side by side
    if not sites:
        return None
    reads = {path: call.args[0] for call, path in graph.calls.items()}
    joint = Statistics(graph, [reads[site.path] for site in sites])
    return Network(joint, sites, [layers[site.path] for site in sites], intact)


def _site(graph: CapturedMode, path: str, layer: Any) -> Site | None:
    calls = [node for node, owner in graph.calls.items() if owner == path]
    if len(calls) != 1 or not layer.center or not is_linear_layer(layer):
        return None
    transposed = bool(getattr(layer, "transposed", False))
    groups = getattr(layer, "groups", 1)
    shape, centred = tuple(layer.weight.shape), bool(layer.centred_rows)
    target = calls[0].args[0]
    return Site(path, Use.of(calls[0]), target.name, target.form, shape, groups, transposed, centred)


def _compiled(number: int, dtype: torch.dtype, given: Pair | None, parameters: list[Tensor]) -> list[Tensor]:
    from .fold.compiled import compiled_fold  # torch.library's operations are only made where somebody compiles

    return compiled_fold(number, dtype, given, parameters)
