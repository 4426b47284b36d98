"""Claims on batch norm: its evaluation mode, its stability, its momentum, its generalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..protocol.experiments import MOMENTUM, PAPER_GRIDS
from ..protocol.labels import experiment_label, method_label, start_label
from ..protocol.records import METHODS, STARTS, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_LOSS
from .claims import claim
from .curves import EARLY, LATE, ROUGH, Span, evaluation_gap, rougher_in_evaluation, roughness
from .evidence import Evidence, Judgement, all_of, at_most, each, in_every_seed, lower, within
from .seed_statistics import Metric, Sample, final, final_batch_mode_error, final_error, log_rate

EVALUATION_GAP = 0.10
ROUGHER = 2.0
TEN_TIMES = -0.5  # of the decimal logarithm: nearer to a tenth than to the same rate
ACCURACY_TOLERANCE = 0.01
POINT = f"{100 * ACCURACY_TOLERANCE:.0f} percentage point"
LOSS_TOLERANCE = 0.10
SAME_TRAINING = 1e-3  # of the loss
_EVALUATION = (
    "Per seed, on MNIST: evaluation-mode training loss / running training loss - 1, median over these epochs, the lag "
    f"of the running mean (0.43 epochs) taken out; it must be away from 0 by more than {EVALUATION_GAP:.0%}, either "
    f"way, and the evaluation-mode loss more than {ROUGHER:g} times as rough as the running one ({ROUGH}). Other "
    "starts are given for comparison."
)
_STOCHASTIC = "From init = None BN's evaluation is very stochastic and does not match its training:"


@claim("bn-evaluation-early", f"{_STOCHASTIC} epochs 1 to 10", _EVALUATION, "mnist/training", span=EARLY)
@claim("bn-evaluation-late", f"{_STOCHASTIC} after epoch 10", _EVALUATION, "mnist/training", span=LATE)
def _evaluation_differs(evidence: Evidence, span: Span) -> Judgement:
    """Whether batch norm's loss in evaluation mode is away from that in its batches, and rougher."""
    metrics = (evaluation_gap(span), rougher_in_evaluation(span))
    gap, rough = (evidence.sample("mnist", "batch", "none", metric) for metric in metrics)
    away = in_every_seed([abs(value) > EVALUATION_GAP for value in gap.values])
    stochastic = in_every_seed([value > ROUGHER for value in rough.values])
    lines = [f"{start_label('none')}: away by {gap.percent()}, {rough.text()} times as rough"]
    lines.append(f"does not match: {away}; stochastic: {stochastic}")
    for start in ("bn", "ap2"):
        gap_there, rough_there = (evidence.find("mnist", "batch", start, metric) for metric in metrics)
        if gap_there and rough_there:
            lines.append(f"{start_label(start)}: away by {gap_there.percent()}, {rough_there.text()} times as rough")
    return Judgement(all_of([away, stochastic]), tuple(lines))


@claim(
    "bn-evaluation-better",
    "From init = BN BN's evaluation is better than its batch performance",
    "On MNIST, in every seed, the gap of the two claims above on its evaluation is negative, in epochs 1 to 10 and "
    "after them.",
    "mnist/training",
)
def _evaluation_is_better(evidence: Evidence) -> Judgement:
    def rule(epochs: tuple[str, Span]) -> Judgement:
        gap = evidence.sample("mnist", "batch", "bn", evaluation_gap(epochs[1]))
        return Judgement(in_every_seed([g < 0 for g in gap.values]), (f"{epochs[0]}: away by {gap.percent()}",))

    return each(rule, (("epochs 1 to 10", EARLY), ("after epoch 10", LATE)))


@claim(
    "bn-recurrent",
    "BN's application to recurrent networks is problematic",
    "In the recurrent network, from every start and in every seed, the loss on the training set in evaluation mode "
    f"is more than {EVALUATION_GAP:.0%} above the running loss after epoch 10, its lag taken out.",
    "recurrent/training",
)
def _evaluation_fails_in_recurrent(evidence: Evidence) -> Judgement:
    def rule(start: str) -> Judgement:
        gap = evidence.sample("recurrent", "batch", start, evaluation_gap(LATE))
        verdict = in_every_seed([value > EVALUATION_GAP for value in gap.values])
        return Judgement(verdict, (f"{start_label(start)}: away by {gap.percent()}",))

    return each(rule, STARTS)


@claim(
    "bn-unstable",
    "BN is unstable from other starts than its own",
    "In every experiment run, from init = None and from init = AP2, by the rule of the claim that it oscillates.",
    "mnist/training",
    PAPER_GRIDS,
)
def _unstable_from_other_starts(evidence: Evidence) -> Judgement:
    cases = [(experiment, start) for experiment in evidence.ran(PAPER_GRIDS) for start in ("none", "ap2")]
    return each(lambda case: _rougher_than_at_home(evidence, *case), cases)


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
    verdicts, texts = [], []
    for curve, name in ((TRAIN_LOSS, "in batches"), (TRAIN_EVAL_LOSS, "in evaluation")):
        home, away = (evidence.sample(experiment, "batch", where, roughness(curve)) for where in ("bn", start))
        verdicts.append(lower(home, away))
        texts.append(f"{name} {away.text()} against {home.text()} from its own start: {verdicts[-1]}")
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    return Judgement(all_of(verdicts), (f"{where}, roughness {'; '.join(texts)}",))


@claim(
    "bn-smaller-rate",
    "From AP2's start BN wants a learning rate smaller by an order of magnitude than from its own",
    "On MNIST, seed by seed: the decimal logarithm of the rate found from init = AP2 is below that from init = BN "
    "by at least 0.5 (nearer to a tenth than to the same), with the noise to spare.",
    "mnist/learning-rate",
)
def _wants_a_smaller_rate(evidence: Evidence) -> Judgement:
    own, other = (evidence.sample("mnist", "batch", start, log_rate) for start in ("bn", "ap2"))
    ratio = 10 ** (other.mean - own.mean)
    return Judgement(at_most(other, own, TEN_TIMES), (f"rate from init = AP2 / rate from init = BN: {ratio:.2g}",))


@claim(
    "bn-momentum",
    "A smaller momentum of BN would help its evaluation, and does not affect training (footnote)",
    "BN on MNIST from init = None at one rate, with momentum 0.1 and 0.01: in epochs 1 to 10 the gap and the "
    "roughness of its evaluation, measured as above, are lower with 0.01 by more than the noise, and the final "
    f"running training losses differ by at most {SAME_TRAINING:.1%}.",
    "momentum/training",
    fixed=True,
)
def _smaller_momentum_helps(evidence: Evidence) -> Judgement:
    metrics = {
        "away by": lambda outcome: abs(evaluation_gap(EARLY)(outcome)),
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
    "bn-boost",
    "On noisy CIFAR-10 BN generalizes much better with accumulated statistics than with those of batches",
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
    metrics = (final_error, final_batch_mode_error)
    running, batches = (evidence.sample(experiment, "batch", start, metric) for metric in metrics)
    verdict = lower(running, batches)
    where = f"{experiment_label(experiment)}, {start_label(start)}"
    texts = f"{running.percent()} in evaluation mode, {batches.percent()} in batches: {verdict}"
    return Judgement(verdict, (f"validation error, {where}: {texts}",))


@claim(
    "bn-generalizes",
    "BN generalizes better on clean MNIST",
    "From init = BN, as in the paper's figure: both the final validation loss and the final validation error of BN "
    "are lower than those of each other method by more than the noise.",
    "mnist/validation-accuracy",
)
def _generalizes(evidence: Evidence) -> Judgement:
    others = [method for method in METHODS if method != "batch"]
    return _compare_validation(evidence, "mnist", others, lambda own, other, _: lower(own, other))


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
