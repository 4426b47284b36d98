"""Claims on training: which methods train from where, to what loss, and whether evaluation mode shows the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...protocol import (
    METHODS,
    MOMENTUM,
    PAPER_GRIDS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    TRAIN_STILL_LOSS,
    VALID_LOSS,
    experiment_label,
    method_label,
    start_label,
)
from ...seed_statistics import FAILS, HOLDS, NOISE, Metric, Sample, final, lower, number, within
from .evidence import (
    EARLY,
    LATE,
    MISSING,
    ROUGH,
    Evidence,
    Judgement,
    NotRun,
    Span,
    all_of,
    claim,
    each,
    evaluation_distance,
    evaluation_gap,
    in_every_seed,
    most_of,
    opposite,
    risen,
    rougher_in_evaluation,
)

GUESSING = math.log(10)  # the loss of ten equal probabilities; all data sets here have ten classes
TRAINED = 0.9  # of the way from guessing to the lowest mean loss of the experiment
NEAR_ZERO = 0.01 * GUESSING
RISEN = 0.10  # of the validation loss above its lowest value
TRAINED_RULE = (
    f"ends with a running training loss that has come {TRAINED:.0%} of the way from guessing (ln 10) to the lowest "
    "mean of any method from any start of the experiment"
)
Cells = Sequence[tuple[str, str]]  # methods and starts
ANALYTIC = [("analytic", start) for start in STARTS]


def trained_limit(evidence: Evidence, experiment: str) -> float:
    """The loss up to which a run of the experiment counts as trained."""
    samples = [evidence.find(experiment, m, start, final(TRAIN_LOSS)) for m in METHODS for start in STARTS]
    lowest = min((s.mean for s in samples if s is not None), default=math.inf)
    return GUESSING - TRAINED * (GUESSING - min(lowest, GUESSING / 2))  # where nothing trains, the best does not either


@claim(
    "trains",
    "AP2 trains from all three starts",
    f"In every experiment run, from each of the three starts, every seed {TRAINED_RULE}.",
    "mnist/training",
    PAPER_GRIDS,
    cells=ANALYTIC,
)
@claim(
    "others-from-ap2",
    "Standard and WN work from AP2's start",
    f"In every experiment run, from init = AP2, every seed of Standard and of WN {TRAINED_RULE}.",
    "mnist/training",
    PAPER_GRIDS,
    cells=[("standard", "ap2"), ("weight", "ap2")],
)
@claim(
    "all-from-bn",
    "With BN's initialization all methods train",
    f"On MNIST from init = BN every seed of each of the four methods {TRAINED_RULE}.",
    "mnist/training",
    cells=[(method, "bn") for method in METHODS],
    among=("mnist",),
)
def train(evidence: Evidence, cells: Cells, among: Sequence[str] = PAPER_GRIDS) -> Judgement:
    """Judge if these methods train from these starts, in every experiment that was run."""
    ran = evidence.ran(among)
    limits = {experiment: trained_limit(evidence, experiment) for experiment in ran}
    judgements = [_trains(evidence, e, method, start, limits[e]) for e in ran for method, start in cells]
    verdicts = [judgement.verdict for judgement in judgements]
    bounds = ", ".join(f"{experiment_label(e)} {number(limit)}" for e, limit in limits.items())
    count = f"{verdicts.count(HOLDS)} of {len(verdicts)} train in every seed (limits: {bounds})"
    failing = " ".join(_others_that_fail(evidence, limits, cells)) or "none"
    missing = [f"{experiment_label(experiment)}: not run" for experiment in among if experiment not in ran]
    lines = [line for judgement in judgements for line in judgement.measured]
    return Judgement(all_of(verdicts), (count, *lines, f"others that miss the limit in some seed: {failing}", *missing))


def _trains(evidence: Evidence, experiment: str, method: str, start: str, limit: float) -> Judgement:
    sample = evidence.find(experiment, method, start, final(TRAIN_LOSS))
    where = f"{experiment_label(experiment)}, {start_label(start)}: {method_label(method)}"
    if sample is None:
        return Judgement(MISSING, (f"{where} not run",))
    return Judgement(in_every_seed([value <= limit for value in sample.values]), (f"{where} {sample.text()}",))


def _others_that_fail(evidence: Evidence, limits: dict[str, float], cells: Cells) -> list[str]:
    """The other methods and starts of the experiments that miss their limit, in words."""
    texts = []
    beside = [(m, s) for s in STARTS for m in METHODS if (m, s) not in cells]
    for experiment, limit in limits.items():
        failed = [(m, s) for m, s in beside if _trains(evidence, experiment, m, s, limit).verdict in (FAILS, NOISE)]
        names = ", ".join(f"{method_label(m)} from {start_label(s)}" for m, s in failed)
        texts += [f"{experiment_label(experiment)}: {names};"] if names else []
    return texts


@claim(
    "hard-from-none",
    "From random weights the standard network is hard to train on MNIST, and BN performs better",
    f"On MNIST from init = None no seed of the standard network {TRAINED_RULE}; and BN's final running training loss "
    "is lower by more than the noise.",
    "mnist/training",
)
def _hard_from_random_weights(evidence: Evidence) -> Judgement:
    plain, batch = (evidence.sample("mnist", m, "none", final(TRAIN_LOSS)) for m in ("standard", "batch"))
    limit = trained_limit(evidence, "mnist")
    stuck = in_every_seed([value > limit for value in plain.values])
    lines = (f"Standard {plain.text()}: misses the limit of {number(limit)}: {stuck}", f"BN {batch.text()}")
    return Judgement(all_of([stuck, lower(batch, plain)]), lines)


@claim(
    "lower-loss",
    "AP2 reaches a lower training loss than the others in many cases",
    "A case is an experiment and a start run with all four methods. AP2 wins it when its final running training loss "
    "is lower than that of each other method by more than the noise. Holds when it wins at least half of the cases; "
    "does not hold when it would miss half even if it won all undecided ones.",
    "mnist/training",
    PAPER_GRIDS,
    metric=final(TRAIN_LOSS),
)
@claim(
    "lower-loss-evaluation",
    "AP2 reaches a lower training loss than the others in many cases: every method in evaluation mode",
    "The same with the loss on the training set in evaluation mode, where it was recorded for all four methods.",
    "mnist/training",
    PAPER_GRIDS,
    metric=final(TRAIN_EVAL_LOSS),
)
def _often_lowest(evidence: Evidence, metric: Metric) -> Judgement:
    texts = {HOLDS: "AP2 lowest", NOISE: "undecided", FAILS: "another is lower"}
    cases = [(e, start, _analytic_lowest(evidence, e, start, metric)) for e in PAPER_GRIDS for start in STARTS]
    verdicts = [verdict for _, _, verdict in cases if verdict != MISSING]
    if not verdicts:
        raise NotRun("no start was run and recorded with all four methods", *PAPER_GRIDS)
    names = [f"{experiment_label(e)}, {start_label(s)}: {texts[v]}" for e, s, v in cases if v != MISSING]
    count = f"lowest in {verdicts.count(HOLDS)} of {len(verdicts)} cases, undecided in {verdicts.count(NOISE)}"
    return Judgement(most_of(verdicts), (count, *names))


def _analytic_lowest(evidence: Evidence, experiment: str, start: str, metric: Metric) -> str:
    """Verdict on AP2 ending lower than each other method; no data unless all were run."""
    samples = {method: evidence.find(experiment, method, start, metric) for method in METHODS}
    analytic = samples.pop("analytic")
    if analytic is None or None in samples.values():
        return MISSING
    return all_of(lower(analytic, sample) for sample in samples.values() if sample is not None)


_ZERO = f"Every seed ends with a running training loss of at most {NEAR_ZERO:.3f}, 1 % of that of guessing"


@claim(
    "near-zero",
    "On MNIST AP2 brings the training loss close to zero from all three starts",
    f"{_ZERO}.",
    "mnist/training",
    cases=STARTS,
    experiment="mnist",
)
@claim(
    "near-zero-still",
    "On MNIST without offsets AP2 brings the training loss close to zero from all three starts",
    f"{_ZERO}; a question of ours, at one rate.",
    "still-mnist/training",
    cases=STARTS,
    experiment="still-mnist",
)
def _near_zero(evidence: Evidence, start: str, experiment: str) -> Judgement:
    sample = evidence.sample(experiment, "analytic", start, final(TRAIN_LOSS))
    verdict = in_every_seed([value <= NEAR_ZERO for value in sample.values])
    return Judgement(verdict, (f"AP2, {start_label(start)}: {sample.text()}",))


_OVERFITS = (
    "From every start, in every seed, the validation loss ends above the loss on the training images, in evaluation "
    f"mode and without offsets as validation images are, and more than {RISEN:.0%} above its own lowest value"
)


@claim(
    "overfits",
    "On MNIST AP2 overfits",
    f"{_OVERFITS}; at one rate, about what the search finds.",
    "overfitting/validation-loss",
    cases=STARTS,
    experiment="overfitting",
    training=TRAIN_STILL_LOSS,
)
@claim(
    "overfits-still",
    "On MNIST without offsets AP2 overfits",
    f"{_OVERFITS}; a question of ours, at one rate.",
    "still-mnist/validation-loss",
    cases=STARTS,
    experiment="still-mnist",
    training=TRAIN_EVAL_LOSS,
)
def _analytic_overfits(evidence: Evidence, start: str, experiment: str, training: str) -> Judgement:
    return _overfits(evidence, experiment, "analytic", start, training)


@claim(
    "noise-prevents",
    "On noisy MNIST overfitting does not occur",
    "From init = BN, as in the paper's figure, by the rule of the claim on overfitting, of all four methods, with the "
    "running training loss.",
    "noisy-mnist/validation-loss",
    cases=METHODS,
)
def _does_not_overfit_with_noise(evidence: Evidence, method: str) -> Judgement:
    judgement = _overfits(evidence, "noisy-mnist", method, "bn", TRAIN_LOSS)
    return Judgement(opposite(judgement.verdict), judgement.measured)


def _overfits(evidence: Evidence, experiment: str, method: str, start: str, training: str) -> Judgement:
    metrics = (risen, final(VALID_LOSS), final(training))
    rise, valid, train = (evidence.sample(experiment, method, start, metric) for metric in metrics)
    above = [v > t for v, t in zip(valid.values, train.values, strict=True)]
    verdict = in_every_seed([share > RISEN and higher for share, higher in zip(rise.values, above, strict=True)])
    texts = f"validation {valid.text()}, training {train.text()}, above its lowest by {rise.text(2, 100, ' %')}"
    return Judgement(verdict, (f"{method_label(method)}, {start_label(start)}: {texts}",))


@claim(
    "robust",
    "AP2 improves robustness to the start",
    "The highest final running training loss over the three starts divided by the lowest, seed by seed: AP2's is lower "
    "than that of each other method by more than the noise, in every experiment run.",
    "mnist/training",
    PAPER_GRIDS,
)
def _robust_to_the_start(evidence: Evidence) -> Judgement:
    def rule(experiment: str) -> Judgement:
        spreads = {m: evidence.spread(experiment, [(m, start) for start in STARTS]) for m in METHODS}
        verdict = all_of(lower(spreads["analytic"], spreads[m]) for m in METHODS if m != "analytic")
        texts = ", ".join(f"{method_label(method)} {spread.text()}" for method, spread in spreads.items())
        return Judgement(verdict, (f"{experiment_label(experiment)}, highest / lowest loss over starts: {texts}",))

    return each(rule, evidence.ran(PAPER_GRIDS))


EVALUATION_GAP = 0.10
ROUGHER = 2.0
SAME_TRAINING = 1e-3  # of the loss
SPANS: tuple[tuple[str, Span], ...] = (("in epochs 1 to 10", EARLY), ("after epoch 10", LATE))
_EVALUATION = (
    "Per seed, on MNIST: the gap is evaluation-mode training loss / running training loss - 1, corrected for the lag "
    "of the running mean (0.43 epochs). Its size, of either sign and by the mean of the logarithm over these epochs, "
    f"must be more than {EVALUATION_GAP:.0%}, and the evaluation-mode loss more than {ROUGHER:g} times as rough as "
    f"the running one ({ROUGH}). 'Above' or 'below' is by the median. Other starts are given for comparison."
)
_BETTER = "From init = BN BN's evaluation is better than its batch performance:"
_NEGATIVE = (
    "On MNIST the gap of the claims above on its evaluation, its median over these epochs, is negative by more than "
    "the noise."
)
_STOCHASTIC = "From init = None BN's evaluation is very stochastic and does not match its training:"


@claim(
    "running-matches",
    "For all methods but BN the running loss matches the loss on the whole training set",
    "On MNIST, from each of the three starts, in epochs 1 to 10 and after them: the size of the gap of the claims "
    f"below on BN's evaluation is at most {EVALUATION_GAP:.0%}, in every seed of Standard, WN and AP2. BN is given for "
    "comparison.",
    "mnist/training",
)
def _running_loss_matches(evidence: Evidence) -> Judgement:
    def rule(method: str) -> Judgement:
        return each(lambda start: matches(evidence, "mnist", method, start), STARTS)

    judgement = each(rule, [method for method in METHODS if method != "batch"])
    return Judgement(judgement.verdict, (*judgement.measured, *rule("batch").measured))


def matches(evidence: Evidence, experiment: str, method: str, start: str) -> Judgement:
    """Judge if the loss in evaluation mode is that of training, but for a small gap, in every seed."""
    gaps = [(name, *_gap_and_distance(evidence, experiment, method, start, span)) for name, span in SPANS]
    verdict = all_of(in_every_seed([far <= EVALUATION_GAP for far in away.values]) for _, _, away in gaps)
    texts = ", ".join(f"{_away(gap, away)} {name}" for name, gap, away in gaps)
    return Judgement(verdict, (f"{method_label(method)}, {start_label(start)}: {texts}: {verdict}",))


def _gap_and_distance(
    evidence: Evidence, experiment: str, method: str, start: str, span: Span
) -> tuple[Sample, Sample]:
    gap, away = (evidence.sample(experiment, method, start, m(span)) for m in (evaluation_gap, evaluation_distance))
    return gap, away


def _away(gap: Sample, away: Sample) -> str:
    return f"away by {away.percent()}, median {gap.percent()},"


@claim("bn-evaluation-early", f"{_STOCHASTIC} epochs 1 to 10", _EVALUATION, "mnist/training", span=EARLY)
@claim("bn-evaluation-late", f"{_STOCHASTIC} after epoch 10", _EVALUATION, "mnist/training", span=LATE)
def _evaluation_differs(evidence: Evidence, span: Span) -> Judgement:
    """Judge if batch norm's loss in evaluation mode is away from that in its batches, and rougher."""
    lines, verdicts = [], []
    for start in STARTS:
        if start != "none" and evidence.find("mnist", "batch", start, evaluation_gap(span)) is None:
            continue
        gap, away = _gap_and_distance(evidence, "mnist", "batch", start, span)
        rough = evidence.sample("mnist", "batch", start, rougher_in_evaluation(span))
        lines.append(f"{start_label(start)}: {_away(gap, away)} {rough.text()} times as rough")
        if start == "none":
            far = in_every_seed([value > EVALUATION_GAP for value in away.values])
            stochastic = in_every_seed([value > ROUGHER for value in rough.values])
            lines.append(f"does not match: {far}; stochastic: {stochastic}")
            verdicts += [far, stochastic]
    return Judgement(all_of(verdicts), tuple(lines))


@claim("bn-evaluation-better-early", f"{_BETTER} epochs 1 to 10", _NEGATIVE, "mnist/training", span=EARLY)
@claim("bn-evaluation-better-late", f"{_BETTER} after epoch 10", _NEGATIVE, "mnist/training", span=LATE)
def _evaluation_is_better(evidence: Evidence, span: Span) -> Judgement:
    gap = evidence.sample("mnist", "batch", "bn", evaluation_gap(span))
    return Judgement(lower(gap, gap.map(lambda _: 0.0)), (f"away by {gap.percent()}",))


@claim(
    "bn-momentum",
    "A smaller momentum of BN would help its evaluation, and does not affect training (footnote)",
    "BN on MNIST from init = None at one rate, with momentum 0.1 and 0.01: in epochs 1 to 10 the size of the gap and "
    "the roughness of its evaluation, measured as above, are lower with 0.01 by more than the noise, and the final "
    f"running training losses differ by at most {SAME_TRAINING:.1%}.",
    "momentum/training",
)
def _smaller_momentum_helps(evidence: Evidence) -> Judgement:
    metrics = {
        "away by": evaluation_distance(EARLY),
        "times as rough": rougher_in_evaluation(EARLY),
        "training loss": final(TRAIN_LOSS),
    }
    lines, verdicts = [], []
    for name, metric in metrics.items():
        small, usual = (evidence.sample("momentum", "batch", "none", metric, v) for v in (MOMENTUM, ""))
        same = name == "training loss"
        verdicts.append(within(small, usual, SAME_TRAINING * usual.mean) if same else lower(small, usual))
        lines.append(f"{name}: {small.text()} with 0.01, {usual.text()} with 0.1: {verdicts[-1]}")
    return Judgement(all_of(verdicts), tuple(lines))


@claim(
    "recurrent",
    "There is no limitation to apply AP2 in recurrent networks",
    f"In the recurrent network, from each of the three starts, every seed {TRAINED_RULE}; and its loss on the training "
    f"set in evaluation mode differs from the running loss, corrected for its lag, by at most "
    f"{EVALUATION_GAP:.0%} in epochs 1 to 10 and after them. (All methods pass the first, BN fails the second.)",
    "recurrent/training",
)
def _analytic_in_recurrent(evidence: Evidence) -> Judgement:
    trains = train(evidence, ANALYTIC, ("recurrent",))
    same = each(lambda start: matches(evidence, "recurrent", "analytic", start), STARTS)
    return Judgement(all_of([trains.verdict, same.verdict]), (*trains.measured, *same.measured))


@claim(
    "bn-recurrent",
    "BN's application to recurrent networks is problematic",
    "In the recurrent network, from every start and in every seed, the loss on the training set in evaluation mode "
    f"is more than {EVALUATION_GAP:.0%} above the running loss, corrected for its lag, after epoch 10.",
    "recurrent/training",
    cases=STARTS,
)
def _evaluation_fails_in_recurrent(evidence: Evidence, start: str) -> Judgement:
    gap = evidence.sample("recurrent", "batch", start, evaluation_gap(LATE))
    verdict = in_every_seed([value > EVALUATION_GAP for value in gap.values])
    return Judgement(verdict, (f"{start_label(start)}: away by {gap.percent()}",))
