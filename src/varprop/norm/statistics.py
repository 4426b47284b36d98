"""Mean and variance of what enters a normalized layer, from parameters alone.

Between normalized layers the statistics decouple: what enters a layer depends on the scale and shift of the layers it
reads from and on the operations between, and on no data (paper, section 2.1).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..engine.evaluation import Evaluation, in_dtype
from ..engine.plan import make_plan, require_complete
from ..gaussian.shortcuts import by_formulas
from ..graph import ops
from ..graph.node import Node, resolve
from ..graph.program import Program, tensor_at
from ..moments import Moments, Tokens, full_precision, trusted
from .batchnorm import absorbing_layers
from .linear_layers import is_linear_layer, nodes_before


@dataclass(frozen=True)
class CapturedMode:
    """A model in one mode, or a subgraph of it: the program, calls of normalized layers, and moments of inputs."""

    program: Program
    calls: dict[Node, str]  # with the path of the layer
    inputs: dict[Node, Any]

    @property
    def random_inputs(self) -> list[Node]:
        """The inputs that are known by moments; the others are the same for all data."""
        return [node for node, value in self.inputs.items() if not isinstance(value, Tensor)]


class Statistics:
    """The operations between earlier layers and some nodes, the targets, and how to run them on moments.

    Targets are what a layer reads in each of its calls. Those with equal labels that follow by the same operations from
    the same layers are computed once; without labels each is computed for itself. Layers and parameters are looked up
    in the captured model at every use. `intact`, for a layer by itself, is the model as it was when it was normalized.
    """

    def __init__(
        self,
        graph: CapturedMode,
        targets: list[Node],
        labels: Sequence[Any] | None = None,
        intact: Intact | None = None,
    ) -> None:
        self.intact = intact  # first, for copies: it has to see whether the model is copied, to which the graph leads
        keys: list[Any] = list(range(len(targets)))
        if labels is not None:
            keys = [(derivation_of(target, graph), label) for target, label in zip(targets, labels, strict=True)]
        number_of: dict[Any, int] = {}
        # for every target that was asked for, its index among those that are computed
        self.numbers = [number_of.setdefault(key, len(number_of)) for key in keys]
        distinct = [targets[self.numbers.index(number)] for number in range(len(number_of))]
        # the subgraph from earlier layers to the targets, as nodes that refer to no others
        self.graph, self.targets = _leading_to(distinct, graph)
        self._plan()

    def _plan(self) -> None:
        self.plan = make_plan(self.graph.program, [*self.graph.calls, *self.graph.random_inputs])
        require_complete(self.plan, "let vp.normalize leave out the layers behind them with `only`")

    def layers_before(self, targets: list[Node]) -> set[str]:
        """The paths of the layers that targets follow from directly."""
        calls = self.graph.calls
        return {calls[node] for node in nodes_before(targets, calls) if node in calls}

    def __call__(self, vectors: Mapping[nn.Module, Any] | None = None) -> list[Moments]:
        """The moments of every target, as they follow from the present parameters.

        `vectors` are shifts and scales of earlier layers that are sharded now, as they were when those ran.
        """
        vectors = vectors or {}
        with trusted(), by_formulas(), full_precision(next(self.graph.program.model.parameters()).device):
            sources = {node: _module(self.graph.program.model, path) for node, path in self.graph.calls.items()}
            env = self.input_values()
            refuse_sharded([env[node] for node in self.graph.program.state])
            for node, source in sources.items():
                env[node] = source.output_moments(node.info, vectors.get(source))
            follows_model = [*sources, *self.graph.program.state]  # as the moments of the data do not, when it is cast
            dtype = _widest([env[node] for node in follows_model or self.graph.inputs])
            env = {node: in_dtype(value, dtype) for node, value in env.items()}
            evaluation = Evaluation(self.plan, env, annotate=False, dtype=dtype)
            evaluation.run()
            values = [evaluation.value(target) for target in self.targets]
            moments = [x if isinstance(x, Moments) else Moments(x, torch.zeros_like(x)) for x in values]
        return [moments[number] for number in self.numbers]

    def require_intact(self, layer: nn.Module, called: nn.Module | None) -> None:
        """Raise if the model has become another one, or the layer is a copy without what it reads from.

        `called` is the module whose call asks for the layer's statistics; None if the layer is called by itself.
        """
        if self.intact is not None:
            self.intact.require()
            self.intact.require_in_use(self.modules_read() if self.intact.apart else (), (called, layer))

    def tensors_read(self) -> list[Tensor]:
        """The parameters and buffers that the moments follow from: of earlier layers, and between them."""
        model = self.graph.program.model
        layers = [_module(model, path) for path in dict.fromkeys(self.graph.calls.values())]
        of_layers = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        return [*of_layers, *(tensor_at(model, name) for name in self.graph.program.state.values())]

    def inputs_of(self, targets: list[Node]) -> dict[Node, Any]:
        """The model's inputs, with their moments, that some nodes follow from."""
        needed = nodes_before(targets, self.graph.calls)
        return {node: value for node, value in self.graph.inputs.items() if node in needed}

    def facts(self, targets: list[Node], *kinds: type) -> Tensor:
        """The moments or probabilities of the model's inputs of some kinds (Moments, Tokens) that nodes follow from."""
        inputs: list[Any] = [value for value in self.inputs_of(targets).values() if isinstance(value, kinds)]
        tensors = [(x.mean, x.var) if isinstance(x, Moments) else (x.probabilities,) for x in inputs]
        flat = [tensor.detach().cpu().double().flatten() for pair in tensors for tensor in pair]
        return torch.cat([torch.zeros(0).double(), *flat])

    def averages_like_positions(self, targets: list[Node]) -> bool:
        """True if a global average that counts as one of its positions is between layers and some nodes."""
        return any(node.target is ops.position_average for node in nodes_before(targets, self.graph.calls))

    def alone_facts(self, centred: bool, targets: list[Node]) -> Tensor:
        """The numbers besides parameters that define the function of one layer: its form, and moments of inputs.

        There are none where the form is the paper's and no input is read.
        """
        form = 1.0 if centred else 0.5 * self.averages_like_positions(targets)
        inputs = self.facts(targets, Moments, Tokens)
        return torch.cat([torch.tensor([form]).double(), inputs]) if form or len(inputs) else torch.empty(0)

    def modules_read(self) -> set[str]:
        """The paths of the modules whose parameters and buffers the moments follow from."""
        return {*self.graph.calls.values(), *(name.rpartition(".")[0] for name in self.graph.program.state.values())}

    def input_values(self) -> dict[Node, Any]:
        """The present values of parameters, buffers and constants, and the moments of the model's inputs."""
        program = self.graph.program
        device = next(program.model.parameters()).device
        fixed = program.constants | self.graph.inputs
        return program.tensors() | {node: _to(value, device) for node, value in fixed.items()}

    def nodes_by_name(self) -> dict[str, Node]:
        """All nodes: calls of earlier layers, inputs, parameters, constants and operations."""
        program = self.graph.program
        nodes = (*self.graph.calls, *self.graph.inputs, *program.state, *program.constants, *program.nodes)
        return {node.name: node for node in nodes}

    def key(self) -> str:
        """Equal for those that compute the same from the same shapes; no input of the model may be random."""
        nodes = self.graph.program.nodes
        names = {node: f"%{number}" for number, node in enumerate((*self.graph.calls, *nodes))}
        operations = [
            (id(node.target), resolve((node.args, node.kwargs), lambda operand: names.get(operand, "")), node.info)
            for node in nodes
        ]
        return repr((operations, [value.flatten().tolist() for value in self.input_values().values()]))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "plan"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._plan()


def derivation_of(target: Node, graph: CapturedMode) -> str:
    """How a node follows from earlier layers, equal for nodes that have equal moments.

    Each call of a layer has the same mean and variance. Which of its calls two values share still counts, for it
    decides whether they are independent: so calls are numbered like all other nodes.
    """
    program, needed = graph.program, nodes_before([target], graph.calls)
    numbers: dict[Node, str] = {}
    lines: list[Any] = []
    for node in program.nodes:
        if node in needed:
            if node in graph.calls:
                lines.append((graph.calls[node], node.info))
            else:
                arguments = resolve((node.args, node.kwargs), lambda read: f"%{numbers.get(read, read.name)}")
                lines.append((str(node.target), id(node.target), arguments, node.info))
            numbers[node] = str(len(numbers))
    return repr((lines, numbers.get(target, target.name)))


def _leading_to(targets: list[Node], graph: CapturedMode) -> tuple[CapturedMode, list[Node]]:
    """The subgraph between calls of layers and some nodes, and these nodes, all as copies."""
    program, between = graph.program, nodes_before(targets, graph.calls)
    leaves = (*graph.calls, *graph.inputs, *program.state, *program.constants)
    copied = {node: Node(node.name, info=node.info) for node in leaves if node in between}
    computed = [node for node in program.nodes if node in between and node not in copied]
    for node in computed:
        args, kwargs = resolve((node.args, node.kwargs), copied.__getitem__)
        copied[node] = Node(node.name, node.target, args, kwargs, node.info, node.stack, node.line)
    calls, inputs, state, constants = (
        {copied[node]: value for node, value in values.items() if node in between}
        for values in (graph.calls, graph.inputs, program.state, program.constants)
    )
    cut = Program(program.model, [copied[node] for node in computed], [], state, constants, [], None)
    return CapturedMode(cut, calls, inputs), [copied[node] for node in targets]


def _module(root: nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), root) if path else root


def _widest(values: Iterable[Any]) -> torch.dtype:
    """The dtype that holds moments and parameters of several, of 32 bits or more: a linear map takes but one."""
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    floating = (each.dtype for each in flat if isinstance(each, (Moments, Tensor)) and each.dtype.is_floating_point)
    return functools.reduce(torch.promote_types, floating, torch.float32)


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Moments):
        return Moments(value.mean.to(device), value.var.to(device), value.full)
    if isinstance(value, Tokens):
        return Tokens(value.probabilities.to(device), value.full)
    return value.to(device) if isinstance(value, Tensor) else value


REPLACED = (
    "Module '{}' was replaced after vp.normalize, which does not know the new one: take vp.fold(model) first, change "
    "that, and normalize again."
)
WRAPPED = (
    "Module '{}' is in a FullyShardedDataParallel of its own, which frees parameters that other modules read: put the "
    "whole model into one, or use torch.distributed.fsdp.fully_shard on the model and its blocks."
)
CHANGED = (
    "'{}' of module '{}' was {!r} when the model was normalized and is {!r} now, which its statistics do not know: "
    "set it back, take vp.fold(model), change that, and normalize again."
)
APART = (
    "This is a copy of modules of a normalized model without '{}', from which their statistics follow: copy the whole "
    "model and call these modules of the copy, or copy modules of vp.fold(model), which need no others."
)
SHARDED = (
    "Some parameters of the normalized model are sharded while a part of it runs that depends on them: call "
    "fully_shard on the whole model and, within it, on blocks that hold their own norms and whose layers are called on "
    "nothing that a later block computes, and call no block by itself; or train with DistributedDataParallel; and call "
    "parallelize_module on the plain model that vp.fold returns, not on the normalized one."
)
PLAIN = (bool, int, float, str, tuple, type(None))


class Link(NamedTuple):
    """A child module as it was recorded: `parent._modules[name]` has to be `child` still."""

    parent: nn.Module
    name: str
    child: nn.Module


class RecordedSetting(NamedTuple):
    """An attribute of a module as it was recorded: `getattr(module, name)` has to be `value` still."""

    module: nn.Module
    path: str
    name: str
    value: Any


class Intact:
    """A model as it is when it is normalized; copies and pickles of the model have a record of themselves.

    It records the normalized layers and the modules between them, at the paths given. `apart` is True for a copy of
    some modules alone, made without the model: it then holds a copy of all of the model, which nothing else refers to
    and which does not follow the model.
    """

    def __init__(self, root: nn.Module, paths: Iterable[str]) -> None:
        links: dict[tuple[int, str], Link] = {}
        self.root, self.apart = root, False
        self.settings: list[RecordedSetting] = []
        for path in sorted(paths):
            links_to_module = list(_links_to(root, path))
            links |= {(id(link.parent), link.name): link for link in links_to_module}
            module = links_to_module[-1].child if links_to_module else root
            self.settings += [RecordedSetting(module, path, name, value) for name, value in _settings(module).items()]
        self.links = list(links.values())
        self._in_use: set[str] = set()  # where it is apart: the paths of modules that were copied or called

    def __deepcopy__(self, memo: dict[int, Any]) -> Intact:
        copied = object.__new__(Intact)
        memo[id(self)] = copied
        copied.apart = id(self.root) not in memo  # which has the model first, where that is copied
        copied._in_use = _copied_before(self.root, memo) if copied.apart else set()
        copied.root, copied.links, copied.settings = copy.deepcopy((self.root, self.links, self.settings), memo)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "links": self.links, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A pickle of the model comes to its modules, and so to this, before the model's own attributes are set.
        self.apart, self._in_use = "_modules" in vars(self.root), set()

    def require(self) -> None:
        """Raise a ValueError that says what has changed, if the model has become another one."""
        if complaint := self._complaint():
            raise ValueError(complaint)
        # For Dynamo to read and to guard: a number of a module of which it has seen two values is a variable to it.
        if torch.compiler.is_compiling() and not all(
            [vars(module)[name] == value for module, _, name, value in self.settings if isinstance(value, float)]
        ):
            raise ValueError(self._complaint())

    def _complaint(self) -> str:
        """A sentence on the first change of the model; empty if there is none.

        Compiled graphs ask when they are made: they are made anew if modules change.
        """
        for parent, name, child in self.links:
            module = parent._modules.get(name)
            if module is not child and _unwrapped(module) is not child:
                wrapped = type(module).__name__ == "FullyShardedDataParallel"  # whose import would take a second
                return (WRAPPED if wrapped else REPLACED).format(name)
        for module, path, name, value in self.settings:
            if module.__dict__.get(name) != value:
                return CHANGED.format(name, path, value, module.__dict__.get(name))
        return ""

    # as torch.compiler.assume_constant_result would mark it, but for its import of Dynamo
    _complaint._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def require_in_use(self, paths: Iterable[str], called: Iterable[nn.Module | None]) -> None:
        """Raise if some modules that a layer's statistics follow from are not in use, but a copy that nobody knows.

        Modules that are `called` now are in use with all that they hold.
        """
        if not self.apart:
            return
        if not torch.compiler.is_compiling():
            present = [module for module in called if module is not None]
            self._in_use |= {path for path, module in self.root.named_modules() if any(module is m for m in present)}
        for path in paths:
            if not any(path == used or not used or path.startswith(used + ".") for used in self._in_use):
                raise ValueError(APART.format(path))


def _copied_before(root: nn.Module, memo: dict[int, Any]) -> set[str]:
    """The paths of modules that a deepcopy has come to so far.

    A layer that it came to by the note of a batch norm, which the layer has absorbed, is not among them: the user has
    copied the batch norm's module and not the layer.
    """
    reached = {key: n for n, key in enumerate(memo)}
    by_note = {
        id(layer)
        for module, layer in absorbing_layers(root)
        if id(module) in reached and reached[id(module)] < reached.get(id(layer), 0)
    }
    named = root.named_modules(remove_duplicate=False)
    return {path for path, module in named if id(module) in reached and id(module) not in by_note}


def is_sharded(parameter: Tensor) -> bool:
    """True for a tensor of `torch.distributed.tensor`, of which every process holds a piece."""
    return hasattr(parameter, "full_tensor")


def refuse_sharded(parameters: Sequence[Tensor]) -> None:
    """Raise a RuntimeError where plain tensors are needed and some are sharded."""
    if any(is_sharded(parameter) for parameter in parameters):
        raise RuntimeError(SHARDED)


def _settings(module: nn.Module) -> dict[str, Any]:
    """The constants of a module, as torch lists them, but for `inplace`.

    Batch norms are left out: those that stay normalize by data, the others are gone. So are linear layers, whose
    borders may be made to count otherwise than they are computed.
    """
    left_out = isinstance(module, _NormBase) or is_linear_layer(module)
    listed = () if left_out else getattr(module, "__constants__", ())
    values = {name: vars(module)[name] for name in listed if name != "inplace" and name in vars(module)}
    return {name: value for name, value in values.items() if isinstance(value, PLAIN)}


def _links_to(root: nn.Module, path: str) -> Iterator[Link]:
    """The links from a model to one of its modules, as far as the path exists."""
    module = root
    for name in path.split(".") if path else ():
        if isinstance(module, torch.jit.ScriptModule):  # inside, no module can be exchanged
            return
        child = _unwrapped(module._modules.get(name))
        if child is None:
            return
        yield Link(module, name, child)
        module = child


def _unwrapped(module: nn.Module | None) -> nn.Module | None:
    """The module inside wrappers of torch.compile and of gradient checkpoints, which compute the same."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if module is not None and not isinstance(module, torch.jit.ScriptModule):
            module = module._modules.get(name, module)
    return module
