"""Claims on evaluation mode: whether the loss there is that of training, for batch norm and for the others."""

from __future__ import annotations

from ...protocol.experiments import MOMENTUM
from ...protocol.labels import method_label, start_label
from ...protocol.records import METHODS, STARTS, TRAIN_LOSS
from ...seed_statistics import Sample, final, lower, within
from .claims import claim
from .curves import EARLY, LATE, ROUGH, Span, evaluation_distance, evaluation_gap, rougher_in_evaluation
from .evidence import Evidence, Judgement, all_of, each, in_every_seed

EVALUATION_GAP = 0.10
ROUGHER = 2.0
SAME_TRAINING = 1e-3  # of the loss
SPANS: tuple[tuple[str, Span], ...] = (("in epochs 1 to 10", EARLY), ("after epoch 10", LATE))
_EVALUATION = (
    "Per seed, on MNIST: the gap is evaluation-mode training loss / running training loss - 1, the lag of the running "
    "mean (0.43 epochs) taken out; its size, either way and by the mean of the logarithm over these epochs, must be "
    f"more than {EVALUATION_GAP:.0%}, and the evaluation-mode loss more than {ROUGHER:g} times as rough as the running "
    f"one ({ROUGH}). 'Above' or 'below' is by the median. Other starts are given for comparison."
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

    found = each(rule, [method for method in METHODS if method != "batch"])
    return Judgement(found.verdict, (*found.measured, *rule("batch").measured))


def matches(evidence: Evidence, experiment: str, method: str, start: str) -> Judgement:
    """Whether the loss in evaluation mode is that of training, but for a small gap, in every seed."""
    found = [(name, *_gap_and_distance(evidence, experiment, method, start, span)) for name, span in SPANS]
    verdict = all_of(in_every_seed([far <= EVALUATION_GAP for far in away.values]) for _, _, away in found)
    texts = ", ".join(f"{_away(gap, away)} {name}" for name, gap, away in found)
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
    """Whether batch norm's loss in evaluation mode is away from that in its batches, and rougher."""
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
    fixed=True,
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
