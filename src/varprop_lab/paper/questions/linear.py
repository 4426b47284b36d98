"""Is linearization of the activation enough, and from which variance on is it not?"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ...training import Task, normalized_layers
from .frozen import WithVariances
from .runs import TRAINED, Arm, Claims, Question, experiment, is_lower, ratio_figure
from .truth import FAR, NEAR, is_far, is_near, is_nearer, itself

SMALL, USUAL, LARGE = 0.25, 1.0, 4.0  # standard deviations before hidden units, at the start


def linearized(layer: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the tangent of the logistic function at the mean."""
    mean = torch.sigmoid(layer.shift)
    return mean, (mean * (1 - mean) * scale).square()


def scaled(std: float, linear: bool, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model with another standard deviation before its hidden units, with its own moments or by tangents."""
    with torch.no_grad():
        for layer in list(normalized_layers(model).values())[:-1]:
            layer.scale.mul_(std)
    return WithVariances(model, task, seed, linearized) if linear else model


def named(std: float, linear: bool) -> str:
    """Its arm."""
    return f"{'linearized' if linear else 'normal'}, std {std:g}"


def _claims() -> Claims:
    for std in (SMALL, USUAL, LARGE):
        arm = named(std, linear=False)
        yield f"{arm}: before training every layer is within {NEAR} times", is_near(arm, 0)
    yield f"{named(SMALL, True)}: before training every layer is within {NEAR} times", is_near(named(SMALL, True), 0)
    for std, limit in ((USUAL, NEAR), (LARGE, FAR)):
        yield (
            f"{named(std, True)}: before training some layer is off by more than {limit} times",
            is_far(named(std, True), 0, limit),
        )
    normal, linear = named(USUAL, False), named(USUAL, True)
    yield f"{normal} is nearer than {linear} at the end", is_nearer((normal, -1), (linear, -1))
    for kind, name in (("training", TRAINED), ("validation", "valid_loss")):
        yield f"{normal} has a lower {kind} loss than {linear}", is_lower(((normal, name), (linear, name)))


ARMS = tuple(
    Arm(
        named(std, linear),
        start="orthogonal",
        rates=(0.004, 0.01, 0.025) if std == USUAL else (0.01,),
        change=functools.partial(scaled, std, linear),
        watched=itself,
    )
    for std in (SMALL, USUAL, LARGE)
    for linear in (False, True)
)
QUESTION = Question(
    "linear",
    "Is linearization enough?",
    ARMS,
    experiment(epochs=10),
    tuple(_claims()),
    lambda records: ratio_figure("linear", records, [arm.name for arm in ARMS]),
    seeds=5,
)
