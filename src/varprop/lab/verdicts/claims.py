"""What the paper claims, in its order, with the rule by which each claim is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.experiments import PAPER_GRIDS
from . import rules
from .rules import ACCURACY_TOLERANCE, EVALUATION_GAP, GUESSING, LOSS_TOLERANCE, SMALL_RATIO, TRAINED, Evidence, Finding


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, and how it is judged.

    Attributes:
        name: A short name.
        text: The sentence.
        rule: How the verdict is computed, in words.
        figure: ``experiment/figure`` that bears on it.
        experiments: That it is about.
        judge: Computes the verdict.
        fixed: Whether the learning rate was fixed, so that no bound plays a part.
    """

    name: str
    text: str
    rule: str
    figure: str
    experiments: tuple[str, ...]
    judge: Callable[[Evidence], Finding]
    fixed: bool = False


CLAIMS = (
    Claim(
        "trains",
        "AP2 trains from all three starts",
        "In every experiment run, from each of the three starts, every seed ends with a running training loss of at "
        f"most {TRAINED:g} times the lowest mean of any method from any start there, and of half that of guessing "
        f"({GUESSING / 2:.3f}).",
        "mnist/training",
        PAPER_GRIDS,
        rules.analytic_trains,
    ),
    Claim(
        "lower-loss",
        "AP2 reaches a lower training loss than the others in many cases",
        "A case is an experiment and a start run with all four methods. AP2 wins it when its final running training "
        "loss is lower than that of each other method by more than the noise. Holds when it wins at least half of the "
        "cases; does not hold when it would miss half even if it won all undecided ones.",
        "mnist/training",
        PAPER_GRIDS,
        rules.analytic_often_lowest,
    ),
    Claim(
        "others-from-ap2",
        "Standard and WN work from AP2's start",
        "In every experiment run, from init = AP2, every seed of Standard and of WN ends with a running training loss "
        f"of at most {TRAINED:g} times the lowest mean of any method from any start there, and of half that of "
        f"guessing ({GUESSING / 2:.3f}).",
        "mnist/training",
        PAPER_GRIDS,
        rules.others_from_analytic_start,
    ),
    Claim(
        "bn-evaluation",
        "BN's evaluation differs from its batch performance from init = None",
        "Per seed, on MNIST: the median over the second half of the epochs of |evaluation-mode training loss / running "
        f"training loss - 1|. Holds when it exceeds {EVALUATION_GAP:.0%} in every seed from init = None, does not hold "
        "when it does in none; the other starts are given for comparison.",
        "mnist/training",
        ("mnist",),
        rules.evaluation_differs,
    ),
    Claim(
        "bn-generalizes",
        "BN generalizes better on clean MNIST",
        "From init = BN, as in the paper's figure: both the final validation loss and the final validation error of BN "
        "are lower than those of each other method by more than the noise.",
        "mnist/validation-accuracy",
        ("mnist",),
        rules.batch_generalizes,
    ),
    Claim(
        "on-par",
        "On noisy MNIST AP2 is on par with BN in validation",
        "From init = BN, as in the paper's figure: the final validation errors differ by at most "
        f"{100 * ACCURACY_TOLERANCE:.0f} percentage point and the losses by at most {LOSS_TOLERANCE:.0%} of BN's, with "
        "the noise to spare. Does not hold when either difference exceeds that by more than the noise, whoever "
        "is better.",
        "noisy-mnist/validation-accuracy",
        ("noisy-mnist",),
        rules.on_par,
    ),
    Claim(
        "cifar",
        "On noisy CIFAR-10 differences are small and BN leads in validation",
        "From every start, the highest mean of the four methods' final running training losses is at most "
        f"{SMALL_RATIO} times the lowest, with the noise to spare; and BN's validation error, from the start that "
        "suits it best, is lower than that of each other method from the start that suits that one best, by more than "
        "the noise.",
        "noisy-cifar10/validation-accuracy",
        ("noisy-cifar10",),
        rules.cifar_close,
    ),
    Claim(
        "equal-rates",
        "Comparing at equal learning rates misleads: w = 2w' looks like an improvement",
        "Both networks are the same function at the start and have the same rate. The running training loss, averaged "
        "over all epochs, of the network written as w = 2w' is lower than that of the standard one by more than "
        "the noise.",
        "naive/naive-training",
        ("naive",),
        rules.equal_rates_mislead,
        fixed=True,
    ),
)
