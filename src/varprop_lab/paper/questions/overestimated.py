"""Does a normalization that takes variances too large, or too small, look faster at one rate?"""

from __future__ import annotations

import functools
import statistics

import torch
from torch import nn

from ...figures import Figure, Panel
from ...seed_statistics import Sample, lower, within
from ...training import Task
from ..verdicts.batch_norm import LOSS_TOLERANCE
from ..verdicts.evidence import Judgement
from .frozen import WithVariances, followed
from .runs import BANDS, Arm, Claims, Question, Records, Rule, curve, experiment

FACTOR = 3.0  # of standard deviations, as a normalization takes them
RATES = (0.0025, 0.005, 0.01, 0.02, 0.04)
ONE_RATE = RATES[2]
RIGHT = "right"


def taken(factor: float, kept: bool, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model whose deviations are taken so many times as large; the function of the start is kept, or the scales."""
    network = WithVariances(model, task, seed, followed, factor)
    if not kept:
        with torch.no_grad():
            for layer in network.layers:
                layer.scale.div_(factor)  # type: ignore[operator]
    return network


def named(factor: float, kept: bool) -> str:
    """Its arm."""
    return f"std x {factor:.2g}, {'the same function' if kept else 'scales of 1'} at the start"


def _mean_loss(records: Records, arm: str, rate: float | None) -> Sample:
    """Of training, over all epochs: a measure of speed."""
    return records.of(arm, lambda run: statistics.fmean(run["train_loss"]), rate)


def _is_faster(arm: str) -> Rule:
    def rule(records: Records) -> Judgement:
        a, b = (_mean_loss(records, name, ONE_RATE) for name in (arm, RIGHT))
        return Judgement(lower(a, b), (f"mean training loss over epochs {a.text()} against {b.text()}",))

    return rule


def _is_alike(arm: str) -> Rule:
    def rule(records: Records) -> Judgement:
        a, b = (_mean_loss(records, name, None) for name in (arm, RIGHT))
        rates = ", ".join(f"{records.at(name)[0]['rate']:g}" for name in (arm, RIGHT))
        line = f"mean training loss over epochs {a.text()} against {b.text()}, at rates {rates}"
        return Judgement(within(a, b, LOSS_TOLERANCE * b.mean), (line,))

    return rule


CASES = [(factor, kept) for kept in (True, False) for factor in (FACTOR, 1 / FACTOR)]


def _claims() -> Claims:
    for factor, kept in CASES:
        arm = named(factor, kept)
        yield f"{arm}: at one rate, {ONE_RATE:g}, it is faster than with right ones", _is_faster(arm)
    for factor, kept in CASES:
        arm = named(factor, kept)
        yield f"{arm}: each at the best of five rates they are alike, within {LOSS_TOLERANCE:.0%}", _is_alike(arm)


def _figure(records: Records) -> Figure:
    lines = [curve(records, RIGHT, "train_loss", RIGHT, 0)]
    lines += [curve(records, named(*case), "train_loss", named(*case), look) for look, case in enumerate(CASES, 1)]
    at_one = [
        curve(Records([run for run in records.runs if run["rate"] == ONE_RATE]), arm, "train_loss", arm, look)
        for look, arm in enumerate([RIGHT, *(named(*case) for case in CASES)])
    ]
    panels = Panel(f"all at rate {ONE_RATE:g}", tuple(at_one)), Panel("each at its best rate", tuple(lines))
    caption = f"Running training loss of AP2, standard deviations taken {FACTOR:g} times too large or small. {BANDS}"
    title = "Standard deviations taken too large or too small"
    return Figure("overestimated", title, caption, panels, "epoch", "training loss")


QUESTION = Question(
    "overestimated",
    "Does an overestimated variance look faster?",
    (
        Arm(RIGHT, rates=RATES, change=functools.partial(taken, 1.0, True)),
        *(Arm(named(*case), rates=RATES, change=functools.partial(taken, *case)) for case in CASES),
    ),
    experiment(epochs=4),
    tuple(_claims()),
    _figure,
    seeds=5,
)
