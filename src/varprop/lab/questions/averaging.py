"""Why does batch norm's evaluation mode generalize better: is it the average, or the noise?"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ..report.series import Figure, Panel
from ..training.task import Task
from ..verdicts.evidence import Judgement, all_of, lower
from .arms import Arm, experiment, normalized_layers
from .lines import BANDS, curve
from .records import Question, Records

BN, AP2, NOISY, PLAIN = "BN", "AP2", "AP2 + noise", "Standard"
LAST, MEAN = "valid", "averaged"  # curves: with the weights of the moment, with their mean


def add_noise_of_batches(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """Let the statistics of every layer err in training as those of batch norm do: by as much as a batch is small."""
    for layer in normalized_layers(model):
        layer.register_forward_hook(_err)
    return model


def _err(layer: Any, _: Any, output: Tensor) -> Tensor:
    """Centre and scale anew by mean and deviation of as many normal variables as the batch has samples."""
    if not layer.training:
        return output
    drawn = torch.randn_like(output)
    centred = output - layer.shift - layer.scale * drawn.mean(0)
    noisy: Tensor = centred / drawn.std(0, correction=0) + layer.shift
    return noisy


def _better(first: tuple[str, str], second: tuple[str, str], records: Records) -> Judgement:
    """Whether an arm and curve is lower than another, in loss and in error."""
    verdicts, lines = [], []
    for kind in ("loss", "error"):
        a, b = (records.last(arm, f"{curve}_{kind}") for arm, curve in (first, second))
        verdicts.append(lower(a, b))
        ends = [s.percent() if kind == "error" else s.text() for s in (a, b)]
        lines.append(f"validation {kind} {ends[0]} against {ends[1]}: {verdicts[-1]}")
    return Judgement(all_of(verdicts), tuple(lines))


def _figure(records: Records) -> Figure:
    arms = (PLAIN, AP2, NOISY)
    both = (curve(records, BN, "valid_loss", "BN, evaluation mode", 1),)
    in_batches = curve(records, BN, "batch_loss", "BN, batch mode", 1, dashed=True)
    looks = dict(zip(arms, (0, 3, 4), strict=True))
    panels = (
        Panel(
            "weights as they are", (*both, in_batches, *(curve(records, a, "valid_loss", a, looks[a]) for a in arms))
        ),
        Panel(
            "averaged weights (BN as it is)", (*both, *(curve(records, a, "averaged_loss", a, looks[a]) for a in arms))
        ),
    )
    caption = f"Validation loss, each method at its best rate.{BANDS}"
    return Figure("averaging", "Averages of weights beside batch norm's", caption, panels, "epoch", "validation loss")


_COMPARED = {
    "BN validates better in evaluation mode than in batch mode": ((BN, LAST), (BN, "batch")),
    "BN in evaluation mode validates better than AP2": ((BN, LAST), (AP2, LAST)),
    "averaged weights validate better than the last ones, AP2": ((AP2, MEAN), (AP2, LAST)),
    "averaged weights validate better than the last ones, standard": ((PLAIN, MEAN), (PLAIN, LAST)),
    "BN in evaluation mode validates better than AP2 with averaged weights": ((BN, LAST), (AP2, MEAN)),
    "AP2 validates better with batch norm's noise than without": ((NOISY, LAST), (AP2, LAST)),
    "BN in evaluation mode validates better than AP2 with noise and averaged weights": ((BN, LAST), (NOISY, MEAN)),
}
QUESTION = Question(
    "averaging",
    "Why does batch norm's evaluation mode generalize better?",
    (
        Arm(BN, "batch", "bn"),
        Arm(AP2, "analytic", "bn", averaged=True),
        Arm(NOISY, "analytic", "bn", change=add_noise_of_batches, averaged=True),
        Arm(PLAIN, "standard", "bn", averaged=True),
    ),
    experiment(epochs=10),
    tuple((text, functools.partial(_better, *pair)) for text, pair in _COMPARED.items()),
    _figure,
)
