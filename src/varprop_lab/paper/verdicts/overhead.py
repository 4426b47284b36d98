"""What normalizations cost, read from the file that the benchmark leaves."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from ...seed_statistics import Sample, at_most, number
from .claims import claim
from .evidence import MISSING, Evidence, Judgement, each, opposite

LITTLE = 0.05  # of the step without normalization
SIMILAR = 0.10
CONVOLUTIONAL = ("cifar", "resnet50", "unet")  # cases of the benchmark
NAMES = {"none": "Standard", "weight": "WN", "batch": "BN", "analytic": "AP2"}
Steps = dict[str, Sample]  # seconds of a step in every round, by variant
Limit = Callable[[Sample, Sample], str]
_FOR_EVERY = (
    "For every convolutional network and mode of `varprop bench`, round by round (shares are medians over rounds) and "
    "with the noise to spare:"
)
_STANDARD = "the same network without normalization, which has biases instead"


def _at_most_above(share: float) -> Limit:
    return lambda own, other: at_most(own, other.map(lambda seconds: (1 + share) * seconds), 0.0)


@claim(
    "bn-overhead",
    "BN's computation overhead is not negligible (the paper cites up to 25 %)",
    f"{_FOR_EVERY} the time of a training step with BN is more than {LITTLE:.0%} above that of {_STANDARD}.",
    variant="batch",
    against="none",
    limit=lambda own, other: opposite(_at_most_above(LITTLE)(own, other)),
)
@claim(
    "overhead",
    "The proposed normalization has very little overhead for CNNs, also considering back-propagation",
    f"{_FOR_EVERY} the time of a training step with AP2 is at most {LITTLE:.0%} above that of {_STANDARD}. Other "
    "networks are given for comparison.",
    variant="analytic",
    against="none",
    limit=_at_most_above(LITTLE),
)
@claim(
    "overhead-bn",
    "In CNNs the proposed normalization costs less than BN",
    f"{_FOR_EVERY} the time of a training step with AP2 is at most that with BN. Other networks are given for "
    "comparison.",
    variant="analytic",
    against="batch",
    limit=_at_most_above(0.0),
)
@claim(
    "overhead-wn",
    "In CNNs the complexity of the proposed normalization is similar to that of weight normalization",
    f"{_FOR_EVERY} the time of a training step with AP2 is at most {SIMILAR:.0%} above that with WN, where that was "
    "measured.",
    variant="analytic",
    against="weight",
    limit=_at_most_above(SIMILAR),
)
def overhead(evidence: Evidence, variant: str, against: str, limit: Limit) -> Judgement:
    """One variant against another, by the first file of the benchmark that exists."""
    file = next((file for file in evidence.benchmarks if file.is_file()), None)
    if file is None:
        return Judgement(MISSING, ("no benchmark was found", "to be made by: varprop bench"))
    try:
        measured = _read(file)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Judgement(MISSING, (f"{file} was not understood ({type(error).__name__}: {error})",))
    both = {where: steps for where, steps in measured.items() if {variant, against} <= steps.keys()}
    convolutional = [where for where in both if where[0] in CONVOLUTIONAL]
    names = f"{NAMES[variant]} and {NAMES[against]}"
    missing = () if convolutional else (f"{names} were not both measured in a convolutional network",)

    def compare(where: tuple[str, str]) -> Judgement:
        own, other = both[where][variant], both[where][against]
        verdict = limit(own, other)
        return Judgement(verdict, (f"{where[1]}: {_line(variant, own, against, other)}: {verdict}",))

    found = each(compare, convolutional)
    rest = each(compare, [where for where in both if where not in convolutional])
    return Judgement(found.verdict, (*missing, *found.measured, *(f"for comparison: {line}" for line in rest.measured)))


def _read(file: Path) -> dict[tuple[str, str], Steps]:
    """The times by network and how it was run."""
    found: dict[tuple[str, str], Steps] = {}
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        where = f"{cell['title']}, batch {cell['batch']}, {cell['mode']} {cell['precision']}"
        if cell["rounds"]:
            found.setdefault((cell["case"], where), {})[cell["variant"]] = Sample(tuple(map(float, cell["rounds"])))
    return found


def _line(variant: str, own: Sample, against: str, other: Sample) -> str:
    pairs = ((variant, own), (against, other))
    texts = [f"{NAMES[name]} {1e3 * statistics.median(sample.values):.3g} ms" for name, sample in pairs]
    ratio = statistics.median(a / b for a, b in zip(own.values, other.values, strict=False))
    return f"{', '.join(texts)}, {number(abs(100 * (ratio - 1)), 2)} % {'less' if ratio < 1 else 'more'}"
