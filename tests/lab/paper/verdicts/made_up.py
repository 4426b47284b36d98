"""Made-up outcomes for the rules, and the verdict on them."""

from __future__ import annotations

from dataclasses import replace

from tests.lab import synthetic
from varprop_lab.paper.verdicts.judge import CLAIMS, judge_claim
from varprop_lab.protocol import STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Cell
from varprop_lab.store import Run


def ended(cell, train=0.1, valid=0.2, error=0.05, diverged=False, lr=None, **curves):
    """An outcome that ends with these values; other curves by name."""
    found = {TRAIN_LOSS: [2.0, train, train], VALID_LOSS: [valid], VALID_ACCURACY: [1 - error], **curves}
    made = replace(synthetic.outcome(cell), curves=found, diverged=diverged)
    return made if lr is None else replace(made, search=replace(made.search, lr=lr))


def seeds(experiment, method, start, values, bound=1e-2, variant="", name="train", batch_size=128):
    """One outcome a value; `name` says what the values are."""
    cells = [Cell(experiment, method, start, seed, batch_size, bound, variant) for seed in range(len(values))]
    return [ended(cell, **{name: value}) for cell, value in zip(cells, values, strict=True)]


def from_all_starts(method, values, experiment="mnist", **more):
    return [outcome for start in STARTS for outcome in seeds(experiment, method, start, values, **more)]


EPOCHS = 21


def curve(share=1.0, wobble=0.0):
    """A loss that falls by a tenth an epoch, times a share, up and down by another share."""
    return [share * 0.9**epoch * (1 + wobble * (-1) ** epoch) for epoch in range(EPOCHS)]


def batch_norm(start, seed, gap=0.0, wobble=0.0, own_wobble=0.001, experiment="mnist", variant="", bound=1e-2):
    """Batch norm whose evaluation is away from training, its lag taken out, by `gap`, and wobbles."""
    now = (1 + gap) * 0.9 ** (1 / 2.302585)
    curves = {TRAIN_LOSS: curve(wobble=own_wobble), TRAIN_EVAL_LOSS: curve(now, wobble)}
    return ended(Cell(experiment, "batch", start, seed, lr_max=bound, variant=variant), **curves)


def verdict(name, outcomes):
    """The verdict on one claim."""
    names = dict.fromkeys(outcome.cell.experiment for outcome in outcomes)
    runs = [Run(name, [o for o in outcomes if o.cell.experiment == name]) for name in names]
    return judge_claim(next(claim for claim in CLAIMS if claim.name == name), runs)
