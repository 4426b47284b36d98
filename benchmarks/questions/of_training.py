"""Questions about training: what do the length of weights, averages, the noise of batches, dropout and decay do?"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop_lab.figures import Figure, Panel
from varprop_lab.paper.verdicts.batch_norm import ACCURACY_TOLERANCE, POINT
from varprop_lab.paper.verdicts.evidence import Judgement, in_every_seed
from varprop_lab.protocol import FACTORIES, Method, Start
from varprop_lab.seed_statistics import Sample, at_most, lower
from varprop_lab.training import Task

from ..ratios import normalized_layers
from .runs import BANDS, TRAINED, Arm, Claims, Place, Question, Records, Rule, Run, curve, experiment, is_lower, line

# --- norm: What does the length of the weights do, if the function does not depend on it?

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0, 9.0)
NORM_RATES = tuple(float(f"{0.01 * factor:.3g}") for factor in FACTORS)
MATTERS, ALIKE = 1.1, 1.05  # highest training loss over lowest


@torch.no_grad()
def lengthened(factor: float, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model of equal function on weights that are so many times as long."""
    for layer in normalized_layers(model).values():
        layer.weight.mul_(factor)
    return model


def norm_arm(factor: float) -> str:
    """Its arm."""
    return f"weights x {factor:.2g}"


def _differ_by(passes: Callable[[float], bool], rates: Sequence[float | None]) -> Rule:
    """The rule for the highest training loss over the lowest, by seed; a rate for every length, None for its best."""

    def rule(records: Records) -> Judgement:
        losses = [records.last(norm_arm(f), TRAINED, rate) for f, rate in zip(FACTORS, rates, strict=True)]
        by_seed = zip(*(sample.values for sample in losses), strict=True)
        spread = Sample(tuple(max(v) / min(v) if math.isfinite(max(v)) else math.inf for v in by_seed), losses[0].ids)
        means = ", ".join(f"{sample.mean:.3g}" for sample in losses)
        verdict = in_every_seed([passes(value) for value in spread.values])
        return Judgement(verdict, (f"{spread.text()} times", f"training losses {means}, shortest weights first"))

    return rule


def _norm_figure(records: Records) -> Figure:
    def panel(title: str, position: Callable[[float, float], float]) -> Panel:
        drawn = []
        for look, factor in enumerate(FACTORS):
            runs = list(
                zip(*(records.last(norm_arm(factor), TRAINED, rate).values for rate in NORM_RATES), strict=True)
            )
            drawn.append(line(norm_arm(factor), look, [position(rate, factor) for rate in NORM_RATES], runs))
        return Panel(title, tuple(drawn))

    panels = (
        panel("over the learning rate", lambda rate, factor: rate),
        panel("over rate / length", lambda rate, factor: rate / factor),
    )
    title = "Length of the first weights and learning rate"
    caption = f"Final training loss of AP2, in evaluation mode. {BANDS}"
    return Figure("norm", title, caption, panels, "learning rate (right: over the factor)", "training loss", x_log=True)


NORM = Question(
    "norm",
    "What does the length of the weights do?",
    tuple(Arm(norm_arm(f), rates=NORM_RATES, change=functools.partial(lengthened, f)) for f in FACTORS),
    experiment(epochs=4),
    (
        (
            f"at one rate, {NORM_RATES[2]:g}, lengths from 1/9 to 9 differ by more than {MATTERS} times in training "
            "loss",
            _differ_by(lambda spread: spread > MATTERS, [NORM_RATES[2]] * len(FACTORS)),
        ),
        (
            f"at rates in proportion to the length they differ by at most {ALIKE} times",
            _differ_by(lambda spread: spread <= ALIKE, NORM_RATES),
        ),
        (
            f"each at the best of five rates they differ by at most {ALIKE} times",
            _differ_by(lambda spread: spread <= ALIKE, [None] * len(FACTORS)),
        ),
    ),
    _norm_figure,
)


# --- averaging: Why does batch norm's evaluation mode generalize better: is it the average, or the noise?

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


def _averaging_figure(records: Records) -> Figure:
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


AVERAGING = Question(
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
    _averaging_figure,
)


# --- dropout: Should the statistics know of dropout?

SHARES = (0.1, 0.3)  # of units that are dropped behind every hidden layer
NONE = "no dropout"
DROPOUT_RATES = (0.004, 0.01)


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


def _claims_of_dropout(share: float) -> Claims:
    for name, arm in (("statistics that ignore it", outside(share)), ("no dropout", NONE)):
        for kind, curve_name in (("training", TRAINED), ("validation", "valid_loss")):
            rule = is_lower(((inside(share), curve_name), (arm, curve_name)))
            yield f"dropout {share} in the statistics has a lower {kind} loss than {name}", rule


def _dropout_figure(records: Records) -> Figure:
    panels = []
    for share in SHARES:
        arms = {NONE: (NONE, 0), inside(share): ("in the statistics", 3), outside(share): ("statistics without it", 1)}
        lines = [curve(records, arm, "valid_loss", label, look) for arm, (label, look) in arms.items()]
        panels.append(Panel(f"dropout {share}", tuple(lines)))
    caption = f"Validation loss of AP2, each at its best rate. {BANDS}"
    return Figure("dropout", "Dropout and the statistics", caption, tuple(panels), "epoch", "validation loss")


DROPOUT = Question(
    "dropout",
    "Should the statistics know of dropout?",
    (
        Arm(NONE, rates=DROPOUT_RATES),
        *(Arm(inside(share), rates=DROPOUT_RATES, factory=functools.partial(dropping, share)) for share in SHARES),
        *(Arm(outside(share), rates=DROPOUT_RATES, change=functools.partial(drop_unseen, share)) for share in SHARES),
    ),
    experiment(epochs=8),
    tuple(claim for share in SHARES for claim in _claims_of_dropout(share)),
    _dropout_figure,
)


# --- scale decay: What does decay of scale and shift do?

METHODS: dict[str, tuple[Method, Start, tuple[str, ...]]] = {
    "AP2": ("analytic", "ap2", (".scale", ".shift")),
    "BN": ("batch", "bn", ("norm.weight", "norm.bias")),
}
DECAYED = "decay of scale and shift"


def scale_decay_arm(method: str, decayed: bool) -> str:
    """Its arm."""
    return f"{method}, {DECAYED}" if decayed else method


def biases(model: nn.Module, images: Tensor) -> Run:
    """Lengths of all shifts of hidden layers, and of the biases of the plain network of equal function."""
    shifts = [layer.shift for layer in normalized_layers(model).values()][:-1]
    plain = [layer.bias for layer in vp.fold(model).modules() if isinstance(layer, nn.Linear)][:-1]
    return {"shifts": _length(shifts), "effective": _length(plain)}


def _length(vectors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(vector.detach().square().sum()) for vector in vectors))


def _achieves_nothing(method: str) -> Rule:
    def rule(records: Records) -> Judgement:
        plain, decayed = (records.last(scale_decay_arm(method, d), "valid_error") for d in (False, True))
        verdict = at_most(plain, decayed, ACCURACY_TOLERANCE)
        return Judgement(verdict, (f"validation error {decayed.percent()} with, {plain.percent()} without",))

    return rule


def _shortens(name: str) -> Rule:
    def rule(records: Records) -> Judgement:
        plain, decayed = (records.last(scale_decay_arm("AP2", d), name) for d in (False, True))
        return Judgement(lower(decayed, plain), (f"{decayed.text()} with, {plain.text()} without",))

    return rule


def _claims_of_scale_decay() -> Claims:
    for method in METHODS:
        yield (
            f"{method}: without {DECAYED} the validation error is at most {POINT} above that with it",
            _achieves_nothing(method),
        )
    for method in METHODS:
        pair = (scale_decay_arm(method, True), TRAINED), (scale_decay_arm(method, False), TRAINED)
        yield f"{method}: {DECAYED} ends at a lower training loss", is_lower(pair)
    yield f"AP2: {DECAYED} makes shifts shorter", _shortens("shifts")
    yield f"AP2: {DECAYED} makes the biases of the plain network of equal function shorter", _shortens("effective")


def _scale_decay_figure(records: Records) -> Figure:
    panels = []
    for method in METHODS:
        lines = [
            curve(records, scale_decay_arm(method, decayed), "valid_loss", text, look)
            for decayed, text, look in ((False, "without", 0), (True, "with decay", 3))
        ]
        panels.append(Panel(method, tuple(lines)))
    caption = f"Validation loss, each at its best rate. {BANDS}"
    return Figure("scale-decay", "Decay of scale and shift", caption, tuple(panels), "epoch", "validation loss")


SCALE_DECAY = Question(
    "scale-decay",
    "What does decay of scale and shift do?",
    tuple(
        Arm(
            scale_decay_arm(method, decayed),
            kind,
            start,
            measure=biases if kind == "analytic" else None,
            decayed=names if decayed else (),
        )
        for method, (kind, start, names) in METHODS.items()
        for decayed in (False, True)
    ),
    experiment(epochs=10),
    tuple(_claims_of_scale_decay()),
    _scale_decay_figure,
    seeds=5,
)
