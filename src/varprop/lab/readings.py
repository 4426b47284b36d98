"""What outcomes say about the claims of the paper: one function a claim, each giving a verdict and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .gather import GRIDS
from .measures import Measure, average_loss, evaluation_gap, final, final_error
from .records import METHODS, STARTS, TRAIN_LOSS, VALID_LOSS, Outcome
from .spread import Sample, noise, number, order
from .style import experiment_label, method_label, start_label

GUESSING = math.log(10)  # the loss of ten equal probabilities; all three data sets have ten classes
TRAINED = GUESSING / 2
EVALUATION_GAP = 0.10
ACCURACY_TOLERANCE = 0.01
LOSS_TOLERANCE = 0.10
SMALL_RATIO = 1.25

HOLDS, FAILS, NOISE, MISSING = "holds", "does not hold", "within noise", "no data"


@dataclass(frozen=True)
class Reading:
    """A verdict with the numbers it rests on."""

    verdict: str
    measured: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """Outcomes at one bound of the learning rate and one batch size."""

    outcomes: tuple[Outcome, ...]

    def sample(self, experiment: str, method: str, start: str, measure: Measure, variant: str = "") -> Sample | None:
        """A measure over seeds; None where it was not run, or leaves nothing to measure."""
        wanted = (experiment, method, start, variant)
        cells = [o for o in self.outcomes if (o.cell.experiment, o.cell.method, o.cell.start, o.cell.variant) == wanted]
        values = tuple(value for value in map(measure, cells) if not math.isnan(value))
        return Sample(values) if values else None


def combine(verdicts: Iterable[str]) -> str:
    """One verdict of several parts."""
    parts = list(verdicts)
    if not parts or MISSING in parts:
        return MISSING
    return FAILS if FAILS in parts else HOLDS if set(parts) == {HOLDS} else NOISE


def passes(values: Sequence[bool]) -> str:
    """A threshold, seed by seed."""
    return HOLDS if all(values) else FAILS if not any(values) else NOISE


def lower(a: Sample, b: Sample) -> str:
    """Whether `a` is lower than `b` beyond the noise."""
    return {"lower": HOLDS, "higher": FAILS, "noise": NOISE}[order(a, b)]


def within(a: Sample, b: Sample, tolerance: float) -> str:
    """Whether the means differ by less than the tolerance, with the noise to spare on either side."""
    if not (a.all_finite and b.all_finite):
        return FAILS if a.all_finite != b.all_finite else NOISE
    difference, margin = abs(a.mean - b.mean), noise(a, b)
    if math.isnan(margin):
        return NOISE
    return HOLDS if difference + margin <= tolerance else FAILS if difference - margin > tolerance else NOISE


def trains(evidence: Evidence, cells: Iterable[tuple[str, str]]) -> Reading:
    """Whether these methods train from these starts, in every experiment that was run."""
    ran = {outcome.cell.experiment for outcome in evidence.outcomes}
    cells = list(cells)
    parts = [
        trains_cell(evidence, experiment, method, start)
        for experiment in GRIDS
        if experiment in ran
        for method, start in cells
    ]
    if not parts:
        return Reading(MISSING, ("none of the experiments was run",))
    trained = sum(part.verdict == HOLDS for part in parts)
    lines = [f"{trained} of {len(parts)} cells end below {TRAINED:.3f} in every seed"]
    lines += [line for part in parts for line in part.measured]
    lines += [f"{experiment_label(experiment)}: not run" for experiment in GRIDS if experiment not in ran]
    return Reading(combine(part.verdict for part in parts), tuple(lines))


def trains_cell(evidence: Evidence, experiment: str, method: str, start: str) -> Reading:
    """Whether one method trains from one start."""
    where = f"{experiment_label(experiment)}, {start_label(start)}: {method_label(method)}"
    sample = evidence.sample(experiment, method, start, final(TRAIN_LOSS))
    if sample is None:
        return Reading(MISSING, (f"{where} not run",))
    return Reading(passes([value < TRAINED for value in sample.values]), (f"{where} {sample.text()}",))


def analytic_trains(evidence: Evidence) -> Reading:
    """AP2 from every start."""
    return trains(evidence, [("analytic", start) for start in STARTS])


def others_from_analytic_start(evidence: Evidence) -> Reading:
    """Standard and weight normalization from AP2's start."""
    return trains(evidence, [("standard", "ap2"), ("weight", "ap2")])


def analytic_often_lowest(evidence: Evidence) -> Reading:
    """Wins of AP2 over all others, counted over experiments and starts."""
    cases = [(e, start, case(evidence, e, start)) for e in GRIDS for start in STARTS]
    known = [verdict for _, _, verdict in cases if verdict != MISSING]
    if not known:
        return Reading(MISSING, ("no start was run with all four methods",))
    wins, open_cases = known.count(HOLDS), known.count(NOISE)
    most = 2 * (wins + open_cases) >= len(known)
    verdict = HOLDS if 2 * wins >= len(known) else NOISE if most else FAILS
    names = [f"{experiment_label(e)}, {start_label(s)}: {CASE[v]}" for e, s, v in cases if v != MISSING]
    return Reading(verdict, (f"lowest in {wins} of {len(known)} cases, undecided in {open_cases}", *names))


CASE = {HOLDS: "AP2 lowest", NOISE: "within noise of the lowest", FAILS: "another is lower"}


def case(evidence: Evidence, experiment: str, start: str) -> str:
    """Whether AP2 ends with a lower training loss than each other method; no data unless all were run."""
    samples = {method: evidence.sample(experiment, method, start, final(TRAIN_LOSS)) for method in METHODS}
    own = samples.pop("analytic")
    if own is None or any(other is None for other in samples.values()):
        return MISSING
    return combine(lower(own, other) for other in samples.values() if other is not None)


def evaluation_differs(evidence: Evidence) -> Reading:
    """Batch norm's two losses on MNIST from None, and from the other starts for comparison."""
    samples = {start: evidence.sample("mnist", "batch", start, evaluation_gap) for start in STARTS}
    lines = [
        f"gap, {start_label(s)}: {sample.text(3, 100, ' %')}" for s, sample in samples.items() if sample is not None
    ]
    sample = samples["none"]
    if sample is None:
        return Reading(MISSING, ("BN was not run on MNIST from init = None", *lines))
    return Reading(passes([value > EVALUATION_GAP for value in sample.values]), tuple(lines))


def compare_validation(
    evidence: Evidence, experiment: str, others: Sequence[str], judge: Callable[[Sample, Sample, Measure], str]
) -> Reading:
    """Batch norm against others in validation loss and accuracy, from batch norm's start as in the paper's figures."""
    verdicts, lines = [], []
    for measure, name, factor in ((final(VALID_LOSS), "loss", 1.0), (final_error, "error", 100.0)):
        own = evidence.sample(experiment, "batch", "bn", measure)
        rest = {method: evidence.sample(experiment, method, "bn", measure) for method in others}
        verdicts += [MISSING if own is None or o is None else judge(own, o, measure) for o in rest.values()]
        lines += each_method({"batch": own, **rest}, f"validation {name}", factor)
    return Reading(combine(verdicts), tuple(lines) or (f"{experiment_label(experiment)} was not run from init = BN",))


def each_method(samples: dict[str, Sample | None], name: str, factor: float) -> list[str]:
    """The numbers of several methods in one line; none where nothing was run."""
    unit = " %" if factor > 1 else ""
    texts = [
        f"{method_label(method)} {sample.text(3, factor, unit)}" if sample else f"{method_label(method)} not run"
        for method, sample in samples.items()
    ]
    return [f"{name}: {', '.join(texts)}"] if any(samples.values()) else []


def batch_generalizes(evidence: Evidence) -> Reading:
    """Batch norm against all others on clean MNIST."""
    others = [method for method in METHODS if method != "batch"]
    return compare_validation(evidence, "mnist", others, lambda own, other, _: lower(own, other))


def on_par(evidence: Evidence) -> Reading:
    """AP2 against batch norm on noisy MNIST."""

    def judge(own: Sample, other: Sample, measure: Measure) -> str:
        tolerance = ACCURACY_TOLERANCE if measure is final_error else LOSS_TOLERANCE * own.mean
        return within(own, other, tolerance)

    return compare_validation(evidence, "noisy-mnist", ["analytic"], judge)


def cifar_close(evidence: Evidence) -> Reading:
    """Small differences in training loss, and batch norm first in validation accuracy."""
    parts = [*(small_differences(evidence, start) for start in STARTS), batch_leads(evidence)]
    return Reading(combine(part.verdict for part in parts), tuple(line for part in parts for line in part.measured))


def small_differences(evidence: Evidence, start: str) -> Reading:
    """Whether the highest mean training loss from a start is close to the lowest."""
    samples = {m: evidence.sample("noisy-cifar10", m, start, final(TRAIN_LOSS)) for m in METHODS}
    known = {method: sample for method, sample in samples.items() if sample is not None}
    if len(known) < len(METHODS):
        missing = ", ".join(method_label(method) for method in METHODS if method not in known)
        return Reading(MISSING, (f"{start_label(start)}: {missing} not run",))
    means = {method: sample.mean for method, sample in known.items()}
    best, worst = min(means, key=lambda m: means[m]), max(means, key=lambda m: means[m])
    text = f"{method_label(best)} {known[best].text()} to {method_label(worst)} {known[worst].text()}"
    verdict = within(known[worst], known[best], (SMALL_RATIO - 1) * means[best])
    return Reading(verdict, (f"training loss, {start_label(start)}: {text}",))


def batch_leads(evidence: Evidence) -> Reading:
    """Whether batch norm's best start beats the best start of every other method in validation."""
    best = {method: best_start(evidence, method) for method in METHODS}
    known = {method: found for method, found in best.items() if found is not None}
    if len(known) < len(METHODS):
        return Reading(MISSING, ())
    verdict = combine(lower(known["batch"][1], known[m][1]) for m in METHODS if m != "batch")
    texts = [
        f"{method_label(method)} {sample.text(3, 100, ' %')} from {start_label(start)}"
        for method, (start, sample) in known.items()
    ]
    return Reading(verdict, (f"validation error from the best start: {', '.join(texts)}",))


def best_start(evidence: Evidence, method: str) -> tuple[str, Sample] | None:
    """The start with the lowest mean validation error."""
    found = {start: evidence.sample("noisy-cifar10", method, start, final_error) for start in STARTS}
    known = {start: sample for start, sample in found.items() if sample is not None}
    return min(known.items(), key=lambda item: item[1].mean) if known else None


def equal_rates_mislead(evidence: Evidence) -> Reading:
    """The standard network against itself written as w = 2w', at one learning rate."""
    starts = sorted(
        {o.cell.start for o in evidence.outcomes if o.cell.experiment == "naive" and o.cell.variant == "double"}
    )
    pairs = [
        (
            evidence.sample("naive", "standard", start, average_loss),
            evidence.sample("naive", "standard", start, average_loss, "double"),
        )
        for start in starts
    ]
    known = [(plain, double) for plain, double in pairs if plain is not None and double is not None]
    if not known:
        return Reading(MISSING, ("the standard network and w = 2w' were not both run",))
    lines = [f"mean loss over epochs: Standard {a.text()}, w = 2w' {b.text()}, ratio {ratio(a, b)}" for a, b in known]
    return Reading(combine(lower(double, plain) for plain, double in known), tuple(lines))


def standard_and_double(evidence: Evidence, start: str) -> tuple[Sample | None, Sample | None]:
    """The standard network and the same as w = 2w'."""
    plain = evidence.sample("naive", "standard", start, average_loss)
    return plain, evidence.sample("naive", "standard", start, average_loss, "double")


def ratio(a: Sample, b: Sample) -> str:
    """The quotient of two means."""
    return number(a.mean / b.mean) if b.mean else "undefined"
