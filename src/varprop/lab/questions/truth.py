"""Is the predicted standard deviation true, at the start and while a network trains?"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

import varprop as vp

from ..training.task import Task
from ..verdicts.evidence import Judgement, in_every_seed, lower
from .arms import Arm, Run, experiment
from .lines import ratio_figure
from .records import Question, Records

NEAR, FAR = 1.1, 1.5  # factors, either way
NAMES = {"none": "AP2, init = None", "bn": "AP2, init = BN", "ap2": "AP2, init = AP2", "orthogonal": "AP2, orthogonal"}
PLAIN = "Standard, init = AP2"


def itself(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A normalized network has its predictions for scales."""
    return model


def _normalized(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """The function of a plain network, with its predictions for scales."""
    return vp.reparametrize(model, "analytic", input=task.moments(seed))


def farthest(epoch: int) -> Callable[[Run], float | None]:
    """By which factor, either way, the prediction is off in the layer where it is off most."""

    def value(run: Run) -> float | None:
        layers = run["ratios"][epoch]
        return max(max(r, 1 / r) for r in layers) if all(layers) else None  # none or zero: nothing varies any more

    return value


def _starts_true(arm: str, records: Records) -> Judgement:
    off = records.of(arm, farthest(0))
    return Judgement(in_every_seed([value <= NEAR for value in off.values]), (f"off by a factor of {off.text()}",))


def _fails_soon(arm: str, records: Records) -> Judgement:
    off = records.of(arm, farthest(1))
    return Judgement(in_every_seed([value > FAR for value in off.values]), (f"off by a factor of {off.text()}",))


def _grows(arm: str, records: Records) -> Judgement:
    first, last = records.of(arm, farthest(1)), records.of(arm, farthest(-1))
    return Judgement(lower(first, last), (f"a factor of {first.text()}, then {last.text()}",))


def _claims(arm: str) -> tuple[tuple[str, Callable[[Records], Judgement]], ...]:
    return (
        (f"{arm}: before training every layer is within a factor of {NEAR}", functools.partial(_starts_true, arm)),
        (f"{arm}: after one epoch some layer is off by more than {FAR}", functools.partial(_fails_soon, arm)),
        (f"{arm}: the farthest layer is farther at the end than after one epoch", functools.partial(_grows, arm)),
    )


ARMS = (
    *(Arm(name, start=start, rates=(0.01,), watched=itself) for start, name in NAMES.items()),  # type: ignore[arg-type]
    Arm(PLAIN, method="standard", rates=(0.01,), watched=_normalized),
)
QUESTION = Question(
    "truth",
    "Is the predicted standard deviation true while a network trains?",
    ARMS,
    experiment(epochs=10),
    tuple(claim for arm in ARMS for claim in _claims(arm.name)),
    lambda records: ratio_figure("truth", "True over predicted standard deviation", records, [a.name for a in ARMS]),
)
