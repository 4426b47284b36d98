"""Rules on training: which methods train from where, to what loss, how far they depend on the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..protocol.experiments import PAPER_GRIDS
from ..protocol.labels import experiment_label, method_label, start_label
from ..protocol.records import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_LOSS
from .curves import risen
from .evidence import FAILS, HOLDS, MISSING, NOISE, Evidence, Judgement, all_of, in_every_seed, joined, lower, no_data
from .seed_statistics import Metric, Sample, final, number

GUESSING = math.log(10)  # the loss of ten equal probabilities; all data sets here have ten classes
TRAINED = 0.9  # of the way from guessing to the lowest mean loss of the experiment
NEAR_ZERO = 0.01 * GUESSING
RISEN = 0.10  # of the validation loss above its lowest value


def trained_limit(evidence: Evidence, experiment: str) -> float:
    """The loss up to which a run of the experiment counts as trained."""
    samples = [evidence.sample(experiment, m, start, final(TRAIN_LOSS)) for m in METHODS for start in STARTS]
    lowest = min((s.mean for s in samples if s is not None), default=math.inf)
    return GUESSING - TRAINED * (GUESSING - min(lowest, GUESSING / 2))  # where nothing trains, the best does not either


def _train(evidence: Evidence, cells: Sequence[tuple[str, str]], experiments: Sequence[str] = PAPER_GRIDS) -> Judgement:
    """Whether these methods train from these starts, in every experiment that was run."""
    ran = evidence.ran(experiments)
    if not ran:
        return no_data(f"varprop reproduce {' '.join(experiments)} --seeds 3", "none of the experiments was run")
    limits = {experiment: trained_limit(evidence, experiment) for experiment in ran}
    parts = [_trains(evidence, e, method, start, limits[e]) for e in ran for method, start in cells]
    verdicts = [part.verdict for part in parts]
    bounds = ", ".join(f"{experiment_label(e)} {number(limit)}" for e, limit in limits.items())
    count = f"{verdicts.count(HOLDS)} of {len(verdicts)} train in every seed (limits: {bounds})"
    rest = " ".join(_others_that_fail(evidence, ran, limits, cells)) or "none"
    missing = [f"{experiment_label(experiment)}: not run" for experiment in experiments if experiment not in ran]
    lines = [line for part in parts for line in part.measured]
    return Judgement(all_of(verdicts), (count, *lines, f"others that miss the limit in some seed: {rest}", *missing))


def _trains(evidence: Evidence, experiment: str, method: str, start: str, limit: float) -> Judgement:
    sample = evidence.sample(experiment, method, start, final(TRAIN_LOSS))
    where = f"{experiment_label(experiment)}, {start_label(start)}: {method_label(method)}"
    if sample is None:
        return Judgement(MISSING, (f"{where} not run",))
    return Judgement(in_every_seed([value <= limit for value in sample.values]), (f"{where} {sample.text()}",))


def _others_that_fail(
    evidence: Evidence, ran: Sequence[str], limits: dict[str, float], cells: Sequence[tuple[str, str]]
) -> list[str]:
    """What the limit tells apart: the other methods and starts of the same experiments that miss it."""
    found = []
    for experiment in ran:
        others = [(m, s) for s in STARTS for m in METHODS if (m, s) not in cells]
        failed = [(m, s) for m, s in others if _trains(evidence, experiment, m, s, limits[experiment]).verdict in _MISS]
        names = ", ".join(f"{method_label(m)} from {start_label(s)}" for m, s in failed)
        found += [f"{experiment_label(experiment)}: {names};"] if names else []
    return found


_MISS = (FAILS, NOISE)


def analytic_trains(evidence: Evidence) -> Judgement:
    """AP2 from every start."""
    return _train(evidence, [("analytic", start) for start in STARTS])


def others_from_analytic_start(evidence: Evidence) -> Judgement:
    """Standard and weight normalization from AP2's start."""
    return _train(evidence, [("standard", "ap2"), ("weight", "ap2")])


def all_from_batch_start(evidence: Evidence) -> Judgement:
    """Every method from batch norm's start, on MNIST as the paper says it."""
    return _train(evidence, [(method, "bn") for method in METHODS], ("mnist",))


def recurrent_trains(evidence: Evidence) -> Judgement:
    """AP2 in the recurrent network."""
    return _train(evidence, [("analytic", start) for start in STARTS], ("recurrent",))


def hard_from_random_weights(evidence: Evidence) -> Judgement:
    """The standard network from random weights on MNIST, which should not train, and batch norm, which should."""
    samples = [evidence.sample("mnist", method, "none", final(TRAIN_LOSS)) for method in ("standard", "batch")]
    plain, batch = samples
    if plain is None or batch is None:
        return no_data("varprop reproduce mnist --seeds 3 --starts none,bn")
    limit = trained_limit(evidence, "mnist")
    stuck = in_every_seed([value > limit for value in plain.values])
    lines = (f"Standard {plain.text()}: misses the limit of {number(limit)}: {stuck}", f"BN {batch.text()}")
    return Judgement(all_of([stuck, lower(batch, plain)]), lines)


def analytic_often_lowest(evidence: Evidence) -> Judgement:
    """Wins of AP2 over all others in the running loss, counted over experiments and starts."""
    return _often_lowest(evidence, final(TRAIN_LOSS), "varprop reproduce mnist noisy-mnist noisy-cifar10 --seeds 3")


def analytic_often_lowest_in_evaluation(evidence: Evidence) -> Judgement:
    """The same with every method in evaluation mode on the training set."""
    found = _often_lowest(evidence, final(TRAIN_EVAL_LOSS), "varprop reproduce mnist noisy-mnist --seeds 3")
    if found.verdict != MISSING:
        return found
    cases = [_half_of_a_case(evidence, e, start) for e in PAPER_GRIDS for start in STARTS]
    return Judgement(MISSING, (*found.measured, *(line for line in cases if line)))


def _half_of_a_case(evidence: Evidence, experiment: str, start: str) -> str:
    """Batch norm in evaluation mode beside AP2's running loss: the nearest to it that older records have."""
    batch = evidence.sample(experiment, "batch", start, final(TRAIN_EVAL_LOSS))
    own = evidence.sample(experiment, "analytic", start, final(TRAIN_LOSS))
    if batch is None or own is None:
        return ""
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    return f"{where}: BN in evaluation {batch.text()}, AP2's running loss {own.text()}"


def _often_lowest(evidence: Evidence, metric: Metric, command: str) -> Judgement:
    texts = {HOLDS: "AP2 lowest", NOISE: "undecided", FAILS: "another is lower"}
    cases = [(e, start, _analytic_lowest(evidence, e, start, metric)) for e in PAPER_GRIDS for start in STARTS]
    known = [verdict for _, _, verdict in cases if verdict != MISSING]
    if not known:
        return no_data(command, "no start was run and recorded with all four methods")
    wins, undecided = known.count(HOLDS), known.count(NOISE)
    verdict = HOLDS if 2 * wins >= len(known) else NOISE if 2 * (wins + undecided) >= len(known) else FAILS
    names = [f"{experiment_label(e)}, {start_label(s)}: {texts[v]}" for e, s, v in cases if v != MISSING]
    return Judgement(verdict, (f"lowest in {wins} of {len(known)} cases, undecided in {undecided}", *names))


def _analytic_lowest(evidence: Evidence, experiment: str, start: str, metric: Metric) -> str:
    """Whether AP2 ends lower than each other method; no data unless all were run."""
    samples = {method: evidence.sample(experiment, method, start, metric) for method in METHODS}
    own = samples.pop("analytic")
    if own is None or None in samples.values():
        return MISSING
    return all_of(lower(own, other) for other in samples.values() if other is not None)


def near_zero(evidence: Evidence) -> Judgement:
    """AP2's training loss on MNIST, which the paper brings arbitrarily close to zero."""
    return joined([_below(evidence, start, NEAR_ZERO) for start in STARTS])


def _below(evidence: Evidence, start: str, limit: float) -> Judgement:
    sample = evidence.sample("mnist", "analytic", start, final(TRAIN_LOSS))
    if sample is None:
        return no_data(f"varprop reproduce mnist --seeds 3 --methods analytic --starts {start}")
    verdict = in_every_seed([value <= limit for value in sample.values])
    return Judgement(verdict, (f"AP2, {start_label(start)}: {sample.text()}",))


def overfits(evidence: Evidence) -> Judgement:
    """AP2 on MNIST: its validation loss rises from its lowest value, and lies above the training loss."""
    return joined([_overfits(evidence, "mnist", "analytic", start) for start in STARTS])


def does_not_overfit_with_noise(evidence: Evidence) -> Judgement:
    """Noisy MNIST, from batch norm's start as in the paper's figure."""
    parts = [_overfits(evidence, "noisy-mnist", method, "bn") for method in ("batch", "analytic")]
    turned = {HOLDS: FAILS, FAILS: HOLDS}
    return joined([Judgement(turned.get(part.verdict, part.verdict), part.measured) for part in parts])


def _overfits(evidence: Evidence, experiment: str, method: str, start: str) -> Judgement:
    rise, valid, train = (
        evidence.sample(experiment, method, start, metric) for metric in (risen, final(VALID_LOSS), final(TRAIN_LOSS))
    )
    if rise is None or valid is None or train is None:
        return no_data(f"varprop reproduce {experiment} --seeds 3 --methods {method} --starts {start}")
    above = [v > t for v, t in zip(valid.values, train.values, strict=True)]
    verdict = in_every_seed([share > RISEN and higher for share, higher in zip(rise.values, above, strict=True)])
    texts = f"validation {valid.text()}, training {train.text()}, above its lowest by {rise.text(2, 100, ' %')}"
    return Judgement(verdict, (f"{method_label(method)}, {start_label(start)}: {texts}",))


def robust_to_the_start(evidence: Evidence) -> Judgement:
    """How far the final training loss depends on the start: AP2 against each other method, in every experiment."""
    ran = evidence.ran(PAPER_GRIDS)
    if not ran:
        return no_data("varprop reproduce mnist noisy-mnist noisy-cifar10 --seeds 3")
    return joined([_more_robust(evidence, experiment) for experiment in ran])


def _more_robust(evidence: Evidence, experiment: str) -> Judgement:
    spreads = {method: _spread_over_starts(evidence, experiment, method) for method in METHODS}
    own = spreads["analytic"]
    others = [spread for method, spread in spreads.items() if method != "analytic"]
    verdicts = [MISSING if own is None or other is None else lower(own, other) for other in others]
    texts = [f"{method_label(m)} {s.text() if s else 'not run from every start'}" for m, s in spreads.items()]
    return Judgement(
        all_of(verdicts), (f"{experiment_label(experiment)}, highest / lowest loss over starts: {', '.join(texts)}",)
    )


def _spread_over_starts(evidence: Evidence, experiment: str, method: str) -> Sample | None:
    found = [evidence.sample(experiment, method, start, final(TRAIN_LOSS)) for start in STARTS]
    known = [sample.by_seed for sample in found if sample is not None]
    if len(known) < len(STARTS):
        return None
    seeds = [seed for seed in known[0] if all(seed in values for values in known)]
    ends = {seed: [values[seed] for values in known] for seed in seeds}
    ratios = [max(e) / min(e) if min(e) > 0 and math.isfinite(max(e)) else math.inf for e in ends.values()]
    return Sample(tuple(ratios), tuple(seeds)) if seeds else None
