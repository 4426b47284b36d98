"""What the user is told of a normalized model: how its layers are folded, what stays plain, what folding will add.

`fold_report` is asked for; the warnings are given by `normalize`, not after a model was trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Container
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.utils import parametrize

from ..graph.program import Program
from .batchnorm import find_notes, is_batch_norm
from .checks import linear_by_look, listed
from .layers import Normalized, normalized_layers
from .linear_layers import is_call_of_linear_layer, owners
from .recurrent import NormalizedRecurrent
from .statistics import Statistics


class PlainWarning(UserWarning):
    """Modules that one could expect to be normalized stay as they are."""


@dataclass(frozen=True)
class FoldedLayer:
    """A layer, and how it is folded.

    Attributes:
        path: Of the layer.
        how: ``"together"`` with all others, from functions of single channels; ``"walked"``, together with the others
            but with moments that the engine computes operation by operation at every call; ``"alone"``, by itself.
        why: The reason, where it is not together; empty else.
        centred: True if the means of its weight rows are subtracted first (the deep form).
    """

    path: str
    how: str
    why: str = ""
    centred: bool = False


@dataclass(frozen=True)
class FoldReport:
    """How every layer of a model is folded in one mode."""

    layers: tuple[FoldedLayer, ...]

    def __str__(self) -> str:
        width = max((len(layer.path) for layer in self.layers), default=0)
        lines = [f"{layer.path:<{width}}  {layer.how:<8}  {layer.why}".rstrip() for layer in self.layers]
        counts = [f"{sum(layer.how == how for layer in self.layers)} {how}" for how in ("together", "walked", "alone")]
        centred = sum(layer.centred for layer in self.layers)
        counts += [f"{centred} with centred rows"] if centred else []
        return "\n".join([*lines, ", ".join(counts)])


def fold_report(model: nn.Module) -> FoldReport:
    """Say how the layers of a normalized model are folded at every call, and why some take longer than others.

    Args:
        model: A normalized model, in the mode that is asked about.

    Raises:
        ValueError: If the model is not normalized.
    """
    layers = normalized_layers(model)
    if not layers:
        raise ValueError("The model is not normalized: there is nothing to report.")
    return FoldReport(
        tuple(replace(_folded_layer(path, layer), centred=layer.centred_rows) for path, layer in layers.items())
    )


def _folded_layer(path: str, layer: Normalized) -> FoldedLayer:
    if layer.training in layer.networks:
        network, index = layer.networks[layer.training]
        if index not in network.evaluated:
            return FoldedLayer(path, "together")
        return FoldedLayer(path, "walked", f"after {network.evaluated[index]}")
    if isinstance(layer, NormalizedRecurrent):
        return FoldedLayer(path, "alone", "recurrent layers have statistics of their own")
    calls = len(layer.uses[layer.training])
    return FoldedLayer(path, "alone", f"called {calls} times" if calls != 1 else "statistics of another form")


def warn_of_constants(paths: Collection[str]) -> None:
    """Say which layers read nothing random."""
    if paths:
        warnings.warn(
            f"What these layers read is the same for all data, so they stay as they are: "
            f"{listed([repr(path) for path in sorted(paths)])}. Where it does vary, give its moments in place of a "
            f"constant.",
            PlainWarning,
            stacklevel=3,
        )


def warn_of_frozen(plain: nn.Module, normalized: nn.Module) -> None:
    """Say so if nothing trains any more in a model of which something did."""
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    if trained and not any(parameter.requires_grad for parameter in normalized.parameters()):
        warnings.warn(
            f"Nothing trains in the normalized model: what did is absorbed ({listed([repr(n) for n in trained])}), and "
            f"scales and shifts are frozen like the weights of their layers. Call requires_grad_() on those that are "
            f"to train.",
            PlainWarning,
            stacklevel=3,
        )


def warn_of_plain(model: nn.Module, except_paths: Container[str] = ()) -> None:
    """Say which modules stay as they are that one could expect to change, except those at some paths."""
    modules = model.named_modules()
    named = [(path, m) for path, m in modules if not isinstance(m, Normalized) and path not in except_paths]
    norms = [path for path, m in named if is_batch_norm(m)]
    layers = linear_by_look(model, except_paths)
    if norms:
        warnings.warn(
            f"Batch norms that do not directly follow a linear layer, or whose parameters something else reads, stay, "
            f"and with them the dependence on the batch: "
            f"{listed([repr(path) for path in norms])}.",
            PlainWarning,
            stacklevel=3,
        )
    if layers:
        warnings.warn(f"These layers stay as they are: {listed(layers)}.", PlainWarning, stacklevel=3)


def warn_of_fold(model: nn.Module) -> None:
    """Say once which layers `fold` gives a bias, and which it unties: their state then does not fit the plain class."""
    layers = normalized_layers(model)
    gained = [repr(path) for path in _without_bias(model, layers)]
    untied = [repr(path) for path in _tied(model, layers)]
    changes = [f"give a bias to {listed(gained)}"] * bool(gained)
    changes += [f"untie the weights of {listed(untied)}"] * bool(untied)
    if changes:
        warnings.warn(
            f"vp.fold will in general {' and '.join(changes)}, and a strict load_state_dict into the plain class will "
            "not take what it returns.",
            stacklevel=3,
        )


# Milliseconds of a CPU core, forward and backward: any evaluation by the engine, each operation of it, one operation of
# a plain model; the operations on numbers that a device does in one. Within a factor of two of what was measured.
EVALUATION, OPERATION, PLAIN, RATES = 3.0, 1.0, 0.04, {"cpu": 3e7, "cuda": 1e10}
SLOW = 1.5  # times a plain step
BATCH = 32  # which a step is taken to have at least, whatever the example


def warn_of_time(model: nn.Module, program: Program) -> None:
    """Say so if a step of a normalized model is expected to take much longer than one of the plain model."""
    evaluations = _evaluations(model)
    operations = sum(sum(map(e.plan.random, e.graph.program.nodes)) + len(e.targets) for e in evaluations)
    extra, plain = EVALUATION + OPERATION * operations, _plain_step(program)
    if evaluations and plain + extra > SLOW * plain:
        reports = [layer for layer in fold_report(model).layers if layer.how != "together"]
        named = [f"'{layer.path}' ({layer.why})" for layer in reports]
        warnings.warn(
            f"The statistics of {len(named)} of the {len(normalized_layers(model))} layers are computed operation by "
            f"operation in every call: {listed(named)}. That adds about {extra:.0f} ms to a step on a CPU, so that it "
            f"takes above {SLOW} times as long unless a plain step takes {extra / (SLOW - 1):.0f} ms or more. Leave "
            f"such layers out with `only` where this counts, and evaluate vp.fold(model).",
            stacklevel=3,
        )


def _evaluations(model: nn.Module) -> list[Statistics]:
    """The statistics that are computed operation by operation in every call of a model, but for recurrent layers."""
    evaluations: dict[int, Statistics] = {}
    for layer in normalized_layers(model).values():
        if layer.training in layer.networks:
            network, _ = layer.networks[layer.training]
            if network.evaluation is not None and network.evaluated:
                evaluations[id(network.evaluation)] = network.evaluation
        elif not isinstance(layer, NormalizedRecurrent):
            evaluations[id(layer)] = layer.statistics[layer.training]
    return list(evaluations.values())


def _plain_step(program: Program) -> float:
    """Milliseconds that a training step of a plain model takes, roughly."""
    device = next(program.model.parameters()).device.type
    operations = 0.0
    for node in filter(is_call_of_linear_layer, program.nodes):
        weight = node.args[1].form.shape
        batches = max(1.0, BATCH / node.form.shape[0]) if node.ndim > 1 else BATCH
        operations += 6 * node.form.shape.numel() * weight[1:].numel() * batches
    return PLAIN * len(program.nodes) + operations / RATES.get(device, RATES["cuda"])


def _without_bias(model: nn.Module, layers: dict[str, Normalized]) -> list[str]:
    """Layers that had no bias, and no batch norm of the model's own behind them to take it."""
    notes = find_notes(model, layers)  # type: ignore[arg-type]
    without = []
    for path, layer in layers.items():
        bias = layer.plain_biases if isinstance(layer, NormalizedRecurrent) else layer.plain_bias is not None
        without += [path] if path not in notes and not bias else []
    return without


def _tied(model: nn.Module, layers: dict[str, Normalized]) -> list[str]:
    """Layers whose weight others hold as well."""
    held = owners(model)
    linear = {path: s for path, s in layers.items() if not isinstance(s, NormalizedRecurrent)}
    registered = {path: layer for path, layer in linear.items() if not parametrize.is_parametrized(layer, "weight")}
    return [path for path, layer in registered.items() if len(held[layer.weight]) > 1]
