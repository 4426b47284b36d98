"""Claims on recurrent networks: what batch norm loses there and the analytic normalization does not."""

from __future__ import annotations

from ...protocol.labels import start_label
from ...protocol.records import STARTS
from .claims import claim
from .curves import LATE, evaluation_gap
from .evaluation_mode import EVALUATION_GAP, matches
from .evidence import Evidence, Judgement, all_of, each, in_every_seed
from .training import ANALYTIC, TRAINED_RULE, train


@claim(
    "recurrent",
    "There is no limitation to apply AP2 in recurrent networks",
    f"In the recurrent network, from each of the three starts, every seed {TRAINED_RULE}; and its loss on the training "
    f"set in evaluation mode is away from the running loss by at most {EVALUATION_GAP:.0%}, its lag taken out, in "
    "epochs 1 to 10 and after them. (All methods pass the first, BN fails the second.)",
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
    f"is more than {EVALUATION_GAP:.0%} above the running loss after epoch 10, its lag taken out.",
    "recurrent/training",
    cases=STARTS,
)
def _evaluation_fails_in_recurrent(evidence: Evidence, start: str) -> Judgement:
    gap = evidence.sample("recurrent", "batch", start, evaluation_gap(LATE))
    verdict = in_every_seed([value > EVALUATION_GAP for value in gap.values])
    return Judgement(verdict, (f"{start_label(start)}: away by {gap.percent()}",))
