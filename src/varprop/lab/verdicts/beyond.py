"""Rules on what the paper hypothesizes or says in footnotes: orthogonal weights, decay, projection, small batches."""

from __future__ import annotations

from ..protocol.experiments import DECAY, PAPER_BATCH, UNIT_NORM
from ..protocol.labels import method_label
from ..protocol.records import METHODS, TRAIN_LOSS
from .batch_norm import ACCURACY_TOLERANCE
from .curves import roughness
from .evidence import FAILS, Evidence, Judgement, at_most, joined, lower, no_data
from .seed_statistics import Metric, Sample, final, final_error

AS_GOOD = 0.02  # of the training loss
SMALL_BATCHES = (4, 16)
_DECAY = "varprop reproduce decay --seeds 3"
_SMALL = "varprop reproduce small-batches --seeds 3"


def orthogonal_helps(evidence: Evidence) -> Judgement:
    """AP2's training loss from the projection of orthogonal weights against that of random ones."""
    texts, verdict = [], None
    for method in METHODS:
        random, orthogonal = (
            evidence.sample("orthogonal", method, start, final(TRAIN_LOSS)) for start in ("ap2", "orthogonal")
        )
        if random is None or orthogonal is None:
            return no_data("varprop reproduce orthogonal --seeds 3", f"{method_label(method)} was not run from both")
        found = lower(orthogonal, random)
        verdict = found if method == "analytic" else verdict
        texts.append(f"{method_label(method)}: {orthogonal.text()} from orthogonal, {random.text()} random: {found}")
    assert verdict is not None
    return Judgement(verdict, tuple(texts))


def _with_and_without(evidence: Evidence, method: str, variants: tuple[str, str], metric: Metric) -> list[Sample]:
    found = [evidence.sample("decay", method, "ap2", metric, variant) for variant in variants]
    return [sample for sample in found if sample is not None]


def decay_achieves_nothing(evidence: Evidence) -> Judgement:
    """Validation with decay on scale-invariant weights is better by no more than the tolerance."""
    parts = []
    for method in ("weight", "batch", "analytic"):
        samples = _with_and_without(evidence, method, ("", DECAY), final_error)
        if len(samples) < 2:
            return no_data(_DECAY)
        plain, decayed = samples
        text = f"{decayed.text(3, 100, ' %')} with, {plain.text(3, 100, ' %')} without"
        found = at_most(plain, decayed, ACCURACY_TOLERANCE)
        parts.append(Judgement(found, (f"validation error, {method_label(method)}: {text}: {found}",)))
    return joined(parts)


def decay_destabilizes(evidence: Evidence) -> Judgement:
    """The training loss is rougher with decay."""
    parts = []
    for method in ("weight", "batch", "analytic"):
        samples = _with_and_without(evidence, method, ("", DECAY), roughness(TRAIN_LOSS))
        if len(samples) < 2:
            return no_data(_DECAY)
        plain, decayed = samples
        found = lower(plain, decayed)
        text = f"{decayed.text()} with decay, {plain.text()} without: {found}"
        parts.append(Judgement(found, (f"roughness, {method_label(method)}: {text}",)))
    return joined(parts)


def projection_replaces_decay(evidence: Evidence) -> Judgement:
    """Weights projected to unit norm train at least as well as decaying ones."""
    parts = []
    for method in ("weight", "analytic"):
        samples = _with_and_without(evidence, method, (UNIT_NORM, DECAY), final(TRAIN_LOSS))
        if len(samples) < 2:
            return no_data(_DECAY)
        projected, decayed = samples
        worse = lower(projected, decayed) == FAILS
        found = FAILS if worse else at_most(projected, decayed, AS_GOOD * decayed.mean)
        neither = evidence.sample("decay", method, "ap2", final(TRAIN_LOSS))
        beside = [
            _higher(projected, decayed, "with decay"),
            *([_higher(projected, neither, "with neither")] if neither else []),
        ]
        text = f"{projected.text()} projected, {', '.join(beside)}: {found}"
        parts.append(Judgement(found, (f"training loss, {method_label(method)}: {text}",)))
    return joined(parts)


def _higher(sample: Sample, other: Sample, name: str) -> str:
    """The other, and in how many seeds the sample is above it."""
    common = [seed for seed in sample.by_seed if seed in other.by_seed]
    count = sum(sample.by_seed[seed] > other.by_seed[seed] for seed in common)
    return f"{other.text()} {name} (lower in {count} of {len(common)})"


def analytic_needs_no_large_batch(evidence: Evidence) -> Judgement:
    """AP2's validation error with small batches is not above that with 128 by more than the tolerance."""
    parts = []
    for size in SMALL_BATCHES:
        samples = _small_and_usual(evidence, "analytic", size)
        if len(samples) < 2:
            return no_data(_SMALL)
        small, usual = samples
        found = at_most(small, usual, ACCURACY_TOLERANCE)
        parts.append(Judgement(found, (_batches_line("analytic", size, samples, found),)))
    return joined(parts)


def batch_norm_needs_one(evidence: Evidence) -> Judgement:
    """Batch norm's validation error is higher with small batches."""
    parts = []
    for size in SMALL_BATCHES:
        samples = _small_and_usual(evidence, "batch", size)
        if len(samples) < 2:
            return no_data(_SMALL)
        small, usual = samples
        found = lower(usual, small)
        parts.append(Judgement(found, (_batches_line("batch", size, samples, found),)))
    return joined(parts)


def _small_and_usual(evidence: Evidence, method: str, size: int) -> list[Sample]:
    sizes = (size, PAPER_BATCH)
    found = [evidence.sample("small-batches", method, "bn", final_error, batch_size=size) for size in sizes]
    return [sample for sample in found if sample is not None]


def _batches_line(method: str, size: int, samples: list[Sample], found: str) -> str:
    small, usual = (sample.text(3, 100, " %") for sample in samples)
    return f"validation error, {method_label(method)}: {small} with batches of {size}, {usual} with 128: {found}"
