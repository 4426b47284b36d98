"""Should the statistics know of dropout?"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..protocol.models import FACTORIES
from ..report.series import Figure, Panel
from ..training.task import Task
from ..verdicts.evidence import Judgement, lower
from .arms import Arm, experiment
from .lines import BANDS, curve
from .records import Question, Records

SHARES = (0.1, 0.3)  # of units that are dropped behind every hidden layer
NONE = "no dropout"


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


def _lower(first: str, second: str, measure: str, records: Records) -> Judgement:
    if measure == "training":
        a, b = records.loss(first), records.loss(second)
    else:
        a, b = (records.last(arm, "valid_loss") for arm in (first, second))
    return Judgement(lower(a, b), (f"{measure} loss in evaluation mode {a.text()} against {b.text()}",))


def _figure(records: Records) -> Figure:
    panels = []
    for share in SHARES:
        arms = {NONE: (NONE, 0), inside(share): ("in the statistics", 3), outside(share): ("statistics without it", 1)}
        lines = [curve(records, arm, "valid_loss", label, look) for arm, (label, look) in arms.items()]
        panels.append(Panel(f"dropout {share}", tuple(lines)))
    caption = f"Validation loss of AP2, each at its best rate.{BANDS}"
    return Figure("dropout", "Dropout and the statistics", caption, tuple(panels), "epoch", "validation loss")


QUESTION = Question(
    "dropout",
    "Should the statistics know of dropout?",
    (
        Arm(NONE),
        *(Arm(inside(share), factory=functools.partial(dropping, share)) for share in SHARES),
        *(Arm(outside(share), change=functools.partial(drop_unseen, share)) for share in SHARES),
    ),
    experiment(epochs=8),
    tuple(
        (f"dropout {share}: {text}", functools.partial(_lower, *arms, measure))
        for share in SHARES
        for measure in ("training", "validation")
        for text, arms in {
            f"the {measure} loss is lower with it in the statistics than with statistics without it": (
                inside(share),
                outside(share),
            ),
            f"the {measure} loss is lower with it in the statistics than with no dropout": (inside(share), NONE),
        }.items()
    ),
    _figure,
)
