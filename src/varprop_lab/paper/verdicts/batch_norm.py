"""Claims on batch norm: its stability, its learning rate, its generalization."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ...protocol.experiments import PAPER_GRIDS
from ...protocol.labels import experiment_label, method_label, start_label
from ...protocol.records import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_BATCH_ACCURACY, VALID_LOSS
from ...seed_statistics import Metric, Sample, at_most, final, final_error, generalization_gap, log_rate, lower, within
from .claims import claim
from .curves import ROUGH, roughness
from .evidence import MISSING, Evidence, Judgement, all_of, each, judged, most_of

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
    parts = [judged(lambda case: _rougher_than_at_home(evidence, *case), case) for case in cases]
    verdicts = [part.verdict for part in parts]
    lines = tuple(line for part in parts for line in part.measured)
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
    own, other = ("mnist", "batch", "bn"), ("mnist", method, "bn")
    return _rougher(evidence, own, other, "BN", f"of {method_label(method)}")


def _rougher(
    evidence: Evidence, cell: tuple[str, str, str], other: tuple[str, str, str], name: str, other_name: str
) -> Judgement:
    """Whether both training losses of a cell are rougher than those of another."""
    verdicts, texts = [], []
    for curve, mode in ((TRAIN_LOSS, "in batches"), (TRAIN_EVAL_LOSS, "in evaluation")):
        own, against = (evidence.sample(*which, roughness(curve)) for which in (cell, other))
        verdicts.append(lower(against, own))
        texts.append(f"{mode} {own.text()} against {against.text()} {other_name}: {verdicts[-1]}")
    return Judgement(all_of(verdicts), (f"{name}, roughness {'; '.join(texts)}",))


@claim(
    "bn-smaller-rate",
    "From AP2's start BN wants a learning rate smaller by an order of magnitude than from its own",
    "On MNIST, seed by seed: the decimal logarithm of the rate found from init = AP2 is below that from init = BN "
    "by at least 0.5 (nearer to a tenth than to the same), with the noise to spare.",
    "mnist/learning-rate",
)
def _wants_a_smaller_rate(evidence: Evidence) -> Judgement:
    own, other = (evidence.sample("mnist", "batch", start, log_rate) for start in ("bn", "ap2"))
    rates = "; ".join(
        f"{start_label(start)} {', '.join(f'{10**log:.2g}' for log in logs.values)}"
        for start, logs in (("ap2", other), ("bn", own))
    )
    ratio = f"ratio of their geometric means {10 ** (other.mean - own.mean):.2g}"
    return Judgement(at_most(other, own, TEN_TIMES), (f"rates found, seed by seed: {rates}; {ratio}",))


@claim(
    "bn-boost",
    "On noisy CIFAR-10 BN generalizes better with accumulated statistics than with those of batches",
    "From every start, BN's final validation error in evaluation mode is lower than with the statistics of batches "
    "of the training's size, by more than the noise. MNIST and noisy MNIST are given for comparison.",
    "noisy-cifar10/validation-accuracy",
)
def _boost_in_evaluation(evidence: Evidence) -> Judgement:
    found, beside = (
        each(lambda case: _better_in_evaluation(evidence, *case), [(e, start) for e in experiments for start in STARTS])
        for experiments in (("noisy-cifar10",), ("mnist", "noisy-mnist"))
    )
    return Judgement(found.verdict, (*found.measured, *beside.measured))


def _better_in_evaluation(evidence: Evidence, experiment: str, start: str) -> Judgement:
    metrics = (final_error, functools.partial(final_error, curve=VALID_BATCH_ACCURACY))
    running, batches = (evidence.sample(experiment, "batch", start, metric) for metric in metrics)
    verdict = lower(running, batches)
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    texts = f"{running.percent()} in evaluation mode, {batches.percent()} in batches: {verdict}"
    return Judgement(verdict, (f"validation error, {where}: {texts}",))


@claim(
    "bn-overfits-less",
    "On clean MNIST BN shows less overfitting",
    "From init = BN, as in the paper's figure: the final validation loss less the loss on the training set, both in "
    "evaluation mode, is lower for BN than for each other method by more than the noise. (Validation images are not "
    "shifted, training images are, so that all may be negative.)",
    "mnist/validation-loss",
)
def _overfits_less(evidence: Evidence) -> Judgement:
    gaps = {method: evidence.sample("mnist", method, "bn", generalization_gap) for method in METHODS}
    verdicts = {method: lower(gaps["batch"], gaps[method]) for method in OTHERS}
    texts = ", ".join(f"{method_label(method)} {gap.text()}" for method, gap in gaps.items())
    against = ", ".join(f"{method_label(method)} {verdict}" for method, verdict in verdicts.items())
    return Judgement(all_of(verdicts.values()), (f"validation less training loss: {texts}", f"against: {against}"))


@claim(
    "bn-generalizes",
    "BN generalizes better on clean MNIST than the others, AP2 included",
    "From init = BN, as in the paper's figure: both the final validation loss and the final validation error of BN "
    "are lower than those of each other method by more than the noise.",
    "mnist/validation-accuracy",
)
def _generalizes(evidence: Evidence) -> Judgement:
    return _compare_validation(evidence, "mnist", OTHERS, lambda own, other, _: lower(own, other))


@claim(
    "on-par",
    "On noisy MNIST AP2 is on par with BN in validation",
    f"From init = BN, as in the paper's figure: the final validation errors differ by at most {POINT} and the losses "
    f"by at most {LOSS_TOLERANCE:.0%} of BN's, with the noise to spare. Does not hold when either difference "
    "exceeds that by more than the noise, whoever is better.",
    "noisy-mnist/validation-accuracy",
)
def _on_par(evidence: Evidence) -> Judgement:
    def judge(own: Sample, other: Sample, metric: Metric) -> str:
        return within(own, other, ACCURACY_TOLERANCE if metric is final_error else LOSS_TOLERANCE * own.mean)

    return _compare_validation(evidence, "noisy-mnist", ["analytic"], judge)


def _compare_validation(
    evidence: Evidence, experiment: str, others: Sequence[str], judge: Callable[[Sample, Sample, Metric], str]
) -> Judgement:
    """Batch norm against others in validation loss and error, from batch norm's start as in the paper's figures."""
    verdicts, lines = [], []
    for metric, name in ((final(VALID_LOSS), "loss"), (final_error, "error")):
        samples = {method: evidence.sample(experiment, method, "bn", metric) for method in ("batch", *others)}
        verdicts += [judge(samples["batch"], samples[method], metric) for method in others]
        ends = {m: sample.percent() if metric is final_error else sample.text() for m, sample in samples.items()}
        lines.append(f"validation {name}: {', '.join(f'{method_label(m)} {end}' for m, end in ends.items())}")
    return Judgement(all_of(verdicts), tuple(lines))
