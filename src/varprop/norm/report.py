"""The report on a normalized model: what was done to it and how it is folded; and the warnings of `normalize`."""

from __future__ import annotations

import graphlib
import textwrap
import warnings
from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..graph.node import Node
from ..graph.program import Program, tensor_at
from ..graph.tracing import Leaf
from .batchnorm import find_notes, is_batch_norm
from .checks import linear_by_look, listed, listed_paths, looks_linear
from .layers import Normalized, normalized_layers
from .linear_layers import is_call_of_linear_layer, owners
from .network import Network
from .recurrent import NormalizedRecurrent
from .statistics import Statistics

NormalizationForm = Literal["paper", "deep"]
SHALLOW = 8  # layers in a row; errors of scale do not pile up in so few


class PlainWarning(UserWarning):
    """Modules that one could expect to be normalized stay as they are.

    Example:
        >>> import warnings
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4))
        >>> [warning.message.args[0] for warning in caught if warning.category is vp.PlainWarning]
        ["Batch norms that do not directly follow a linear layer, ...: '2'."]
    """


@dataclass(frozen=True)
class FoldedLayer:
    """A layer, and how it is folded.

    Attributes:
        path: Of the layer.
        how: ``"together"`` with all others, from functions of single channels; ``"by operation"``, together with the
            others but with moments that are computed operation by operation in every call; ``"alone"``, by itself.
        why: The reason, where it is not together; empty else.
        centred: True if the means of its weight rows are subtracted first (the deep form).
    """

    path: str
    how: str
    why: str = ""
    centred: bool = False


WAYS = ("together", "by operation", "alone")


@dataclass(frozen=True)
class FoldReport:
    """The layers that `normalize` has changed, and how they are folded in one mode; it prints as ten lines or fewer.

    Attributes:
        layers: The normalized layers.
        batch_norms: How many batch norms they have replaced.
        in_a_row: The most layers on a path through the model; 0 where that is not defined, since layers are called
            several times in turns.
        staying: How many modules stay as they are, by class and reason.
        like_positions: True if there is a global average before a layer, and it counts as one of its positions.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> report = vp.fold_report(vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4)))
        >>> report.form, report.batch_norms, report.in_a_row
        ('paper', 1, 2)
    """

    layers: tuple[FoldedLayer, ...]
    batch_norms: int = 0
    in_a_row: int = 0
    staying: Mapping[tuple[str, str], int] = field(default_factory=dict)
    like_positions: bool = False

    @property
    def form(self) -> NormalizationForm:
        """``"deep"`` if weights count without their mean, else ``"paper"``.

        Example:
            >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> model = vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4), form="deep")
            >>> vp.fold_report(model).form
            'deep'
        """
        return "deep" if any(layer.centred for layer in self.layers) else "paper"

    def table(self) -> str:
        """One line a layer with how it is folded and why, and their numbers.

        Returns:
            Lines of text.

        Example:
            >>> plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> print(vp.fold_report(vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4))).table())
            0  together
            2  together
            2 together, 0 by operation, 0 alone
        """
        width = max((len(layer.path) for layer in self.layers), default=0)
        lines = [f"{layer.path:<{width}}  {layer.how:<12}  {layer.why}".rstrip() for layer in self.layers]
        return "\n".join([*lines, self._counts()])

    def _counts(self) -> str:
        counts = [f"{sum(layer.how == how for layer in self.layers)} {how}" for how in WAYS]
        centred = sum(layer.centred for layer in self.layers)
        counts += [f"{centred} with centred rows"] if centred else []
        return ", ".join(counts)

    def __str__(self) -> str:
        norms = f"; {_counted(self.batch_norms, 'batch norm')} replaced, which vp.fold puts back"
        slow = [f"'{layer.path}' ({layer.why})" for layer in self.layers if layer.how != "together"]
        lines = [
            f"normalized: {_counted(len(self.layers), 'layer')}{norms * bool(self.batch_norms)}",
            f"form:       {self.form}, {self._why_this_form()}"
            + "; a global average counts as one position" * self.like_positions,
        ]
        lines += [f"stays:      {count} {name}: {reason}" for (name, reason), count in self.staying.items()]
        first = f"; slower: {slow[0]}{' and others, see table()' * (len(slow) > 1)}" if slow else ""
        lines += [f"folded:     {self._counts()}{first}"]
        lines += [
            "optimizer:  make it now, from model.parameters(): one made before vp.normalize trains nothing, or with "
            "inplace=True all but scales and shifts",
            "rate:       start with that of batch norm (SGD with momentum 0.2 x batch size / 256, AdamW 5e-4 in a "
            "transformer), or vp.find_lr",
            f"clipping:   {CLIPPING[self.form]}",
            "afterwards: vp.fold(model) is a plain model that computes the same",
        ]
        return "\n".join(lines)

    def _why_this_form(self) -> str:
        deep, shallow = self.form == "deep", self.in_a_row <= SHALLOW
        row = f"{_counted(self.in_a_row, 'layer')} in a row" if self.in_a_row else "layers called in turns"
        if deep and not shallow:
            return f"weights without their mean: {row}, and activations that let errors of scale grow"
        if deep:
            return f'weights without their mean, as form="deep" asked for ({row})'
        if self.in_a_row and shallow:
            return f"weights as they are: {row}, and errors of scale do not pile up in {SHALLOW} or fewer"
        return f'weights as they are: {row}; asked for, init="preserve", or activations that damp errors of scale'


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


CLIPPING = {
    "deep": "the norm of the gradient at 2 sqrt(256 / batch size), for a transformer at 1",
    "paper": "none, or the norm of the gradient at 2 sqrt(256 / batch size) if the loss jumps; for a transformer at 1",
}


def fold_report(model: nn.Module) -> FoldReport:
    """Say what `normalize` has done to a model, what to train it with, and how its layers are folded at every call.

    Args:
        model: A normalized model, in the mode that is asked about.

    Returns:
        The report; printed, ten lines or fewer. Its `table` has a line for every layer.

    Raises:
        ValueError: If the model is not normalized.

    Example:
        >>> plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        >>> print(vp.fold_report(vp.normalize(plain, vp.Moments(0.0, 1.0), example=(1, 4))))
        normalized: 2 layers; 1 batch norm replaced, which vp.fold puts back
        form:       paper, weights as they are: 2 layers in a row, and errors of scale do not pile up in 8 or fewer
        folded:     2 together, 0 by operation, 0 alone
        ...
    """
    layers = normalized_layers(model)
    if not layers:
        raise ValueError("The model is not normalized: there is nothing to report.")
    rows = (FoldedLayer(path, *_way_of(layer), layer.centred_rows) for path, layer in layers.items())
    replaced = len(find_notes(model, layers))  # type: ignore[arg-type]
    graphs = {_graph_before(layer)[0] for layer in layers.values()}
    like_positions = any(graph.averages_like_positions(graph.targets) for graph in graphs)
    return FoldReport(tuple(rows), replaced, _in_a_row(layers), _staying(model), like_positions)


def _network_of(layer: Normalized) -> tuple[Network | None, int]:
    """The network that folds a layer in its present mode, and its index there; None if it is folded alone."""
    return layer.networks.get(layer.training, (None, 0))


def _way_of(layer: Normalized) -> tuple[str, str]:
    """How a layer is folded, and why if not together with others."""
    network, index = _network_of(layer)
    if network is not None:
        blocker = network.evaluated.get(index)
        return ("together", "") if blocker is None else ("by operation", f"after {blocker}")
    if isinstance(layer, NormalizedRecurrent):
        return "alone", "recurrent layers have statistics of their own"
    calls = len(layer.uses[layer.training])
    return "alone", f"called {calls} times" if calls != 1 else "statistics of another form"


def _graph_before(layer: Normalized) -> tuple[Statistics, list[Node]]:
    """The graph between layers that leads to a layer, and the nodes in it that the layer reads."""
    network, index = _network_of(layer)
    if network is None:
        statistics = layer.statistics[layer.training]
        return statistics, statistics.targets
    return network.joint, network.targets([network.specs[index]])


def _in_a_row(layers: dict[str, Normalized]) -> int:
    """The most layers on a path through the model; 0 if some are called in turns."""
    before: dict[str, set[str]] = {}
    for path, layer in layers.items():
        statistics, targets = _graph_before(layer)
        before[path] = statistics.layers_before(targets)
    depths: dict[str, int] = {}
    try:
        for path in graphlib.TopologicalSorter(before).static_order():
            depths[path] = 1 + max((depths[earlier] for earlier in before.get(path, ())), default=0)
    except graphlib.CycleError:
        return 0
    return max(depths.values())


def _staying(model: nn.Module) -> dict[tuple[str, str], int]:
    """How many modules stay as they are that one could expect to change, by class and reason."""
    staying: Counter[tuple[str, str]] = Counter()
    within = {m for module in model.modules() if isinstance(module, nn.MultiheadAttention) for m in module.children()}
    for module in model.modules():
        if isinstance(module, Normalized) or module in within:
            continue
        if is_batch_norm(module):
            reason = (
                "follows no plain linear layer, is not reached, or something else reads its parameters; it depends on "
                "the batch"
            )
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
            reason = "normalizes every sample by itself, so it does not depend on the batch"
        elif isinstance(module, nn.MultiheadAttention):
            reason = "its projections are arguments of one function of torch, not layers"
        elif looks_linear(module):
            reason = (
                "left out with only=, more than x W' + b, with computed weights, not reached, or its input never varies"
            )
        else:
            continue
        staying[type(module).__name__, reason] += 1
    return dict(staying)


def _warn(text: str) -> None:
    warnings.warn(text, PlainWarning, stacklevel=4)  # where the user called `normalize`


def warn_of_constants(paths: Collection[str]) -> None:
    """Warn of layers that stay because their inputs are the same for all data."""
    if paths:
        _warn(
            f"What these layers read is the same for all data, so they stay as they are: "
            f"{listed_paths(sorted(paths))}. Where it does vary, give its moments in place of a "
            f"constant."
        )


def warn_of_computed(paths: Collection[str]) -> None:
    """Warn of layers that stay because they are called with weights or biases that are not their parameters."""
    if paths:
        _warn(
            f"These layers compute with weights or biases that are no parameters of theirs (buffers, or what a "
            f"hypernetwork, a property or torch.func.functional_call gives them), so they stay as they are: "
            f"{listed_paths(sorted(paths))}."
        )


def warn_of_frozen(plain: nn.Module, normalized: nn.Module) -> None:
    """Warn if nothing trains in the normalized model though something did in the plain one."""
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    if trained and not any(parameter.requires_grad for parameter in normalized.parameters()):
        _warn(
            f"Nothing trains in the normalized model: what did is absorbed ({listed_paths(trained)}), and "
            f"scales and shifts are frozen like the weights of their layers. Call requires_grad_() on those that are "
            f"to train."
        )


def warn_of_unreached(programs: Collection[Program]) -> frozenset[str]:
    """Warn of batch norms and modules with a weight matrix that the example does not reach, and return their paths."""
    read: set[Any] = set()
    for program in programs:
        read.update(tensor_at(program.model, name) for node, name in program.state.items() if node.users)
        for node in program.nodes:
            if isinstance(node.target, Leaf):
                read.update(node.target.module.parameters())
    unreached = []
    for path, module in next(iter(programs)).model.named_modules():
        expected = is_batch_norm(module) or looks_linear(module)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if expected and not isinstance(module, torch.jit.ScriptModule) and tensors and read.isdisjoint(tensors):
            unreached.append(path)
    if unreached:
        _warn(
            f"The example does not reach these, which stay as they are: {listed_paths(unreached)}. "
            f"Where another call does, the statistics do not know it, and a batch norm that is absorbed on the way of "
            f"the example counts there, too: normalize on the way that is used."
        )
    return frozenset(unreached)


def warn_of_plain(model: nn.Module, except_paths: Container[str]) -> None:
    """Warn of modules that stay as they are though one could expect them to change, except those at some paths."""
    modules = model.named_modules()
    named = [(path, m) for path, m in modules if not isinstance(m, Normalized) and path not in except_paths]
    norms = [path for path, m in named if is_batch_norm(m)]
    layers = linear_by_look(model, except_paths)
    if norms:
        _warn(
            f"Batch norms that do not directly follow a linear layer, that follow one whose weight is parametrized, or "
            f"whose parameters something else reads, stay, and with them the dependence on the batch: "
            f"{listed_paths(norms)}."
        )
    if layers:
        _warn(f"These layers stay as they are: {listed(layers)}.")


def warn_of_fold(model: nn.Module) -> None:
    """Warn of layers to which `fold` will give a bias, or whose weights it will untie from others."""
    layers, held = normalized_layers(model), owners(model)
    notes = find_notes(model, layers)  # type: ignore[arg-type]
    gained = [path for path, layer in layers.items() if path not in notes and not layer.had_bias]
    weights = {path: layer._parameters.get("weight") for path, layer in layers.items()}  # not of recurrent layers
    untied = [path for path, weight in weights.items() if weight is not None and len(held[weight]) > 1]
    changes = [f"give a bias to {listed_paths(gained)}"] * bool(gained)
    changes += [f"untie the weights of {listed_paths(untied)}"] * bool(untied)
    taken = ["does not take these biases if it is strict"] * bool(gained)
    taken += ["ties these weights again, so that all have the values of one, without a word"] * bool(untied)
    if changes:
        warnings.warn(
            f"vp.fold will in general {' and '.join(changes)}: load_state_dict of what it returns into the plain class "
            f"{' and '.join(taken)}.",
            stacklevel=3,
        )


# Milliseconds of a CPU core, forward and backward: any evaluation by the engine, each operation of it, a function that
# it integrates, one step of a fold of all layers, one operation of a plain model; the operations on numbers that a
# device does in one. Within a factor of two of what was measured.
EVALUATION, OPERATION, INTEGRAL, STEP, PLAIN, RATES = 3.0, 1.0, 8.0, 0.35, 0.04, {"cpu": 3e7, "cuda": 1e10}
SLOW = 1.5  # times a plain step
MANY = 20  # steps of a fold from which they are counted
BATCH = 32  # which a step is taken to have at least, whatever the example


def warn_of_time(model: nn.Module, program: Program) -> None:
    """Warn if a step of the normalized model is expected to take much longer than one of the plain model."""
    evaluations, integrated, (steps, repeated) = _evaluations(model), _integrated(model), _repeated(model)
    nodes = [(e.plan, node) for e in evaluations for node in e.graph.program.nodes if e.plan.random(node)]
    operations = sum(plan.rules[node].work if node in plan.rules else 1 for plan, node in nodes)
    operations += sum(len(e.targets) for e in evaluations)
    extra, plain = OPERATION * operations + INTEGRAL * len(integrated) + STEP * steps, _plain_step(program)
    extra += EVALUATION if evaluations else 0.0
    if plain + extra <= SLOW * plain:
        return
    reasons = []
    if evaluations:
        reports = [layer for layer in fold_report(model).layers if layer.how != "together"]
        named = [f"'{layer.path}' ({layer.why})" for layer in reports]
        reasons.append(
            f"The statistics of {len(named)} of the {len(normalized_layers(model))} layers are computed operation by "
            f"operation in every call: {listed(named)}."
        )
    if integrated:
        reasons.append(
            f"Functions before layers that have no closed form are integrated in every call: "
            f"{listed(list(dict.fromkeys(integrated)))}."
        )
    if repeated:
        reasons.append(
            f"Layers are called several times, and the statistics of what enters each call follow one after the other, "
            f"in {steps} steps: {listed(repeated)}."
        )
    warnings.warn(
        f"{' '.join(reasons)} That adds about {extra:.0f} ms to a step on a CPU, so that it takes above {SLOW} times "
        f"as long unless a plain step takes {extra / (SLOW - 1):.0f} ms or more. Leave such layers out with `only` "
        f"where this counts, and evaluate vp.fold(model).",
        stacklevel=3,
    )


def _integrated(model: nn.Module) -> list[str]:
    """The functions of channels, as text, for which a fold on a CPU has no formulas."""
    networks = dict.fromkeys(_network_of(layer)[0] for layer in normalized_layers(model).values())
    steps = [step for network in networks if network is not None for step in network.layout.channels.steps]
    texts = [step.function.name for step in steps if step.function.kernel is None and step.function.integrated]
    return [textwrap.shorten(text.replace("aten.", ""), 80, placeholder="...") for text in texts]


def _repeated(model: nn.Module) -> tuple[int, list[str]]:
    """The steps of folds with layers whose calls read different values, if there are many, and these layers."""
    named: list[str] = []
    networks: set[Network] = set()
    for path, layer in normalized_layers(model).items():
        network, index = _network_of(layer)
        if network is not None and (calls := network.layout.rows[index].calls) > 1:
            named.append(f"'{path}' ({calls} times)")
            networks.add(network)
    steps = sum(len(network.layout.channels.steps) for network in networks)
    return (steps, named) if steps >= MANY else (0, [])


def _evaluations(model: nn.Module) -> list[Statistics]:
    """The statistics that are computed operation by operation in every call of a model, but for recurrent layers."""
    evaluations: list[Statistics] = []
    for layer in normalized_layers(model).values():
        network, _ = _network_of(layer)
        if network is None and not isinstance(layer, NormalizedRecurrent):
            evaluations.append(layer.statistics[layer.training])
        elif network is not None and network.evaluation is not None and network.evaluated:
            evaluations.append(network.evaluation)
    return list(dict.fromkeys(evaluations))


def _plain_step(program: Program) -> float:
    """Milliseconds that a training step of a plain model takes, roughly."""
    device = next(program.model.parameters()).device.type
    operations = 0.0
    for node in filter(is_call_of_linear_layer, program.nodes):
        weight = node.args[1].info.shape
        per_output = weight[1:].numel() if len(weight) > 2 else node.args[0].info.shape[-1]
        batches = max(1.0, BATCH / node.info.shape[0]) if node.ndim > 1 else BATCH
        operations += 6 * node.info.shape.numel() * per_output * batches
    return PLAIN * len(program.nodes) + operations / RATES.get(device, RATES["cuda"])
