"""Is the predicted standard deviation true, at the start and while a network trains?"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import varprop as vp

from ...protocol import Start
from ...seed_statistics import lower
from ...training import Task
from ..verdicts.evidence import Judgement, in_every_seed
from .runs import Arm, Claims, Question, Records, Rule, Run, Value, experiment, ratio_figure

NEAR, FAR = 1.1, 1.5  # factors, either way
NAMES: dict[Start, str] = {
    "none": "AP2, init = None",
    "bn": "AP2, init = BN",
    "ap2": "AP2, init = AP2",
    "orthogonal": "AP2, orthogonal",
}


def itself(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A normalized network has its predictions for scales."""
    return model


def _normalized(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """The function of a plain network, with its predictions for scales."""
    return vp.reparametrize(model, "analytic", moments=task.moments(seed))


def farthest(epoch: int) -> Value:
    """By which factor, either way, the prediction is off in the layer where it is off most."""

    def value(run: Run) -> float | None:
        layers = run["ratios"][epoch]
        return max(max(r, 1 / r) for r in layers) if all(layers) else None  # diverged, or nothing varies any more

    return value


def _is_off(arm: str, epoch: int, passes: Callable[[float], bool]) -> Rule:
    def rule(records: Records) -> Judgement:
        off = records.of(arm, farthest(epoch))
        return Judgement(in_every_seed([passes(value) for value in off.values]), (f"off by {off.text()} times",))

    return rule


def is_near(arm: str, epoch: int) -> Rule:
    """The rule that no layer is off by more than a little."""
    return _is_off(arm, epoch, lambda factor: factor <= NEAR)


def is_far(arm: str, epoch: int, limit: float) -> Rule:
    """The rule that some layer is off by more than that."""
    return _is_off(arm, epoch, lambda factor: factor > limit)


def is_nearer(first: tuple[str, int], second: tuple[str, int]) -> Rule:
    """The rule that the farthest layer of an arm after an epoch is nearer than that of another."""

    def rule(records: Records) -> Judgement:
        near, far = (records.of(arm, farthest(epoch)) for arm, epoch in (first, second))
        return Judgement(lower(near, far), (f"off by {near.text()} and {far.text()} times",))

    return rule


def _claims(arm: str) -> Claims:
    yield f"{arm}: before training every layer is within {NEAR} times", is_near(arm, 0)
    yield (
        f"{arm}: after one epoch some layer is off by more than {FAR} times",
        is_far(arm, 1, FAR),
    )
    yield f"{arm}: the farthest layer is nearer after one epoch than at the end", is_nearer((arm, 1), (arm, -1))


ARMS = (
    *(Arm(name, start=start, rates=(0.01,), watched=itself) for start, name in NAMES.items()),
    Arm("Standard, init = AP2", method="standard", rates=(0.01,), watched=_normalized),
)
DRAWN = [arm.name for arm in ARMS[1:]]  # the first begins at a thousandth, which would leave no room for the others
QUESTION = Question(
    "truth",
    "Is the predicted standard deviation true while a network trains?",
    ARMS,
    experiment(epochs=10),
    tuple(claim for arm in ARMS for claim in _claims(arm.name)),
    lambda records: ratio_figure("truth", records, DRAWN),
)
