"""Why does batch norm's evaluation mode generalize better: is it the average, or the noise?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...figures import Figure, Panel
from ...training import Task, normalized_layers
from .runs import BANDS, Arm, Place, Question, Records, Rule, curve, experiment, is_lower

BN, AP2, NOISY, PLAIN = "BN", "AP2", "AP2 + noise", "Standard"
LAST, MEAN, IN_BATCHES = "valid", "averaged", "batch"  # with the weights of the moment, their mean, or batch mode
LOOKS = {PLAIN: 0, AP2: 3, NOISY: 4}


def add_noise_of_batches(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """Let the statistics of every layer err in training as those of batch norm do: the more, the smaller a batch."""
    for layer in normalized_layers(model).values():
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


def _better(first: Place, second: Place) -> Rule:
    """In validation loss and in validation error."""
    return is_lower(*(((first[0], f"{first[1]}_{k}"), (second[0], f"{second[1]}_{k}")) for k in ("loss", "error")))


def _figure(records: Records) -> Figure:
    batch_norm = (
        curve(records, BN, "valid_loss", "BN, evaluation mode", 1),
        curve(records, BN, "batch_loss", "BN, batch mode", 2),
    )
    last, mean = (
        tuple(curve(records, arm, f"{kind}_loss", arm, look) for arm, look in LOOKS.items()) for kind in (LAST, MEAN)
    )
    panels = (
        Panel("weights as they are", batch_norm + last),
        Panel("averaged weights (BN as it is)", batch_norm + mean),
    )
    caption = f"Validation loss, each method at its best rate. {BANDS}"
    return Figure("averaging", "Averages of weights beside batch norm's", caption, panels, "epoch", "validation loss")


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
    (
        ("BN validates better in evaluation mode than in batch mode", _better((BN, LAST), (BN, IN_BATCHES))),
        ("BN in evaluation mode validates better than AP2", _better((BN, LAST), (AP2, LAST))),
        ("AP2 validates better with averaged weights", _better((AP2, MEAN), (AP2, LAST))),
        ("Standard validates better with averaged weights", _better((PLAIN, MEAN), (PLAIN, LAST))),
        ("AP2 with averaged weights validates better than BN", _better((AP2, MEAN), (BN, LAST))),
        ("AP2 validates better with batch norm's noise", _better((NOISY, LAST), (AP2, LAST))),
        ("AP2 with noise and averaged weights validates better than BN", _better((NOISY, MEAN), (BN, LAST))),
    ),
    _figure,
)
