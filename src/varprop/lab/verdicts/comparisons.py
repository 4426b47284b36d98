"""Rules on comparing: noisy CIFAR-10 as a whole, equal learning rates, and what a fair comparison leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..protocol.experiments import PAPER_LR_MAX
from ..protocol.labels import method_label, start_label
from ..protocol.records import METHODS, STARTS, TRAIN_LOSS
from ..protocol.step_factor import step_factor
from .evidence import FAILS, HOLDS, Evidence, Judgement, all_of, joined, lower, no_data, within
from .seed_statistics import Metric, Sample, average_loss, final, final_error, number

SMALL_RATIO = 1.25
PAPER_FACTOR, FACTOR_TOLERANCE = 4.0, 0.1
_CIFAR = "varprop reproduce noisy-cifar10 --device cuda --compile --seeds 3"
_OWN = {"standard": "none", "weight": "wn", "batch": "bn", "analytic": "ap2"}
_OWN_BEFORE = {**_OWN, "weight": "none"}  # in records made before weight normalization had its own start


def cifar_close(evidence: Evidence) -> Judgement:
    """Small differences in training loss, from every start."""
    return joined([_small_differences(evidence, start) for start in STARTS])


def _small_differences(evidence: Evidence, start: str) -> Judgement:
    """Whether the highest mean training loss from a start is close to the lowest."""
    samples = {m: evidence.sample("noisy-cifar10", m, start, final(TRAIN_LOSS)) for m in METHODS}
    known = {method: sample for method, sample in samples.items() if sample is not None}
    if len(known) < len(METHODS):
        missing = ", ".join(method_label(method) for method in METHODS if method not in known)
        return no_data(_CIFAR, f"{start_label(start)}: {missing} not run")
    best, worst = (choose(known, key=lambda m: known[m].mean) for choose in (min, max))
    text = f"{method_label(best)} {known[best].text()} to {method_label(worst)} {known[worst].text()}"
    verdict = within(known[worst], known[best], (SMALL_RATIO - 1) * known[best].mean)
    return Judgement(verdict, (f"training loss, {start_label(start)}: {text}",))


def batch_trains_best(evidence: Evidence) -> Judgement:
    """Batch norm's training loss on CIFAR-10 from the start that suits it best against the others' from theirs."""
    return _batch_first(evidence, final(TRAIN_LOSS), "training loss", 1.0, "")


def batch_validates_best(evidence: Evidence) -> Judgement:
    """The same for the validation error."""
    return _batch_first(evidence, final_error, "validation error", 100.0, " %")


def _batch_first(evidence: Evidence, metric: Metric, name: str, factor: float, unit: str) -> Judgement:
    best: dict[str, tuple[str, Sample]] = {}
    for method in METHODS:
        found = ((start, evidence.sample("noisy-cifar10", method, start, metric)) for start in STARTS)
        known = [(start, sample) for start, sample in found if sample is not None]
        if not known:
            return no_data(_CIFAR, f"{method_label(method)} not run")
        best[method] = min(known, key=lambda pair: pair[1].mean)
    orders = {m: lower(best["batch"][1], best[m][1]) for m in METHODS if m != "batch"}
    texts = [f"{method_label(m)} {s.text(3, factor, unit)} from {start_label(start)}" for m, (start, s) in best.items()]
    against = ", ".join(f"{method_label(method)} {verdict}" for method, verdict in orders.items())
    return Judgement(
        all_of(orders.values()), (f"{name} from the best start: {', '.join(texts)}", f"against: {against}")
    )


def equal_rates_mislead(evidence: Evidence) -> Judgement:
    """The standard network against itself written as w = 2w', at one learning rate."""
    samples = [evidence.sample("naive", "standard", "none", average_loss, variant) for variant in ("", "double")]
    plain, double = samples
    if plain is None or double is None:
        return no_data("varprop reproduce naive --seeds 3", "the standard network and w = 2w' were not both run")
    ratio = number(plain.mean / double.mean) if double.mean else "undefined"
    line = f"mean loss over epochs: Standard {plain.text()}, w = 2w' {double.text()}, ratio {ratio}"
    return Judgement(lower(double, plain), (line,))


def four_times_with(optimizer: str) -> Callable[[Evidence], Judgement]:
    """The factor of the step with an optimizer, against the paper's; it is measured anew and needs no records."""
    return lambda _: four_times(optimizer, step_factor(optimizer))


def four_times(optimizer: str, factor: float) -> Judgement:
    """Whether a factor is the paper's."""
    verdict = HOLDS if abs(factor - PAPER_FACTOR) <= FACTOR_TOLERANCE else FAILS
    return Judgement(verdict, (f"with {optimizer} the step of w is {number(factor)} times as large",))


def fair_is_closer(evidence: Evidence) -> Judgement:
    """The highest loss of the four methods over the lowest: each at its own start and one rate, and compared fairly."""
    rates = {outcome.cell.lr_max for outcome in evidence.outcomes if outcome.cell.experiment == "naive"}
    spreads = [_spread(evidence, "naive", starts, min(rates)) for starts in (_OWN, _OWN_BEFORE)] if rates else []
    naive = next((spread for spread in spreads if spread is not None), None)
    fair = _spread(evidence, "mnist", dict.fromkeys(METHODS, "bn"), PAPER_LR_MAX)
    if naive is None or fair is None:
        return no_data("varprop reproduce naive mnist --seeds 3")
    return Judgement(lower(fair, naive), (f"highest / lowest: naive {naive.text()}, from init = BN {fair.text()}",))


def _spread(evidence: Evidence, experiment: str, starts: Mapping[str, str], bound: float) -> Sample | None:
    found = [evidence.sample(experiment, m, s, final(TRAIN_LOSS), bound=bound) for m, s in starts.items()]
    known = [sample.by_seed for sample in found if sample is not None]
    seeds = [seed for seed in known[0] if all(seed in values for values in known)] if len(known) == len(starts) else []
    ends = [[values[seed] for values in known] for seed in seeds]
    ratios = [max(e) / min(e) if min(e) > 0 and math.isfinite(max(e)) else math.inf for e in ends]
    return Sample(tuple(ratios), tuple(seeds)) if seeds else None
