"""How the layers of a normalized model are folded: together, with the help of a walk, or each by itself; and why."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from .layers import Normalized, normalized_layers
from .recurrent import NormalizedRecurrent


@dataclass(frozen=True)
class FoldedLayer:
    """How one layer is folded.

    Attributes:
        path: Of the layer.
        how: ``"together"`` with all others, from functions of single channels; ``"walked"``, together with the others
            but with moments that the engine computes operation by operation at every call; ``"alone"``, by itself.
        why: The reason, where it is not together; empty else.
        centred: Whether the means of its weight rows are taken away first (the deep form).
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
        network, place = layer.networks[layer.training]
        if place not in network.evaluated:
            return FoldedLayer(path, "together")
        return FoldedLayer(path, "walked", f"after {network.evaluated[place]}")
    if isinstance(layer, NormalizedRecurrent):
        return FoldedLayer(path, "alone", "recurrent layers have statistics of their own")
    calls = len(layer.uses[layer.training])
    return FoldedLayer(path, "alone", f"called {calls} times" if calls != 1 else "statistics of another form")
