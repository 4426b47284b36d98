"""Must statistics follow scale and shift while these are trained, or may they stay what they were at the start?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...figures import Figure, Panel
from ...training import Task, normalized_layers
from .correlations import EPS, Layer, hermite
from .runs import BANDS, RATES, TRAINED, Arm, Question, curve, experiment, is_lower
from .truth import is_nearer, itself

Behind = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # mean and variance behind a layer's units of that deviation


class WithVariances(nn.Module):
    """The paper's network, normalized by means and variances as a rule has them behind its logistic units.

    Every standard deviation is taken `over` times as large as the rule says, and scales are read as `over` times what
    they are, so that the network of a start is the same function.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, model: nn.Module, task: Task, seed: int, behind: Behind, over: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(layer) for layer in normalized_layers(model).values())
        self.behind, self.over = behind, over
        self.held: list[tuple[Tensor, Tensor]] | None = None  # statistics that stay as they are
        moments: Any = task.moments(seed)
        for name, value in (("mean", moments.mean), ("var", moments.var)):
            self.register_buffer(name, value.flatten().clone())
        with torch.no_grad():
            for layer in self.layers:
                layer.scale.mul_(over)  # type: ignore[operator]

    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and standard deviation in front of every layer's scale and shift, as they are taken to be."""
        mean, var, result = self.mean, self.var, []
        layer: Any
        for layer in self.layers:
            result.append((layer.weight @ mean, self.over * (layer.weight.square() @ (var + EPS)).sqrt()))
            mean, var = self.behind(layer, layer.scale / self.over)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = x.flatten(1)
        for layer, (mean, std) in zip(self.layers, self.held or self.statistics(), strict=True):
            x = layer(x if layer is self.layers[0] else torch.sigmoid(x), mean, std)
        return x


def followed(layer: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the logistic function of normal variables of mean `shift`: what the analytic normalization has."""
    nodes, weights = (values.to(scale.dtype) for values in hermite())
    values = torch.sigmoid(layer.shift + scale * nodes[:, None])
    mean = weights @ values
    return mean, weights @ (values - mean).square()


def first(layer: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The moments that `followed` gave at the start: constants, as in normalization propagation."""
    return layer.first_mean, layer.first_var


def with_first_moments(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model that follows its weights, and takes what enters them to be distributed as at the start."""
    network = WithVariances(model, task, seed, first)
    with torch.no_grad():
        for layer in network.layers:
            mean, var = followed(layer, layer.scale)  # type: ignore[arg-type]
            layer.register_buffer("first_mean", mean)
            layer.register_buffer("first_var", var)
    return network


def with_held_statistics(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model that divides by the standard deviations of its start, whatever its weights become."""
    network = WithVariances(model, task, seed, followed)
    network.held = [(mean.detach(), std.detach()) for mean, std in network.statistics()]
    return network


FOLLOWED, FIRST, HELD = "followed", "first moments of units (Arpit et al.)", "all held"
ARMS = (
    Arm(FOLLOWED, watched=itself),
    Arm(FIRST, rates=(0.0016, *RATES), change=with_first_moments, watched=itself),
    Arm(HELD, rates=(0.00064, 0.0016, *RATES), change=with_held_statistics, watched=itself),
)


def _figure(records: Any) -> Figure:
    panels = tuple(
        Panel(title, tuple(curve(records, arm.name, name, arm.name, look) for look, arm in enumerate(ARMS)))
        for title, name in (("training", "train_loss"), ("validation", "valid_loss"))
    )
    caption = f"Losses of AP2, each at its best rate. {BANDS}"
    return Figure("frozen", "Statistics that follow, and statistics that stay", caption, panels, "epoch", "loss")


def _claims() -> Any:
    for arm in (FIRST, HELD):
        for kind, name in (("training", TRAINED), ("validation", "valid_loss")):
            yield f"{FOLLOWED} has a lower {kind} loss than {arm}", is_lower(((FOLLOWED, name), (arm, name)))
    yield (
        f"{FOLLOWED} is nearer to the truth than {FIRST}, in the farthest layer, at the end",
        is_nearer((FOLLOWED, -1), (FIRST, -1)),
    )


QUESTION = Question(
    "frozen",
    "Must statistics follow scale and shift?",
    ARMS,
    experiment(epochs=10),
    tuple(_claims()),
    _figure,
    seeds=5,
)
