"""Rules on batch norm: its evaluation mode, its stability, its momentum, its generalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..protocol.experiments import MOMENTUM, PAPER_GRIDS
from ..protocol.labels import experiment_label, method_label, start_label
from ..protocol.records import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_LOSS
from .curves import EARLY, LATE, evaluation_gap, rougher_in_evaluation, roughness
from .evidence import MISSING, Evidence, Judgement, all_of, at_most, in_every_seed, joined, lower, no_data, within
from .seed_statistics import Metric, Sample, final, final_batch_mode_error, final_error, log_rate

EVALUATION_GAP = 0.10
ROUGHER = 2.0
TEN_TIMES = -0.5  # of the decimal logarithm: nearer to a tenth than to the same rate
ACCURACY_TOLERANCE = 0.01
LOSS_TOLERANCE = 0.10
SAME_TRAINING = 1e-3  # of the loss

Span = tuple[int, int | None]


def evaluation_differs_early(evidence: Evidence) -> Judgement:
    """From random weights on MNIST, epochs 1 to 10."""
    return _evaluation_differs(evidence, EARLY)


def evaluation_differs_late(evidence: Evidence) -> Judgement:
    """From random weights on MNIST, after epoch 10."""
    return _evaluation_differs(evidence, LATE)


def _evaluation_differs(evidence: Evidence, span: Span) -> Judgement:
    """Whether batch norm's loss in evaluation mode is away from that in its batches, and rougher."""
    gap, rough = _evaluation(evidence, "mnist", "none", span)
    if gap is None or rough is None:
        return no_data("varprop reproduce mnist --seeds 3 --methods batch --starts none")
    away = in_every_seed([abs(value) > EVALUATION_GAP for value in gap.values])
    stochastic = in_every_seed([value > ROUGHER for value in rough.values])
    others = [_evaluation_line(evidence, start, span) for start in STARTS if start != "none"]
    lines = [_evaluation_line(evidence, "none", span), f"does not match: {away}; stochastic: {stochastic}"]
    return Judgement(all_of([away, stochastic]), tuple(line for line in (*lines, *others) if line))


def _evaluation(evidence: Evidence, experiment: str, start: str, span: Span) -> tuple[Sample | None, Sample | None]:
    metrics = (evaluation_gap(span), rougher_in_evaluation(span))
    gap, rough = (evidence.sample(experiment, "batch", start, metric) for metric in metrics)
    return gap, rough


def _evaluation_line(evidence: Evidence, start: str, span: Span) -> str:
    gap, rough = _evaluation(evidence, "mnist", start, span)
    if gap is None or rough is None:
        return ""
    return f"{start_label(start)}: away by {gap.text(3, 100, ' %')}, {rough.text()} times as rough"


def evaluation_is_better(evidence: Evidence) -> Judgement:
    """From batch norm's start on MNIST, early and late."""
    parts = []
    for name, span in (("epochs 1 to 10", EARLY), ("after epoch 10", LATE)):
        gap, _ = _evaluation(evidence, "mnist", "bn", span)
        if gap is None:
            return no_data("varprop reproduce mnist --seeds 3 --methods batch --starts bn")
        verdict = in_every_seed([value < 0 for value in gap.values])
        parts.append(Judgement(verdict, (f"{name}: away by {gap.text(3, 100, ' %')}",)))
    return joined(parts)


def evaluation_fails_in_recurrent(evidence: Evidence) -> Judgement:
    """Whether batch norm's running statistics serve a recurrent network, from every start."""
    parts = []
    for start in STARTS:
        gap, _ = _evaluation(evidence, "recurrent", start, LATE)
        if gap is None:
            return no_data("varprop reproduce recurrent --seeds 3")
        verdict = in_every_seed([value > EVALUATION_GAP for value in gap.values])
        parts.append(Judgement(verdict, (f"{start_label(start)}: away by {gap.text(3, 100, ' %')}",)))
    return joined(parts)


def oscillates_from_analytic_start(evidence: Evidence) -> Judgement:
    """Batch norm's curves on MNIST from AP2's start against those from its own."""
    return _rougher_than_at_home(evidence, "mnist", "ap2")


def unstable_from_other_starts(evidence: Evidence) -> Judgement:
    """The same in all experiments, from both starts that are not its own."""
    ran = evidence.ran(PAPER_GRIDS)
    if not ran:
        return no_data("varprop reproduce mnist noisy-mnist noisy-cifar10 --seeds 3 --methods batch")
    return joined([_rougher_than_at_home(evidence, e, start) for e in ran for start in ("none", "ap2")])


def _rougher_than_at_home(evidence: Evidence, experiment: str, start: str) -> Judgement:
    verdicts, texts = [], []
    for curve, name in ((TRAIN_LOSS, "in batches"), (TRAIN_EVAL_LOSS, "in evaluation")):
        home, away = (evidence.sample(experiment, "batch", where, roughness(curve)) for where in ("bn", start))
        if home is None or away is None:
            return no_data(f"varprop reproduce {experiment} --seeds 3 --methods batch --starts bn,{start}")
        verdicts.append(lower(home, away))
        texts.append(f"{name} {away.text()} against {home.text()} from its own start: {verdicts[-1]}")
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    return Judgement(all_of(verdicts), (f"{where}, roughness {'; '.join(texts)}",))


def wants_a_smaller_rate(evidence: Evidence) -> Judgement:
    """Batch norm's rate from AP2's start against that from its own."""
    own, other = (evidence.sample("mnist", "batch", start, log_rate) for start in ("bn", "ap2"))
    if own is None or other is None:
        return no_data("varprop reproduce mnist --seeds 3 --methods batch --starts bn,ap2")
    ratio = 10 ** (other.mean - own.mean)
    return Judgement(at_most(other, own, TEN_TIMES), (f"rate from init = AP2 / rate from init = BN: {ratio:.2g}",))


def smaller_momentum_helps(evidence: Evidence) -> Judgement:
    """Batch norm from random weights with momentum 0.1 and 0.01: evaluation in epochs 1 to 10, and training."""
    command = "varprop reproduce momentum --seeds 3"
    metrics = {
        "away by": lambda o: abs(evaluation_gap(EARLY)(o)),
        "times as rough": rougher_in_evaluation(EARLY),
        "training loss": final(TRAIN_LOSS),
    }
    lines, verdicts = [], []
    for name, metric in metrics.items():
        small, usual = (evidence.sample("momentum", "batch", "none", metric, v) for v in (MOMENTUM, ""))
        if small is None or usual is None:
            return no_data(command)
        same = name == "training loss"
        verdicts.append(within(small, usual, SAME_TRAINING * usual.mean) if same else lower(small, usual))
        lines.append(f"{name}: {small.text()} with 0.01, {usual.text()} with 0.1: {verdicts[-1]}")
    return Judgement(all_of(verdicts), tuple(lines))


def boost_in_evaluation(evidence: Evidence) -> Judgement:
    """Batch norm's validation error with running statistics against that with those of its batches."""
    parts = []
    for start in STARTS:
        metrics = (final_error, final_batch_mode_error)
        running, batches = (evidence.sample("noisy-cifar10", "batch", start, metric) for metric in metrics)
        if running is None or batches is None:
            return no_data("varprop reproduce noisy-cifar10 --device cuda --compile --seeds 3 --methods batch")
        texts = f"{running.text(3, 100, ' %')} in evaluation mode, {batches.text(3, 100, ' %')} in batches"
        parts.append(Judgement(lower(running, batches), (f"validation error, {start_label(start)}: {texts}",)))
    return joined(parts)


def _compare_validation(
    evidence: Evidence, experiment: str, others: Sequence[str], judge: Callable[[Sample, Sample, Metric], str]
) -> Judgement:
    """Batch norm against others in validation loss and error, from batch norm's start as in the paper's figures."""
    verdicts, lines = [], []
    for metric, name, factor, unit in ((final(VALID_LOSS), "loss", 1.0, ""), (final_error, "error", 100.0, " %")):
        samples = {method: evidence.sample(experiment, method, "bn", metric) for method in ("batch", *others)}
        own = samples["batch"]
        rest = [samples[method] for method in others]
        verdicts += [MISSING if own is None or other is None else judge(own, other, metric) for other in rest]
        texts = [f"{method_label(m)} {s.text(3, factor, unit) if s else 'not run'}" for m, s in samples.items()]
        lines += [f"validation {name}: {', '.join(texts)}"] if any(samples.values()) else []
    if all_of(verdicts) == MISSING:
        return no_data(f"varprop reproduce {experiment} --seeds 3 --starts bn", *lines)
    return Judgement(all_of(verdicts), tuple(lines))


def generalizes(evidence: Evidence) -> Judgement:
    """Batch norm against all others on clean MNIST."""
    others = [method for method in METHODS if method != "batch"]
    return _compare_validation(evidence, "mnist", others, lambda own, other, _: lower(own, other))


def on_par(evidence: Evidence) -> Judgement:
    """AP2 against batch norm on noisy MNIST."""

    def judge(own: Sample, other: Sample, metric: Metric) -> str:
        tolerance = ACCURACY_TOLERANCE if metric is final_error else LOSS_TOLERANCE * own.mean
        return within(own, other, tolerance)

    return _compare_validation(evidence, "noisy-mnist", ["analytic"], judge)
