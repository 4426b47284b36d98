"""Claims on evaluation mode: whether the loss there is that of training, for batch norm and for the others."""

from __future__ import annotations

from ..protocol.experiments import MOMENTUM
from ..protocol.labels import method_label, start_label
from ..protocol.records import METHODS, STARTS, TRAIN_LOSS
from .claims import claim
from .curves import EARLY, LATE, ROUGH, Span, evaluation_gap, rougher_in_evaluation
from .evidence import Evidence, Judgement, all_of, each, in_every_seed, lower, within
from .seed_statistics import final

EVALUATION_GAP = 0.10
ROUGHER = 2.0
SAME_TRAINING = 1e-3  # of the loss
SPANS: tuple[tuple[str, Span], ...] = (("in epochs 1 to 10", EARLY), ("after epoch 10", LATE))
_EVALUATION = (
    "Per seed, on MNIST: evaluation-mode training loss / running training loss - 1, median over these epochs, the lag "
    f"of the running mean (0.43 epochs) taken out; it must be away from 0 by more than {EVALUATION_GAP:.0%}, either "
    f"way, and the evaluation-mode loss more than {ROUGHER:g} times as rough as the running one ({ROUGH}). Other "
    "starts are given for comparison."
)
_BETTER = "From init = BN BN's evaluation is better than its batch performance:"
_NEGATIVE = (
    "On MNIST the gap of the claims above on its evaluation is negative in these epochs, by more than the noise."
)
_STOCHASTIC = "From init = None BN's evaluation is very stochastic and does not match its training:"


@claim(
    "running-matches",
    "For all methods but BN the running loss matches the loss on the whole training set",
    "On MNIST, from each of the three starts, in epochs 1 to 10 and after them: the gap of the claims below on BN's "
    f"evaluation is at most {EVALUATION_GAP:.0%} either way, in every seed of Standard, WN and AP2. BN is given for "
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
    gaps = {name: evidence.sample(experiment, method, start, evaluation_gap(span)) for name, span in SPANS}
    verdict = all_of(in_every_seed([abs(g) <= EVALUATION_GAP for g in gap.values]) for gap in gaps.values())
    texts = ", ".join(f"{gap.percent()} {name}" for name, gap in gaps.items())
    return Judgement(verdict, (f"{method_label(method)}, {start_label(start)}: away by {texts}: {verdict}",))


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


@claim("bn-evaluation-better-early", f"{_BETTER} epochs 1 to 10", _NEGATIVE, "mnist/training", span=EARLY)
@claim("bn-evaluation-better-late", f"{_BETTER} after epoch 10", _NEGATIVE, "mnist/training", span=LATE)
def _evaluation_is_better(evidence: Evidence, span: Span) -> Judgement:
    gap = evidence.sample("mnist", "batch", "bn", evaluation_gap(span))
    return Judgement(lower(gap, gap.map(lambda _: 0.0)), (f"away by {gap.percent()}",))


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
