"""Should the statistics know of dropout?"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...figures import Figure, Panel
from ...protocol import FACTORIES
from ...training import Task
from .runs import BANDS, TRAINED, Arm, Claims, Question, Records, curve, experiment, is_lower

SHARES = (0.1, 0.3)  # of units that are dropped behind every hidden layer
NONE = "no dropout"
RATES = (0.004, 0.01)


def inside(share: float) -> str:
    """The arm whose statistics count dropout."""
    return f"dropout {share} in the statistics"


def outside(share: float) -> str:
    """The arm whose statistics do not."""
    return f"dropout {share}, statistics without"


def dropping(share: float) -> nn.Module:
    """The paper's network with dropout behind every hidden layer."""
    layers: list[nn.Module] = []
    for layer in FACTORIES["mnist"]().children():
        layers += [layer, nn.Dropout(share)] if isinstance(layer, nn.Sigmoid) else [layer]
    return nn.Sequential(*layers)


def drop_unseen(share: float, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """Dropout at the same places of a network that is normalized already: its statistics know nothing of it."""

    def drop(unit: nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, share, unit.training)

    for layer in model.modules():
        if isinstance(layer, nn.Sigmoid):
            layer.register_forward_hook(drop)
    return model


def _claims(share: float) -> Claims:
    for name, arm in (("statistics that do not know of it", outside(share)), ("no dropout", NONE)):
        for kind, curve_name in (("training", TRAINED), ("validation", "valid_loss")):
            rule = is_lower(((inside(share), curve_name), (arm, curve_name)))
            yield f"dropout {share} in the statistics has a lower {kind} loss than {name}", rule


def _figure(records: Records) -> Figure:
    panels = []
    for share in SHARES:
        arms = {NONE: (NONE, 0), inside(share): ("in the statistics", 3), outside(share): ("statistics without it", 1)}
        lines = [curve(records, arm, "valid_loss", label, look) for arm, (label, look) in arms.items()]
        panels.append(Panel(f"dropout {share}", tuple(lines)))
    caption = f"Validation loss of AP2, each at its best rate. {BANDS}"
    return Figure("dropout", "Dropout and the statistics", caption, tuple(panels), "epoch", "validation loss")


QUESTION = Question(
    "dropout",
    "Should the statistics know of dropout?",
    (
        Arm(NONE, rates=RATES),
        *(Arm(inside(share), rates=RATES, factory=functools.partial(dropping, share)) for share in SHARES),
        *(Arm(outside(share), rates=RATES, change=functools.partial(drop_unseen, share)) for share in SHARES),
    ),
    experiment(epochs=8),
    tuple(claim for share in SHARES for claim in _claims(share)),
    _figure,
)
