"""The normalized layers of a model in one mode: what they are folded from, and the fold as a function of that."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..gaussian.normal import Pair
from ..graph.node import Node
from ..moments import Tokens, full_precision
from .fold import dispatch, reference
from .fold.dispatch import Executor, apply_fold, computing_dtype, needs_reference, register, versions_of
from .fold.layout import sublayout
from .fold.reference import own_saved_tensors
from .layer_layout import LayerCall, LayerSpec, LoweredLayers, Use, evaluation_of, make_layout
from .linear_layers import group_count, is_linear_layer, output_axis, require_weight_of_its_own
from .statistics import CapturedMode, Intact, Statistics, derivation_of, refuse_sharded

Vectors = Mapping[nn.Module, Pair]  # shifts and scales of layers
Versions = list[tuple[Tensor, int]]  # tensors, each with its version
PARAMETERS = ("weight", "shift", "scale")  # of a layer, in the order in which they are folded


class Folded(NamedTuple):
    """The folded weight and bias of every layer, and what they were computed from and in."""

    pairs: list[Pair]
    parameters: list[Tensor]
    versions: list[int]
    dtypes: tuple[torch.dtype, torch.dtype]  # of the parameters, and of the pairs
    inference: bool  # computed in inference mode
    serves_one_backward: bool
    originals: dict[int, Versions]  # by index: what a parametrized weight is computed from
    between: Versions  # parameters and buffers between layers that were read

    def serves(self, layer: Any, index: int, compiling: bool) -> bool:
        """True if it is what would be computed now for a layer, as far as autograd can tell.

        `compiling` is whether its caller is being compiled: Dynamo may compile this function alone as well.
        """
        (weight, _), (parameter_dtype, folded_dtype) = self.pairs[index], self.dtypes
        if folded_dtype != computing_dtype(weight.device.type, parameter_dtype):
            return False
        constant = torch.is_grad_enabled() and not weight.requires_grad
        if constant and any([parameter.requires_grad for parameter in self.parameters]):
            return False
        if compiling:
            return True
        return self.inference == torch.is_inference_mode_enabled() and not self.changed(layer, index)

    def changed(self, layer: Any, index: int) -> bool:
        """True if a layer has other parameters than it was computed from, or they were written to."""
        if not self.versions:  # computed in a graph
            return True
        registered = layer._parameters  # found faster than attributes
        for name in PARAMETERS:
            parameter = self.parameters[index]
            if index in self.originals:  # computed anew at every access, and so never the same tensor
                if not _same(self.originals[index], _originals(layer)):
                    return True
            elif (registered[name] if name in registered else getattr(layer, name)) is not parameter:
                return True
            if not parameter.is_inference() and parameter._version != self.versions[index]:
                return True
            index += len(self.pairs)
        return False


def _originals(layer: Any) -> list[Tensor]:
    """The tensors that the weight of a parametrized layer is computed from; empty if it is not parametrized."""
    if "weight" in layer._parameters or not is_parametrized(layer, "weight"):
        return []
    steps = layer.parametrizations["weight"]
    return [*steps.parameters(), *steps.buffers()]


def _with_versions(tensors: list[Tensor]) -> Versions:
    return list(zip(tensors, versions_of(tensors), strict=True))


def _same(recorded: Versions, tensors: list[Tensor]) -> bool:
    """True if tensors are those that were recorded, and were not written to since, as far as autograd can tell."""
    present = _with_versions(tensors)
    same = (a is b and before == now for (a, before), (b, now) in zip(recorded, present, strict=False))
    return len(recorded) == len(present) and all(same)


class Network:
    """The layers of a model in one mode that are folded together: all of them, or a subnetwork.

    `joint` is the graph between all layers, `specs` say how each is called, `intact` records the model as it was when
    it was normalized, and `lowered` is their layout with its external channels, computed from the graph by default.
    """

    def __init__(
        self,
        joint: Statistics,
        specs: list[LayerSpec],
        layers: list[Any],
        intact: Intact,
        lowered: LoweredLayers | None = None,
    ) -> None:
        self.joint, self.specs, self.layers, self.intact = joint, specs, layers, intact
        self.layout, self.evaluated, self.fixed, self.data = lowered or make_layout(joint, specs)
        # what `evaluated` layers read, and then `fixed`; None if there is neither
        self.evaluation = evaluation_of(joint, specs, self.evaluated, self.fixed)
        self.executor = Executor(self.layout)
        register(self)
        self.outside: list[Any] = []  # the layers of the full network, but not of this one, whose outputs enter here
        # the network of which it is a subnetwork, and the indices of that network's layers here
        self.full, self.index_of = self, {index: index for index in range(len(self.layers))}
        self.latest: Vectors = {}  # as they were in the latest call, where they are sharded between the calls
        self.subnetworks: dict[tuple[int, ...], Network] = {}  # those in use, by the indices of their layers
        self.by_bytes: list[Network] | None = None  # subnetworks of limited size, once needed
        self.reads: dict[int, set[int]] = {}  # the layers that one reads from, by its index, where that was needed
        # the layers whose calls all have inputs of the same moments, which kernels can fold, and the others; empty if
        # there are not both. Made at once: a call may be traced, which reads no numbers
        again = [rows.calls > 1 for rows in self.layout.rows]
        groups = [[n for n, is_again in enumerate(again) if is_again == kind] for kind in (False, True)]
        self.by_calls = [self.subnetwork(group) for group in groups] if all(groups) else []

    def first_weight(self) -> Tensor:
        """The weight that comes first among the parameters."""
        weight: Tensor = self.layers[0].weight
        return weight

    def parameters(self) -> list[Tensor]:
        """All weights, then all shifts, then all scales."""
        if not torch.compiler.is_compiling():  # a module's own dictionary is found faster than its attributes
            registered = [layer._parameters for layer in self.layers]
            parameters = [by_name.get(name) for name in PARAMETERS for by_name in registered]
            if all([parameter is not None for parameter in parameters]):
                return parameters
            for spec, layer in zip(self.specs, self.layers, strict=True):
                require_weight_of_its_own(spec.path, layer)
        return [getattr(layer, name) for name in PARAMETERS for layer in self.layers]

    def fold(self, vectors: Vectors | None = None) -> Folded:
        """The folded weights and biases of all layers, as they follow from the present parameters.

        A backend computes them, in a compiled graph an operation of its own, and where neither can the reference.
        `vectors` are shifts and scales of layers that are sharded now, as they were when those ran. Raises a ValueError
        if the model has changed since it was normalized.
        """
        self.intact.require()
        parameters, compiling = self.parameters(), torch.compiler.is_compiling()
        first, reads_more = parameters[0], self.evaluation is not None or len(self.outside) > 0
        dtype = computing_dtype(first.device.type, first.dtype)
        external = self.external_moments(vectors) if reads_more else None
        folded: Sequence[Tensor]
        if needs_reference(parameters):
            folded = self._by_reference(parameters, external)
        elif compiling:
            from .fold.compiled import compiled_fold  # torch.library's operations are made where somebody compiles

            folded = compiled_fold(self.executor.number, dtype, external, parameters)
        else:
            recordable = external is None and first.device.type in dispatch.RECORDED_ON
            recording = self.executor.recording(dtype, parameters) if recordable else None
            folded = apply_fold(self.executor, dtype, recording, *(external or (None, None)), *parameters)
        count = len(self.layers)
        pairs = list(zip(folded[:count], folded[count:], strict=True))
        once, dtypes = reads_more and folded[0].requires_grad, (first.dtype, dtype)
        if compiling:  # a graph cannot ask for versions
            return Folded(pairs, parameters, [], dtypes, False, once, {}, [])
        originals = {
            index: _with_versions(tensors)
            for index, layer in enumerate(self.layers)
            if "weight" not in layer._parameters and (tensors := _originals(layer))
        }
        between = [] if self.evaluation is None else _with_versions(self.evaluation.tensors_read())
        versions = [-1 if p.is_inference() else p._version for p in parameters]  # no call, in every fold
        inference = torch.is_inference_mode_enabled()
        return Folded(pairs, parameters, versions, dtypes, inference, once, originals, between)

    def changed_between(self, folded: Folded) -> bool:
        """True if parameters or buffers between layers that a fold has read were replaced or written to."""
        return self.evaluation is not None and not _same(folded.between, self.evaluation.tensors_read())

    def fold_one(self, index: int) -> Pair:
        """The folded weight and bias of one layer, by plain operations on no more than it depends on."""
        self.intact.require()
        alone = self.subnetwork([index])
        weight, bias = alone._by_reference(alone.parameters(), alone.external_moments())
        return weight, bias

    def _by_reference(self, parameters: list[Tensor], external: Pair | None) -> list[Tensor]:
        """Folded weights of all layers, then their biases, by plain operations; layers may have dtypes of their own."""
        refuse_sharded(parameters)
        with own_saved_tensors():
            folded = reference.fold_parts(self.layout, external, parameters)
            return [tensor.to(computing_dtype(tensor.device.type, tensor.dtype)) for tensor in folded]

    def require_in_use(self, index: int, called: nn.Module | None) -> None:
        """Raise if what a layer's statistics follow from is not in use: it was copied without that.

        `called` is the module whose call asks for the layer; None if it is called by itself.
        """
        reads = Statistics(self.joint.graph, self.targets([self.specs[index]])).modules_read()
        self.intact.require_in_use(reads, (called, self.layers[index]))

    @torch.no_grad()
    def output_statistics(self, index: int) -> Pair:
        """Mean and standard deviation of a layer's output channels before the normalization, without bias."""
        alone = self.subnetwork([index])
        return reference.output_statistics(alone.layout, alone.external_moments(), alone.parameters())[0]

    @torch.no_grad()
    def entering_means(self) -> list[Tensor]:
        """The predicted mean of every channel that enters a layer, for each layer; the mean over its calls."""
        parameters, count = self.parameters(), len(self.layers)
        shift, scale = (torch.cat([t.detach() for t in parameters[k * count : (k + 1) * count]]) for k in (1, 2))
        with full_precision(shift.device):
            mean, _ = reference.entering(self.layout.channels, shift, scale, self.external_moments())
        sizes = [rows.entering for rows in self.layout.rows]
        pieces = zip(mean.split(sizes), self.layout.rows, strict=True)
        return [piece.view(rows.calls, -1).mean(0) for piece, rows in pieces]

    def subnetwork(self, indices: Sequence[int]) -> Network:
        """The network of some of the layers, by their indices in ascending order; made once."""
        key = tuple(indices)
        if key not in self.subnetworks:
            layout, read, fixed = sublayout(self.layout, indices, self.fixed_sizes())
            evaluated = {n: self.evaluated[index] for n, index in enumerate(indices) if index in self.evaluated}
            lowered = LoweredLayers(layout, evaluated, [self.fixed[n] for n in fixed], self.data)
            specs, layers = ([values[index] for index in indices] for values in (self.specs, self.layers))
            subnetwork = Network(self.joint, specs, layers, self.intact, lowered)
            subnetwork.outside = [self.layers[index] for index in read]
            subnetwork.full, subnetwork.index_of = self, {index: n for n, index in enumerate(indices)}
            self.subnetworks[key] = subnetwork
        return self.subnetworks[key]

    def targets(self, specs: Iterable[LayerSpec]) -> list[Node]:
        """The nodes that some layers read, call after call."""
        nodes = self.joint.nodes_by_name()
        return [nodes[call.target] for spec in specs for call in spec.calls]

    def fixed_sizes(self) -> list[int]:
        """How many channels each value between layers has that is not random."""
        return [math.prod(value.channels) for value in self.fixed]

    def facts(self, index: int) -> Tensor:
        """The numbers besides parameters that define the function of a layer, for checkpoints.

        The first layer that is called once has those of all such layers, the others none: sizes of inputs, moments of
        the data, and the form unless it is the paper's. A layer that is called several times has its `alone_facts`.
        """
        spec = self.specs[index]
        if spec.times > 1:
            return self.joint.alone_facts(spec.centred, self.targets([spec]))
        if index:
            return torch.empty(0)
        specs = [spec for spec in self.specs if spec.times == 1]
        sizes = [size for spec in specs for size in spec.calls[0].info.shape[1:]]
        centred, read = [spec.centred for spec in specs], self.targets(specs)
        form = torch.tensor(centred if any(centred) or self.joint.averages_like_positions(read) else []).double()
        counted_sizes = torch.tensor([len(sizes), *sizes]).double()
        tokens = self.joint.facts(read, Tokens)
        return torch.cat([counted_sizes, *self.data, form, tokens])

    def external_moments(self, vectors: Vectors | None = None) -> Pair | None:
        """Mean and variance of the layout's external channels; None if it has none.

        First come outputs of layers outside, then what only the engine can evaluate, then parameters between layers.
        `vectors` are shifts and scales of layers that are sharded now, as they were when those ran.
        """
        pairs: list[Pair] = []
        with own_saved_tensors():
            for layer in self.outside:
                shift, scale = (vectors or {}).get(layer) or (layer.shift, layer.scale)
                pairs.append((shift, scale.double().square()))
            if self.evaluation is not None:
                values = self.evaluation(vectors)
                readers = [self.layers[index] for index in self.evaluated for _ in self.specs[index].calls]
                pairs += [layer.entering_moments(x) for layer, x in zip(readers, values, strict=False)]
                fixed = [f.expanded(x.mean) for f, x in zip(self.fixed, values[len(readers) :], strict=True)]
                refuse_sharded(fixed)
                pairs += [(value, torch.zeros_like(value)) for value in fixed]
            if not pairs:
                return None
            mean, var = (torch.cat([pair[k].double() for pair in pairs]) for k in (0, 1))
            return mean, var

    def __getstate__(self) -> dict[str, Any]:
        return {"intact": self.intact, "joint": self.joint, "specs": self.specs, "layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        """A copy for copied layers; the layout never changes and is shared."""
        copied = object.__new__(Network)
        memo[id(self)] = copied
        intact = copy.deepcopy(self.intact, memo)  # before anything that leads to the model
        joint, layers = copy.deepcopy(self.joint, memo), copy.deepcopy(self.layers, memo)
        lowered = LoweredLayers(self.layout, self.evaluated, self.fixed, self.data)
        copied.__init__(joint, self.specs, layers, intact, lowered)  # type: ignore[misc]
        return copied


def make_network(graph: CapturedMode, layers: dict[str, Any], intact: Intact) -> Network | None:
    """The network of all linear layers whose statistics have the form of a layout."""
    specs = [spec for path, layer in layers.items() if (spec := _spec(graph, path, layer)) is not None]
    fitting = (spec for spec in specs if spec.taps() is not None)
    # equal shapes side by side; those that are called several times come last
    specs = sorted(fitting, key=lambda spec: (spec.times > 1, spec.shape))
    if not specs:
        return None
    nodes = {call.args[0].name: call.args[0] for call in graph.calls}
    joint = Statistics(graph, [nodes[call.target] for spec in specs for call in spec.calls])
    return Network(joint, specs, [layers[spec.path] for spec in specs], intact)


def _spec(graph: CapturedMode, path: str, layer: Any) -> LayerSpec | None:
    """How a layer is called; None if it is not called, or is none that a network can hold."""
    nodes = [node for node, owner in graph.calls.items() if owner == path]
    if not nodes or not layer.center or not is_linear_layer(layer):
        return None
    alike: dict[Any, list[Node]] = {}  # calls whose inputs have equal moments
    for node in nodes:
        alike.setdefault((derivation_of(node.args[0], graph), Use.of(node)) if len(nodes) > 1 else 0, []).append(node)
    calls = []
    for first, *more in alike.values():
        target = first.args[0]
        calls.append(LayerCall(Use.of(first), target.name, target.info, (1 + len(more)) / len(nodes)))
    shape, transposed, centred = tuple(layer.weight.shape), output_axis(layer) == 1, bool(layer.centred_rows)
    return LayerSpec(path, tuple(calls), len(nodes), shape, group_count(layer), transposed, centred)
