"""Claims on training: which methods train from where, to what loss, how far they depend on the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...protocol.experiments import PAPER_GRIDS
from ...protocol.labels import experiment_label, method_label, start_label
from ...protocol.records import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_LOSS
from ...seed_statistics import FAILS, HOLDS, NOISE, Metric, final, lower, number
from .claims import claim
from .curves import risen
from .evidence import MISSING, Evidence, Judgement, NotRun, all_of, each, in_every_seed, most_of, opposite

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
    """Whether these methods train from these starts, in every experiment that was run."""
    ran = evidence.ran(among)
    limits = {experiment: trained_limit(evidence, experiment) for experiment in ran}
    parts = [_trains(evidence, e, method, start, limits[e]) for e in ran for method, start in cells]
    verdicts = [part.verdict for part in parts]
    bounds = ", ".join(f"{experiment_label(e)} {number(limit)}" for e, limit in limits.items())
    count = f"{verdicts.count(HOLDS)} of {len(verdicts)} train in every seed (limits: {bounds})"
    rest = " ".join(_others_that_fail(evidence, limits, cells)) or "none"
    missing = [f"{experiment_label(experiment)}: not run" for experiment in among if experiment not in ran]
    lines = [line for part in parts for line in part.measured]
    return Judgement(all_of(verdicts), (count, *lines, f"others that miss the limit in some seed: {rest}", *missing))


def _trains(evidence: Evidence, experiment: str, method: str, start: str, limit: float) -> Judgement:
    sample = evidence.find(experiment, method, start, final(TRAIN_LOSS))
    where = f"{experiment_label(experiment)}, {start_label(start)}: {method_label(method)}"
    if sample is None:
        return Judgement(MISSING, (f"{where} not run",))
    return Judgement(in_every_seed([value <= limit for value in sample.values]), (f"{where} {sample.text()}",))


def _others_that_fail(evidence: Evidence, limits: dict[str, float], cells: Cells) -> list[str]:
    """What the limit tells apart: the other methods and starts of the same experiments that miss it."""
    found = []
    others = [(m, s) for s in STARTS for m in METHODS if (m, s) not in cells]
    for experiment, limit in limits.items():
        failed = [(m, s) for m, s in others if _trains(evidence, experiment, m, s, limit).verdict in (FAILS, NOISE)]
        names = ", ".join(f"{method_label(m)} from {start_label(s)}" for m, s in failed)
        found += [f"{experiment_label(experiment)}: {names};"] if names else []
    return found


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
    known = [verdict for _, _, verdict in cases if verdict != MISSING]
    if not known:
        raise NotRun("no start was run and recorded with all four methods", *PAPER_GRIDS)
    names = [f"{experiment_label(e)}, {start_label(s)}: {texts[v]}" for e, s, v in cases if v != MISSING]
    count = f"lowest in {known.count(HOLDS)} of {len(known)} cases, undecided in {known.count(NOISE)}"
    return Judgement(most_of(known), (count, *names))


def _analytic_lowest(evidence: Evidence, experiment: str, start: str, metric: Metric) -> str:
    """Whether AP2 ends lower than each other method; no data unless all were run."""
    samples = {method: evidence.find(experiment, method, start, metric) for method in METHODS}
    own = samples.pop("analytic")
    if own is None or None in samples.values():
        return MISSING
    return all_of(lower(own, other) for other in samples.values() if other is not None)


@claim(
    "near-zero",
    "On MNIST AP2 brings the training loss close to zero from all three starts",
    f"Every seed ends with a running training loss of at most {NEAR_ZERO:.3f}, 1 % of that of guessing.",
    "mnist/training",
    cases=STARTS,
)
def _near_zero(evidence: Evidence, start: str) -> Judgement:
    sample = evidence.sample("mnist", "analytic", start, final(TRAIN_LOSS))
    verdict = in_every_seed([value <= NEAR_ZERO for value in sample.values])
    return Judgement(verdict, (f"AP2, {start_label(start)}: {sample.text()}",))


@claim(
    "overfits",
    "On MNIST AP2 overfits",
    "From every start, in every seed, the validation loss ends above the running training loss and more than "
    f"{RISEN:.0%} above its own lowest value.",
    "mnist/validation-loss",
    cases=STARTS,
)
def _analytic_overfits(evidence: Evidence, start: str) -> Judgement:
    return _overfits(evidence, "mnist", "analytic", start)


@claim(
    "noise-prevents",
    "On noisy MNIST overfitting does not occur",
    "From init = BN, as in the paper's figure, by the rule of the claim on overfitting, of all four methods.",
    "noisy-mnist/validation-loss",
    cases=METHODS,
)
def _does_not_overfit_with_noise(evidence: Evidence, method: str) -> Judgement:
    found = _overfits(evidence, "noisy-mnist", method, "bn")
    return Judgement(opposite(found.verdict), found.measured)


def _overfits(evidence: Evidence, experiment: str, method: str, start: str) -> Judgement:
    metrics = (risen, final(VALID_LOSS), final(TRAIN_LOSS))
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
