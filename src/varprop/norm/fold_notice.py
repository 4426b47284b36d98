"""What folding will add to a model, and how long it takes: said when it is normalized, not after it was trained."""

from __future__ import annotations

import warnings

from torch import nn
from torch.nn.utils import parametrize

from ..graph.program import Program
from .batchnorm import find_notes
from .checks import listed
from .layers import Normalized, normalized_layers
from .linear_layers import is_call_of_linear_layer, owners
from .recurrent import NormalizedRecurrent
from .report import fold_report
from .statistics import Statistics


def warn_of_fold(model: nn.Module) -> None:
    """Say once which layers `fold` gives a bias, and which it unties: their state then does not fit the plain class."""
    sites = normalized_layers(model)
    gained = [repr(path) for path in _without_bias(model, sites)]
    untied = [repr(path) for path in _tied(model, sites)]
    parts = [f"give a bias to {listed(gained)}"] * bool(gained) + [f"untie the weights of {listed(untied)}"] * bool(
        untied
    )
    if parts:
        warnings.warn(
            f"vp.fold will in general {' and '.join(parts)}, and a strict load_state_dict into the plain class will "
            "not take what it returns.",
            stacklevel=3,
        )


# Milliseconds of a CPU core, forward and backward: any walk, each operation of it, an operation of a plain model; the
# operations on numbers that a device does in one. Within a factor of two of what was measured.
WALK, WALKED, PLAIN, RATES = 3.0, 1.0, 0.04, {"cpu": 3e7, "cuda": 1e10}
SLOW = 1.5  # times a plain step
BATCH = 32  # which a step is taken to have at least, whatever the example


def warn_of_time(model: nn.Module, program: Program) -> None:
    """Say so if a step of a normalized model is expected to take much longer than one of the plain model."""
    walks = _walks(model)
    operations = sum(sum(map(walk.plan.random, walk.graph.program.nodes)) + len(walk.targets) for walk in walks)
    extra, plain = WALK + WALKED * operations, _plain_step(program)
    if walks and plain + extra > SLOW * plain:
        reports = [layer for layer in fold_report(model).layers if layer.how != "together"]
        named = [f"'{layer.path}' ({layer.why})" for layer in reports]
        warnings.warn(
            f"The statistics of {len(named)} of the {len(normalized_layers(model))} layers are computed operation by "
            f"operation in every call: {listed(named)}. That adds about {extra:.0f} ms to a step on a CPU, so that it "
            f"takes above {SLOW} times as long unless a plain step takes {extra / (SLOW - 1):.0f} ms or more. Leave "
            f"such layers out with `only` where this counts, and evaluate vp.fold(model).",
            stacklevel=3,
        )


def _walks(model: nn.Module) -> list[Statistics]:
    """What is computed operation by operation in every call of a model, but for recurrent layers."""
    walks: dict[int, Statistics] = {}
    for layer in normalized_layers(model).values():
        if layer.training in layer.networks:
            walk, given = layer.networks[layer.training][0].evaluation, layer.networks[layer.training][0].evaluated
            if walk is not None and given:
                walks[id(walk)] = walk
        elif not isinstance(layer, NormalizedRecurrent):
            walks[id(layer)] = layer.statistics[layer.training]
    return list(walks.values())


def _plain_step(program: Program) -> float:
    """Milliseconds that a training step of a plain model takes, roughly."""
    device = next(program.model.parameters()).device.type
    operations = 0.0
    for node in filter(is_call_of_linear_layer, program.nodes):
        weight = node.args[1].form.shape
        batches = max(1.0, BATCH / node.form.shape[0]) if node.ndim > 1 else BATCH
        operations += 6 * node.form.shape.numel() * weight[1:].numel() * batches
    return PLAIN * len(program.nodes) + operations / RATES.get(device, RATES["cuda"])


def _without_bias(model: nn.Module, sites: dict[str, Normalized]) -> list[str]:
    """Layers that had no bias, and no batch norm of the model's own behind them to take it."""
    notes = find_notes(model, sites)  # type: ignore[arg-type]
    return [path for path, site in sites.items() if path not in notes and not _has_place_for_bias(site)]


def _has_place_for_bias(site: Normalized) -> bool:
    return bool(site.plain_biases) if isinstance(site, NormalizedRecurrent) else site.plain_bias is not None


def _tied(model: nn.Module, sites: dict[str, Normalized]) -> list[str]:
    """Layers whose weight others hold as well."""
    held = owners(model)
    plain = {path: s for path, s in sites.items() if not isinstance(s, NormalizedRecurrent)}
    whole = {path: site for path, site in plain.items() if not parametrize.is_parametrized(site, "weight")}
    return [path for path, site in whole.items() if len(held[site.weight]) > 1]
