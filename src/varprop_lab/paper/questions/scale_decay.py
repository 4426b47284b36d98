"""What does decay of scale and shift do?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

import varprop as vp

from ...figures import Figure, Panel
from ...protocol import Method, Start
from ...seed_statistics import at_most, lower
from ...training import normalized_layers
from ..verdicts.batch_norm import ACCURACY_TOLERANCE, POINT
from ..verdicts.evidence import Judgement
from .runs import BANDS, TRAINED, Arm, Claims, Question, Records, Rule, Run, curve, experiment, is_lower

METHODS: dict[str, tuple[Method, Start, tuple[str, ...]]] = {
    "AP2": ("analytic", "ap2", (".scale", ".shift")),
    "BN": ("batch", "bn", ("norm.weight", "norm.bias")),
}
DECAYED = "decay of scale and shift"


def named(method: str, decayed: bool) -> str:
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
        plain, decayed = (records.last(named(method, d), "valid_error") for d in (False, True))
        verdict = at_most(plain, decayed, ACCURACY_TOLERANCE)
        return Judgement(verdict, (f"validation error {decayed.percent()} with, {plain.percent()} without",))

    return rule


def _shortens(name: str) -> Rule:
    def rule(records: Records) -> Judgement:
        plain, decayed = (records.last(named("AP2", d), name) for d in (False, True))
        return Judgement(lower(decayed, plain), (f"{decayed.text()} with, {plain.text()} without",))

    return rule


def _claims() -> Claims:
    for method in METHODS:
        yield (
            f"{method}: without {DECAYED} the validation error is at most {POINT} above that with it",
            _achieves_nothing(method),
        )
    for method in METHODS:
        pair = (named(method, True), TRAINED), (named(method, False), TRAINED)
        yield f"{method}: {DECAYED} ends at a lower training loss", is_lower(pair)
    yield f"AP2: {DECAYED} makes shifts shorter", _shortens("shifts")
    yield f"AP2: {DECAYED} makes the biases of the plain network of equal function shorter", _shortens("effective")


def _figure(records: Records) -> Figure:
    panels = []
    for method in METHODS:
        lines = [
            curve(records, named(method, decayed), "valid_loss", text, look)
            for decayed, text, look in ((False, "without", 0), (True, "with decay", 3))
        ]
        panels.append(Panel(method, tuple(lines)))
    caption = f"Validation loss, each at its best rate. {BANDS}"
    return Figure("scale-decay", "Decay of scale and shift", caption, tuple(panels), "epoch", "validation loss")


QUESTION = Question(
    "scale-decay",
    "What does decay of scale and shift do?",
    tuple(
        Arm(
            named(method, decayed),
            kind,
            start,
            measure=biases if kind == "analytic" else None,
            decayed=names if decayed else (),
        )
        for method, (kind, start, names) in METHODS.items()
        for decayed in (False, True)
    ),
    experiment(epochs=10),
    tuple(_claims()),
    _figure,
    seeds=5,
)
