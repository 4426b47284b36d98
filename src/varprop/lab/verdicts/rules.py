"""How the claims of the paper are judged: one function a claim, each giving a verdict and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..protocol.experiments import PAPER_GRIDS
from ..protocol.labels import experiment_label, method_label, start_label
from ..protocol.records import METHODS, STARTS, TRAIN_LOSS, VALID_LOSS, Outcome
from .seed_statistics import Metric, Sample, average_loss, difference, evaluation_gap, final, final_error, number, order

GUESSING = math.log(10)  # the loss of ten equal probabilities; all three data sets have ten classes
TRAINED = 2.0  # times the lowest mean loss of the experiment; half of guessing alone would pass every run there is
EVALUATION_GAP = 0.10
ACCURACY_TOLERANCE = 0.01
LOSS_TOLERANCE = 0.10
SMALL_RATIO = 1.25

HOLDS, FAILS, NOISE, MISSING = "holds", "does not hold", "within noise", "no data"


@dataclass(frozen=True)
class Finding:
    """A verdict with the numbers it rests on."""

    verdict: str
    measured: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """Outcomes at one bound of the learning rate and one batch size."""

    outcomes: tuple[Outcome, ...]

    def sample(self, experiment: str, method: str, start: str, metric: Metric, variant: str = "") -> Sample | None:
        """A metric over seeds; None where it was not run, or leaves nothing to measure."""
        wanted = (experiment, method, start, variant)
        cells = [o for o in self.outcomes if (o.cell.experiment, o.cell.method, o.cell.start, o.cell.variant) == wanted]
        found = {o.cell.seed: metric(o) for o in cells}
        known = {seed: value for seed, value in found.items() if not math.isnan(value)}
        return Sample(tuple(known.values()), tuple(known)) if known else None


def all_of(verdicts: Iterable[str]) -> str:
    """One verdict of several parts, all of which must hold."""
    parts = list(verdicts)
    if not parts or MISSING in parts:
        return MISSING
    return FAILS if FAILS in parts else HOLDS if set(parts) == {HOLDS} else NOISE


def lower(a: Sample, b: Sample) -> str:
    """Whether `a` is lower than `b` beyond the noise."""
    return {"lower": HOLDS, "higher": FAILS, "noise": NOISE}[order(a, b)]


def _in_every_seed(passed: Sequence[bool]) -> str:
    return HOLDS if all(passed) else FAILS if not any(passed) else NOISE


def _within(a: Sample, b: Sample, tolerance: float) -> str:
    """Whether the means differ by less than the tolerance, with the noise to spare on either side."""
    if not (a.all_finite and b.all_finite):
        return FAILS if a.all_finite != b.all_finite else NOISE
    mean, margin = difference(a, b)
    if math.isnan(mean):
        return NOISE
    return HOLDS if abs(mean) + margin <= tolerance else FAILS if abs(mean) - margin > tolerance else NOISE


def _train(evidence: Evidence, cells: Sequence[tuple[str, str]]) -> Finding:
    """Whether these methods train from these starts, in every experiment that was run."""
    ran = [e for e in PAPER_GRIDS if any(outcome.cell.experiment == e for outcome in evidence.outcomes)]
    limits = {experiment: _trained_limit(evidence, experiment) for experiment in ran}
    verdicts, lines = [], []
    for experiment, (method, start) in ((e, cell) for e in ran for cell in cells):
        sample = evidence.sample(experiment, method, start, final(TRAIN_LOSS))
        passed = [] if sample is None else [value <= limits[experiment] for value in sample.values]
        verdicts.append(_in_every_seed(passed) if passed else MISSING)
        where = f"{experiment_label(experiment)}, {start_label(start)}: {method_label(method)}"
        lines.append(f"{where} {'not run' if sample is None else sample.text()}")
    if not verdicts:
        return Finding(MISSING, ("none of the experiments was run",))
    bounds = ", ".join(f"{experiment_label(e)} {number(limit)}" for e, limit in limits.items())
    count = f"{verdicts.count(HOLDS)} of {len(verdicts)} cells train in every seed (limits: {bounds})"
    missing = [f"{experiment_label(experiment)}: not run" for experiment in PAPER_GRIDS if experiment not in ran]
    return Finding(all_of(verdicts), (count, *lines, *missing))


def _trained_limit(evidence: Evidence, experiment: str) -> float:
    """The loss up to which a run of the experiment counts as trained."""
    samples = [evidence.sample(experiment, m, start, final(TRAIN_LOSS)) for m in METHODS for start in STARTS]
    lowest = min((s.mean for s in samples if s is not None), default=math.inf)
    return min(GUESSING / 2, TRAINED * lowest)


def analytic_trains(evidence: Evidence) -> Finding:
    """AP2 from every start."""
    return _train(evidence, [("analytic", start) for start in STARTS])


def others_from_analytic_start(evidence: Evidence) -> Finding:
    """Standard and weight normalization from AP2's start."""
    return _train(evidence, [("standard", "ap2"), ("weight", "ap2")])


def analytic_often_lowest(evidence: Evidence) -> Finding:
    """Wins of AP2 over all others, counted over experiments and starts."""
    texts = {HOLDS: "AP2 lowest", NOISE: "undecided", FAILS: "another is lower"}
    cases = [(e, start, _analytic_lowest(evidence, e, start)) for e in PAPER_GRIDS for start in STARTS]
    known = [verdict for _, _, verdict in cases if verdict != MISSING]
    if not known:
        return Finding(MISSING, ("no start was run with all four methods",))
    wins, undecided = known.count(HOLDS), known.count(NOISE)
    verdict = HOLDS if 2 * wins >= len(known) else NOISE if 2 * (wins + undecided) >= len(known) else FAILS
    names = [f"{experiment_label(e)}, {start_label(s)}: {texts[v]}" for e, s, v in cases if v != MISSING]
    return Finding(verdict, (f"lowest in {wins} of {len(known)} cases, undecided in {undecided}", *names))


def _analytic_lowest(evidence: Evidence, experiment: str, start: str) -> str:
    """Whether AP2 ends with a lower training loss than each other method; no data unless all were run."""
    samples = {method: evidence.sample(experiment, method, start, final(TRAIN_LOSS)) for method in METHODS}
    own = samples.pop("analytic")
    if own is None or None in samples.values():
        return MISSING
    return all_of(lower(own, other) for other in samples.values() if other is not None)


def evaluation_differs(evidence: Evidence) -> Finding:
    """Batch norm's two losses on MNIST from None, and from the other starts for comparison."""
    samples = {start: evidence.sample("mnist", "batch", start, evaluation_gap) for start in STARTS}
    lines = [f"gap, {start_label(s)}: {found.text(3, 100, ' %')}" for s, found in samples.items() if found is not None]
    sample = samples["none"]
    if sample is None:
        return Finding(MISSING, ("BN was not run on MNIST from init = None", *lines))
    return Finding(_in_every_seed([value > EVALUATION_GAP for value in sample.values]), tuple(lines))


def _compare_validation(
    evidence: Evidence, experiment: str, others: Sequence[str], judge: Callable[[Sample, Sample, Metric], str]
) -> Finding:
    """Batch norm against others in validation loss and error, from batch norm's start as in the paper's figures."""
    verdicts, lines = [], []
    for metric, name, factor, unit in ((final(VALID_LOSS), "loss", 1.0, ""), (final_error, "error", 100.0, " %")):
        samples = {method: evidence.sample(experiment, method, "bn", metric) for method in ("batch", *others)}
        own = samples["batch"]
        rest = [samples[method] for method in others]
        verdicts += [MISSING if own is None or other is None else judge(own, other, metric) for other in rest]
        texts = [f"{method_label(m)} {s.text(3, factor, unit) if s else 'not run'}" for m, s in samples.items()]
        lines += [f"validation {name}: {', '.join(texts)}"] if any(samples.values()) else []
    return Finding(all_of(verdicts), tuple(lines) or (f"{experiment_label(experiment)} was not run from init = BN",))


def batch_generalizes(evidence: Evidence) -> Finding:
    """Batch norm against all others on clean MNIST."""
    others = [method for method in METHODS if method != "batch"]
    return _compare_validation(evidence, "mnist", others, lambda own, other, _: lower(own, other))


def on_par(evidence: Evidence) -> Finding:
    """AP2 against batch norm on noisy MNIST."""

    def judge(own: Sample, other: Sample, metric: Metric) -> str:
        tolerance = ACCURACY_TOLERANCE if metric is final_error else LOSS_TOLERANCE * own.mean
        return _within(own, other, tolerance)

    return _compare_validation(evidence, "noisy-mnist", ["analytic"], judge)


def cifar_close(evidence: Evidence) -> Finding:
    """Small differences in training loss, and batch norm first in validation accuracy."""
    parts = [*(_small_differences(evidence, start) for start in STARTS), _batch_leads(evidence)]
    return Finding(all_of(part.verdict for part in parts), tuple(line for part in parts for line in part.measured))


def _small_differences(evidence: Evidence, start: str) -> Finding:
    """Whether the highest mean training loss from a start is close to the lowest."""
    samples = {m: evidence.sample("noisy-cifar10", m, start, final(TRAIN_LOSS)) for m in METHODS}
    known = {method: sample for method, sample in samples.items() if sample is not None}
    if len(known) < len(METHODS):
        missing = ", ".join(method_label(method) for method in METHODS if method not in known)
        return Finding(MISSING, (f"{start_label(start)}: {missing} not run",))
    best, worst = (choose(known, key=lambda m: known[m].mean) for choose in (min, max))
    text = f"{method_label(best)} {known[best].text()} to {method_label(worst)} {known[worst].text()}"
    verdict = _within(known[worst], known[best], (SMALL_RATIO - 1) * known[best].mean)
    return Finding(verdict, (f"training loss, {start_label(start)}: {text}",))


def _batch_leads(evidence: Evidence) -> Finding:
    """Whether batch norm's best start beats the best start of every other method in validation."""
    best: dict[str, tuple[str, Sample]] = {}
    for method in METHODS:
        found = ((start, evidence.sample("noisy-cifar10", method, start, final_error)) for start in STARTS)
        known = [(start, sample) for start, sample in found if sample is not None]
        if not known:
            return Finding(MISSING, ())
        best[method] = min(known, key=lambda pair: pair[1].mean)
    verdict = all_of(lower(best["batch"][1], best[method][1]) for method in METHODS if method != "batch")
    texts = [f"{method_label(m)} {s.text(3, 100, ' %')} from {start_label(start)}" for m, (start, s) in best.items()]
    return Finding(verdict, (f"validation error from the best start: {', '.join(texts)}",))


def equal_rates_mislead(evidence: Evidence) -> Finding:
    """The standard network against itself written as w = 2w', at one learning rate."""
    naive = [o.cell for o in evidence.outcomes if o.cell.experiment == "naive"]
    verdicts, lines = [], []
    for start in sorted({cell.start for cell in naive if cell.variant == "double"}):
        plain = evidence.sample("naive", "standard", start, average_loss)
        double = evidence.sample("naive", "standard", start, average_loss, "double")
        if plain is not None and double is not None:
            ratio = number(plain.mean / double.mean) if double.mean else "undefined"
            numbers = f"Standard {plain.text()}, w = 2w' {double.text()}, ratio {ratio}"
            lines.append(f"mean loss over epochs: {numbers}")
            verdicts.append(lower(double, plain))
    if not verdicts:
        return Finding(MISSING, ("the standard network and w = 2w' were not both run",))
    return Finding(all_of(verdicts), tuple(lines))
