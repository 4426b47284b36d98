"""Claims that the paper hypothesizes or has in footnotes: orthogonal weights, decay, projection, small batches."""

from __future__ import annotations

from collections.abc import Callable

from ...protocol.experiments import DECAY, PAPER_BATCH, UNIT_NORM
from ...protocol.labels import method_label
from ...protocol.records import METHODS, TRAIN_LOSS
from ...seed_statistics import FAILS, Metric, Sample, at_most, final, final_error, lower
from .batch_norm import ACCURACY_TOLERANCE, POINT
from .claims import claim
from .curves import ROUGH, roughness
from .evidence import Evidence, Judgement

AS_GOOD = 0.02  # of the training loss
SMALL_BATCHES = (4, 16)


@claim(
    "orthogonal",
    "AP2 may benefit from orthogonal weights",
    "AP2's final running training loss from the projection of orthogonal weights is lower than from that of random "
    "ones by more than the noise; the other methods are given beside it.",
    "orthogonal/training",
)
def _orthogonal_helps(evidence: Evidence) -> Judgement:
    verdicts, texts = {}, []
    for method in METHODS:
        starts = ("ap2", "orthogonal")
        random, orthogonal = (evidence.sample("orthogonal", method, start, final(TRAIN_LOSS)) for start in starts)
        found = verdicts[method] = lower(orthogonal, random)
        texts.append(f"{method_label(method)}: {orthogonal.text()} from orthogonal, {random.text()} random: {found}")
    return Judgement(verdicts["analytic"], tuple(texts))


def _decayed_and(evidence: Evidence, variant: str, method: str, metric: Metric) -> tuple[Sample, Sample]:
    decayed, other = (evidence.sample("decay", method, "ap2", metric, v) for v in (DECAY, variant))
    return decayed, other


@claim(
    "decay-nothing",
    "Decay on scale-invariant weights achieves nothing",
    f"For WN, BN and AP2 the final validation error without decay is above that with it by at most {POINT}, with the "
    "noise to spare.",
    "decay/validation-accuracy",
    cases=("weight", "batch", "analytic"),
)
def _decay_achieves_nothing(evidence: Evidence, method: str) -> Judgement:
    decayed, plain = _decayed_and(evidence, "", method, final_error)
    found = at_most(plain, decayed, ACCURACY_TOLERANCE)
    text = f"{decayed.percent()} with, {plain.percent()} without: {found}"
    return Judgement(found, (f"validation error, {method_label(method)}: {text}",))


@claim(
    "decay-destabilizes",
    "Decay on scale-invariant weights destabilizes the learning",
    f"For WN, BN and AP2 the running training loss with decay is rougher than without by more than the noise; {ROUGH}.",
    "decay/training",
    cases=("weight", "batch", "analytic"),
)
def _decay_destabilizes(evidence: Evidence, method: str) -> Judgement:
    decayed, plain = _decayed_and(evidence, "", method, roughness(TRAIN_LOSS))
    found = lower(plain, decayed)
    text = f"{decayed.text()} with decay, {plain.text()} without: {found}"
    return Judgement(found, (f"roughness, {method_label(method)}: {text}",))


@claim(
    "projection",
    "Projection to unit norm does in a simpler way what decay does (footnote)",
    f"For WN and AP2 the final running training loss with projection is at most {AS_GOOD:.0%} above that with decay, "
    "with the noise to spare; does not hold when it is higher by more than the noise.",
    "decay/training",
    cases=("weight", "analytic"),
)
def _projection_replaces_decay(evidence: Evidence, method: str) -> Judgement:
    decayed, projected = _decayed_and(evidence, UNIT_NORM, method, final(TRAIN_LOSS))
    worse = lower(projected, decayed) == FAILS
    found = FAILS if worse else at_most(projected, decayed, AS_GOOD * decayed.mean)
    neither = evidence.find("decay", method, "ap2", final(TRAIN_LOSS))
    beside = {"with decay": decayed} | ({"with neither": neither} if neither else {})
    texts = ", ".join(_higher(projected, other, name) for name, other in beside.items())
    return Judgement(found, (f"training loss, {method_label(method)}: {projected.text()} projected, {texts}: {found}",))


def _higher(sample: Sample, other: Sample, name: str) -> str:
    """The other, and in how many seeds the sample is above it."""
    common = [seed for seed in sample.by_seed if seed in other.by_seed]
    count = sum(sample.by_seed[seed] > other.by_seed[seed] for seed in common)
    return f"{other.text()} {name} (lower in {count} of {len(common)})"


@claim(
    "ap2-batch-size-training",
    "AP2 does not depend on the batch size: small ones do not harm convergence",
    f"With batches of 4 and of 16 its final running training loss is at most {AS_GOOD:.0%} above that with 128, with "
    "the noise to spare. All see equally many samples.",
    "small-batches/batch-size-training",
    cases=SMALL_BATCHES,
    method="analytic",
    metric=final(TRAIN_LOSS),
    verdict=lambda small, usual: at_most(small, usual, AS_GOOD * usual.mean),
)
@claim(
    "ap2-batch-size-validation",
    "AP2 does not depend on the batch size: small ones do not harm generalization",
    f"With batches of 4 and of 16 its final validation error is above that with 128 by at most {POINT}, with the noise "
    "to spare.",
    "small-batches/batch-size-validation-accuracy",
    cases=SMALL_BATCHES,
    method="analytic",
    metric=final_error,
    verdict=lambda small, usual: at_most(small, usual, ACCURACY_TOLERANCE),
)
@claim(
    "bn-batch-size-training",
    "BN's batch size affects convergence: it loses with batches of 4 and of 16",
    "Its final running training loss is higher with batches of 4, and of 16, than with 128, by more than the noise. "
    "All see equally many samples.",
    "small-batches/batch-size-training",
    cases=SMALL_BATCHES,
    method="batch",
    metric=final(TRAIN_LOSS),
    verdict=lambda small, usual: lower(usual, small),
)
@claim(
    "bn-batch-size-validation",
    "BN's batch size affects generalization: it loses with batches of 4 and of 16",
    "Its final validation error is higher with batches of 4, and of 16, than with 128, by more than the noise.",
    "small-batches/batch-size-validation-accuracy",
    cases=SMALL_BATCHES,
    method="batch",
    metric=final_error,
    verdict=lambda small, usual: lower(usual, small),
)
def _small_batches(
    evidence: Evidence, size: int, method: str, metric: Metric, verdict: Callable[[Sample, Sample], str]
) -> Judgement:
    sizes = (size, PAPER_BATCH)
    small, usual = (evidence.sample("small-batches", method, "bn", metric, batch_size=b) for b in sizes)
    found = verdict(small, usual)
    name = "validation error" if metric is final_error else "training loss"
    texts = [sample.percent() if metric is final_error else sample.text() for sample in (small, usual)]
    line = f"{name}, {method_label(method)}: {texts[0]} with batches of {size}, {texts[1]} with 128: {found}"
    return Judgement(found, (line,))
