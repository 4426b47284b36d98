"""Claims on batch norm: its stability, learning rate and generalization; and on what the paper has in footnotes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...protocol import (
    DECAY,
    METHODS,
    PAPER_BATCH,
    PAPER_GRIDS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    TRAIN_STILL_LOSS,
    UNIT_NORM,
    VALID_BATCH_ACCURACY,
    VALID_LOSS,
    experiment_label,
    method_label,
    start_label,
)
from ...seed_statistics import (
    FAILS,
    Metric,
    Sample,
    at_most,
    final,
    final_error,
    generalization_gap,
    log_rate,
    lower,
    within,
)
from .evidence import MISSING, ROUGH, Evidence, Judgement, all_of, claim, each, judged, most_of, roughness

OTHERS = [method for method in METHODS if method != "batch"]
TEN_TIMES = -0.5  # of the decimal logarithm: nearer to a tenth than to the same rate
ACCURACY_TOLERANCE = 0.01
POINT = f"{100 * ACCURACY_TOLERANCE:.0f} percentage point"
LOSS_TOLERANCE = 0.10


@claim(
    "bn-unstable",
    "BN is unstable from other starts than its own",
    "A case is an experiment run and a start, init = None or init = AP2; it counts as unstable by the rule of the "
    "claim that BN oscillates. Holds when at least half of the cases are; does not hold when they would be fewer even "
    "if all undecided ones were.",
    "mnist/training",
    PAPER_GRIDS,
)
def _unstable_from_other_starts(evidence: Evidence) -> Judgement:
    cases = [(experiment, start) for experiment in evidence.ran(PAPER_GRIDS) for start in ("none", "ap2")]
    judgements = [judged(lambda case: _rougher_than_at_home(evidence, *case), case) for case in cases]
    verdicts = [judgement.verdict for judgement in judgements]
    lines = tuple(line for judgement in judgements for line in judgement.measured)
    return Judgement(MISSING if MISSING in verdicts else most_of(verdicts), lines)


@claim(
    "bn-oscillates",
    "From AP2's start BN oscillates",
    "On MNIST BN's running training loss and its evaluation-mode loss are both rougher from init = AP2 than from "
    f"init = BN, by more than the noise; {ROUGH}.",
    "mnist/training",
    experiment="mnist",
    start="ap2",
)
def _rougher_than_at_home(evidence: Evidence, experiment: str, start: str) -> Judgement:
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    away, home = (experiment, "batch", start), (experiment, "batch", "bn")
    return _rougher(evidence, away, home, where, "from its own start")


@claim(
    "bn-stochastic",
    "BN's behavior is more stochastic than that of other methods",
    "On MNIST from init = BN: BN's running training loss and its evaluation-mode loss are both rougher than those of "
    f"Standard, of WN and of AP2, by more than the noise; {ROUGH}.",
    "mnist/training",
    cases=OTHERS,
)
def _rougher_than_others(evidence: Evidence, method: str) -> Judgement:
    batch, against = ("mnist", "batch", "bn"), ("mnist", method, "bn")
    return _rougher(evidence, batch, against, "BN", f"of {method_label(method)}")


def _rougher(
    evidence: Evidence, cell: tuple[str, str, str], baseline: tuple[str, str, str], name: str, baseline_name: str
) -> Judgement:
    """Judge if both training losses of a cell are rougher than those of another."""
    verdicts, texts = [], []
    for curve, mode in ((TRAIN_LOSS, "in batches"), (TRAIN_EVAL_LOSS, "in evaluation")):
        sample, against = (evidence.sample(*which, roughness(curve)) for which in (cell, baseline))
        verdicts.append(lower(against, sample))
        texts.append(f"{mode} {sample.text()} against {against.text()} {baseline_name}: {verdicts[-1]}")
    return Judgement(all_of(verdicts), (f"{name}, roughness {'; '.join(texts)}",))


@claim(
    "bn-smaller-rate",
    "From AP2's start BN wants a learning rate smaller by an order of magnitude than from its own",
    "On MNIST, seed by seed: the decimal logarithm of the rate found from init = AP2 is below that from init = BN "
    "by at least 0.5 (nearer to a tenth than to the same), with the noise to spare.",
    "mnist/learning-rate",
)
def _wants_a_smaller_rate(evidence: Evidence) -> Judgement:
    at_home, away = (evidence.sample("mnist", "batch", start, log_rate) for start in ("bn", "ap2"))
    rates = "; ".join(
        f"{start_label(start)} {', '.join(f'{10**log:.2g}' for log in logs.values)}"
        for start, logs in (("ap2", away), ("bn", at_home))
    )
    ratio = f"ratio of their geometric means {10 ** (away.mean - at_home.mean):.2g}"
    return Judgement(at_most(away, at_home, TEN_TIMES), (f"rates found, seed by seed: {rates}; {ratio}",))


@claim(
    "bn-boost",
    "On noisy CIFAR-10 BN generalizes better with accumulated statistics than with those of batches",
    "From every start, BN's final validation error in evaluation mode is lower than with the statistics of batches "
    "of the training's size, by more than the noise. MNIST and noisy MNIST are given for comparison.",
    "noisy-cifar10/validation-accuracy",
)
def _boost_in_evaluation(evidence: Evidence) -> Judgement:
    judgement, beside = (
        each(lambda case: _better_in_evaluation(evidence, *case), [(e, start) for e in experiments for start in STARTS])
        for experiments in (("noisy-cifar10",), ("mnist", "noisy-mnist"))
    )
    return Judgement(judgement.verdict, (*judgement.measured, *beside.measured))


def _better_in_evaluation(evidence: Evidence, experiment: str, start: str) -> Judgement:
    metrics = (final_error, functools.partial(final_error, curve=VALID_BATCH_ACCURACY))
    running, batches = (evidence.sample(experiment, "batch", start, metric) for metric in metrics)
    verdict = lower(running, batches)
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    texts = f"{running.percent()} in evaluation mode, {batches.percent()} in batches: {verdict}"
    return Judgement(verdict, (f"validation error, {where}: {texts}",))


_GAP = (
    "From init = BN, as in the paper's figure: the final validation loss less the loss on the training images, both in "
    "evaluation mode and without offsets, is lower for BN than for each other method by more than the noise"
)


@claim(
    "bn-overfits-less",
    "On clean MNIST BN shows less overfitting",
    f"{_GAP}; at one rate, about what the search finds.",
    "overfitting/validation-loss",
    experiment="overfitting",
    training=TRAIN_STILL_LOSS,
)
@claim(
    "bn-overfits-less-still",
    "On MNIST without offsets BN shows less overfitting",
    f"{_GAP}; a question of ours, at one rate.",
    "still-mnist/validation-loss",
    experiment="still-mnist",
    training=TRAIN_EVAL_LOSS,
)
def _overfits_less(evidence: Evidence, experiment: str, training: str) -> Judgement:
    gaps = {method: evidence.sample(experiment, method, "bn", generalization_gap(training)) for method in METHODS}
    verdicts = {method: lower(gaps["batch"], gaps[method]) for method in OTHERS}
    texts = ", ".join(f"{method_label(method)} {gap.text()}" for method, gap in gaps.items())
    against = ", ".join(f"{method_label(method)} {verdict}" for method, verdict in verdicts.items())
    return Judgement(all_of(verdicts.values()), (f"validation less training loss: {texts}", f"against: {against}"))


_GENERALIZES = (
    "From init = BN, as in the paper's figure: both the final validation loss and the final validation error of BN "
    "are lower than those of each other method by more than the noise"
)


@claim(
    "bn-generalizes",
    "BN generalizes better on clean MNIST than the others, AP2 included",
    f"{_GENERALIZES}.",
    "mnist/validation-accuracy",
    experiment="mnist",
)
@claim(
    "bn-generalizes-still",
    "On MNIST without offsets BN generalizes better than the others, AP2 included",
    f"{_GENERALIZES}; a question of ours, at one rate.",
    "still-mnist/validation-accuracy",
    experiment="still-mnist",
)
def _generalizes(evidence: Evidence, experiment: str) -> Judgement:
    return _compare_validation(evidence, experiment, OTHERS, lambda a, b, _: lower(a, b))


@claim(
    "on-par",
    "On noisy MNIST AP2 is on par with BN in validation",
    f"From init = BN, as in the paper's figure: the final validation errors differ by at most {POINT} and the losses "
    f"by at most {LOSS_TOLERANCE:.0%} of BN's, with the noise to spare. Does not hold when either difference "
    "exceeds that by more than the noise, whoever is better.",
    "noisy-mnist/validation-accuracy",
)
def _on_par(evidence: Evidence) -> Judgement:
    def judge(batch: Sample, analytic: Sample, metric: Metric) -> str:
        return within(batch, analytic, ACCURACY_TOLERANCE if metric is final_error else LOSS_TOLERANCE * batch.mean)

    return _compare_validation(evidence, "noisy-mnist", ["analytic"], judge)


def _compare_validation(
    evidence: Evidence, experiment: str, methods: Sequence[str], judge: Callable[[Sample, Sample, Metric], str]
) -> Judgement:
    """Batch norm against others in validation loss and error, from batch norm's start as in the paper's figures."""
    verdicts, lines = [], []
    for metric, name in ((final(VALID_LOSS), "loss"), (final_error, "error")):
        samples = {method: evidence.sample(experiment, method, "bn", metric) for method in ("batch", *methods)}
        verdicts += [judge(samples["batch"], samples[method], metric) for method in methods]
        ends = {m: sample.percent() if metric is final_error else sample.text() for m, sample in samples.items()}
        lines.append(f"validation {name}: {', '.join(f'{method_label(m)} {end}' for m, end in ends.items())}")
    return Judgement(all_of(verdicts), tuple(lines))


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
        verdict = verdicts[method] = lower(orthogonal, random)
        texts.append(f"{method_label(method)}: {orthogonal.text()} from orthogonal, {random.text()} random: {verdict}")
    return Judgement(verdicts["analytic"], tuple(texts))


def _decayed_and(evidence: Evidence, variant: str, method: str, metric: Metric) -> tuple[Sample, Sample]:
    decayed, varied = (evidence.sample("decay", method, "ap2", metric, v) for v in (DECAY, variant))
    return decayed, varied


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
    verdict = at_most(plain, decayed, ACCURACY_TOLERANCE)
    text = f"{decayed.percent()} with, {plain.percent()} without: {verdict}"
    return Judgement(verdict, (f"validation error, {method_label(method)}: {text}",))


@claim(
    "decay-destabilizes",
    "Decay on scale-invariant weights destabilizes the learning",
    f"For WN, BN and AP2 the running training loss with decay is rougher than without by more than the noise; {ROUGH}.",
    "decay/training",
    cases=("weight", "batch", "analytic"),
)
def _decay_destabilizes(evidence: Evidence, method: str) -> Judgement:
    decayed, plain = _decayed_and(evidence, "", method, roughness(TRAIN_LOSS))
    verdict = lower(plain, decayed)
    text = f"{decayed.text()} with decay, {plain.text()} without: {verdict}"
    return Judgement(verdict, (f"roughness, {method_label(method)}: {text}",))


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
    verdict = lower(projected, decayed)
    if verdict != FAILS:
        verdict = at_most(projected, decayed, AS_GOOD * decayed.mean)
    neither = evidence.find("decay", method, "ap2", final(TRAIN_LOSS))
    beside = {"with decay": decayed} | ({"with neither": neither} if neither else {})
    texts = ", ".join(_higher(projected, compared, name) for name, compared in beside.items())
    return Judgement(
        verdict, (f"training loss, {method_label(method)}: {projected.text()} projected, {texts}: {verdict}",)
    )


def _higher(sample: Sample, compared: Sample, name: str) -> str:
    """The other, and in how many seeds the sample is above it."""
    common = [seed for seed in sample.by_seed if seed in compared.by_seed]
    count = sum(sample.by_seed[seed] > compared.by_seed[seed] for seed in common)
    return f"{compared.text()} {name} (lower in {count} of {len(common)})"


@claim(
    "ap2-batch-size-training",
    "AP2 does not depend on the batch size: small ones do not harm convergence",
    f"With batches of 4 and of 16 its final running training loss is at most {AS_GOOD:.0%} above that with 128, with "
    "the noise to spare. All runs see the same number of samples.",
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
    "All runs see the same number of samples.",
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
    outcome = verdict(small, usual)
    name, text = ("validation error", Sample.percent) if metric is final_error else ("training loss", Sample.text)
    line = f"{name}, {method_label(method)}: {text(small)} with batches of {size}, {text(usual)} with 128: {outcome}"
    return Judgement(outcome, (line,))
