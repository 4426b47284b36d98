"""Are pre-activations normally distributed over the images, as the propagation of moments assumes?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...environment import require
from ...figures import Figure, Panel
from ...protocol import PAPER_BATCH, Start
from ...starts import watch
from ...training import normalized_layers
from ..verdicts.evidence import Judgement, in_every_seed
from .runs import BANDS, Arm, Claims, Question, Records, Rule, Run, experiment, line

LEVEL = 0.05  # of the test
FEW, MANY = 0.10, 0.50  # shares of tests that reject; 0.05 is what normal variables give
CLOSE, APART = 0.05, 0.10  # distances of distribution functions
NAMES: dict[Start, str] = {"ap2": "init = AP2", "orthogonal": "orthogonal"}


def of_layers(model: nn.Module, images: Tensor) -> Run:
    """For every layer, how often a test on a batch's outputs of a unit rejects, and how far units are from normal."""
    layers = normalized_layers(model)
    values: dict[str, Tensor] = {}

    def keep(path: str, output: Tensor) -> None:
        values[path] = output.detach().double()

    watch(model, images, layers, keep)
    return {
        "rejected": [rejected(output) for output in values.values()],
        "distance": [distance(output) for output in values.values()],
    }


def rejected(outputs: Tensor) -> float:
    """Share of D'Agostino and Pearson's tests that reject at 5 %: one for every unit and every batch of 128."""
    batches = outputs[: len(outputs) // PAPER_BATCH * PAPER_BATCH].unflatten(0, (-1, PAPER_BATCH))
    test = require("scipy.stats", "A test of normality").normaltest(batches.numpy(), axis=1)
    return float((test.pvalue < LEVEL).mean())


def distance(outputs: Tensor) -> float:
    """Largest difference between the distribution functions of a unit and of the normal one, the mean over units."""
    ordered = ((outputs - outputs.mean(0)) / outputs.std(0)).sort(0).values
    normal = torch.special.ndtr(ordered)
    steps = torch.arange(len(outputs) + 1, dtype=torch.float64)[:, None] / len(outputs)
    away = torch.maximum((normal - steps[:-1]).abs(), (steps[1:] - normal).abs())
    return float(away.amax(0).mean())


def _compare(arm: str, name: str, epoch: int, limit: float, above: bool) -> Rule:
    """The rule that in every seed all layers are below a limit, or some layer is above."""

    def rule(records: Records) -> Judgement:
        worst = records.of(arm, lambda run: max(run[name][epoch]) if None not in run[name][epoch] else None)
        verdict = in_every_seed([value > limit if above else value <= limit for value in worst.values])
        text = worst.percent() if name == "rejected" else worst.text()
        return Judgement(verdict, (f"{text} in the layer where it is most",))

    return rule


def _claims(arm: str) -> Claims:
    test = "a test of normality on 128 images rejects"
    yield f"{arm}: before training {test} {FEW:.0%} at most in every layer", _compare(arm, "rejected", 0, FEW, False)
    yield f"{arm}: at the end {test} more than {MANY:.0%} in some layer", _compare(arm, "rejected", -1, MANY, True)
    far = "the distribution functions of units are"
    yield f"{arm}: before training {far} within {CLOSE} in every layer", _compare(arm, "distance", 0, CLOSE, False)
    yield f"{arm}: at the end {far} away by more than {APART} in some layer", _compare(arm, "distance", -1, APART, True)


def _figure(records: Records) -> Figure:
    panels = []
    for arm in NAMES.values():
        layers = zip(*(zip(*run["distance"], strict=True) for run in records.at(arm)), strict=True)
        lines = [line(f"layer {k + 1}", k, range(len(runs[0])), runs) for k, runs in enumerate(layers)]
        panels.append(Panel(arm, tuple(lines)))
    caption = f"Distance between the distribution functions of pre-activations and of a normal variable. {BANDS}"
    title = "How far pre-activations are from normal"
    return Figure("normality", title, caption, tuple(panels), "epoch", "distance")


QUESTION = Question(
    "normality",
    "Are pre-activations normal?",
    tuple(Arm(name, start=start, rates=(0.01,), measure=of_layers) for start, name in NAMES.items()),
    experiment(epochs=10),
    tuple(claim for arm in NAMES.values() for claim in _claims(arm)),
    _figure,
    seeds=5,
)
