"""What the paper claims, in its order, with the rule by which each claim is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..protocol.experiments import PAPER_GRIDS
from . import batch_norm, beyond, comparisons, training
from .batch_norm import ACCURACY_TOLERANCE, EVALUATION_GAP, LOSS_TOLERANCE, ROUGHER
from .comparisons import FACTOR_TOLERANCE
from .evidence import Evidence, Judgement


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
    judge: Callable[[Evidence], Judgement]
    fixed: bool = False


_TRAINED = (
    f"ends with a running training loss that has come {training.TRAINED:.0%} of the way from guessing (ln 10) to the "
    "lowest mean of any method from any start of the experiment"
)
_ROUGH = "roughness is the mean absolute second difference of the logarithm of a loss from epoch to epoch"
_EVALUATION = (
    "Per seed, on MNIST: evaluation-mode training loss / running training loss - 1, median over these epochs, the lag "
    f"of the running mean (0.43 epochs) taken out; it must be away from 0 by more than {EVALUATION_GAP:.0%}, either "
    f"way, and the evaluation-mode loss more than {ROUGHER:g} times as rough as the running one ({_ROUGH}). Other "
    "starts are given for comparison."
)
_STEP = (
    "Measured when this page is written, on the first step of the MNIST network in float64: the change of all weights "
    "written as w = 2w' over that of w,"
)

_STEPS = (
    Claim(
        "four-times",
        "Minimizing f(2θ') by steepest descent at the same learning rate makes 4 times larger steps",
        f"{_STEP} with SGD; it is 4 ± {FACTOR_TOLERANCE}.",
        "",
        (),
        comparisons.four_times_with("SGD"),
    ),
    Claim(
        "four-times-adam",
        "The same in the paper's comparison, which is made with Adam",
        f"{_STEP} with Adam; it is 4 ± {FACTOR_TOLERANCE}. (By Adam's formula it is 2, and more where gradients are "
        "not large beside its eps.)",
        "",
        (),
        comparisons.four_times_with("Adam"),
    ),
    Claim(
        "equal-rates",
        "Comparing at equal learning rates misleads: w = 2w' looks like an improvement",
        "Both networks are the same function at the start and have the same rate. The running training loss, averaged "
        "over all epochs, of the network written as w = 2w' is lower than that of the standard one by more than "
        "the noise.",
        "naive/naive-training",
        ("naive",),
        comparisons.equal_rates_mislead,
        fixed=True,
    ),
    Claim(
        "fair-is-closer",
        "With optimized rates and the same start, methods differ much less than when compared naively",
        "The highest final running training loss of the four methods over the lowest, seed by seed: from init = BN "
        "with rates found it is lower than at one rate from each method's own start, by more than the noise.",
        "naive/naive-training",
        ("naive",),
        comparisons.fair_is_closer,
        fixed=True,
    ),
    Claim(
        "decay-nothing",
        "Decay on scale-invariant weights achieves nothing",
        "For WN, BN and AP2 the final validation error without decay is above that with it by at most "
        f"{100 * ACCURACY_TOLERANCE:.0f} percentage point, with the noise to spare.",
        "decay/validation-accuracy",
        ("decay",),
        beyond.decay_achieves_nothing,
    ),
    Claim(
        "decay-destabilizes",
        "Decay on scale-invariant weights destabilizes the learning",
        "For WN, BN and AP2 the running training loss with decay is rougher than without by more than the noise; "
        f"{_ROUGH}.",
        "decay/training",
        ("decay",),
        beyond.decay_destabilizes,
    ),
    Claim(
        "projection",
        "Projection to unit norm does in a simpler way what decay does (footnote)",
        "For WN and AP2 the final running training loss with projection is at most "
        f"{beyond.AS_GOOD:.0%} above that with decay, with the noise to spare; does not hold when it is higher by more "
        "than the noise.",
        "decay/training",
        ("decay",),
        beyond.projection_replaces_decay,
    ),
)
_MNIST = (
    Claim(
        "hard-from-none",
        "From random weights the standard network is hard to train on MNIST, and BN performs better",
        f"On MNIST from init = None no seed of the standard network {_TRAINED}; and BN's final running training "
        "loss is lower by more than the noise.",
        "mnist/training",
        ("mnist",),
        training.hard_from_random_weights,
    ),
    Claim(
        "bn-evaluation-early",
        "From init = None BN's evaluation is very stochastic and does not match its training: epochs 1 to 10",
        _EVALUATION,
        "mnist/training",
        ("mnist",),
        batch_norm.evaluation_differs_early,
    ),
    Claim(
        "bn-evaluation-late",
        "From init = None BN's evaluation is very stochastic and does not match its training: after epoch 10",
        _EVALUATION,
        "mnist/training",
        ("mnist",),
        batch_norm.evaluation_differs_late,
    ),
    Claim(
        "bn-momentum",
        "A smaller momentum of BN would help its evaluation, and does not affect training (footnote)",
        "BN on MNIST from init = None at one rate, with momentum 0.1 and 0.01: in epochs 1 to 10 the gap and the "
        "roughness of its evaluation, measured as above, are lower with 0.01 by more than the noise, and the final "
        f"running training losses differ by at most {batch_norm.SAME_TRAINING:.1%}.",
        "momentum/training",
        ("momentum",),
        batch_norm.smaller_momentum_helps,
        fixed=True,
    ),
    Claim(
        "all-from-bn",
        "With BN's initialization all methods train",
        f"On MNIST from init = BN every seed of each of the four methods {_TRAINED}.",
        "mnist/training",
        ("mnist",),
        training.all_from_batch_start,
    ),
    Claim(
        "bn-evaluation-better",
        "From init = BN BN's evaluation is better than its batch performance",
        "On MNIST, in every seed, the gap of the two claims above on its evaluation is negative, in epochs 1 to 10 and "
        "after them.",
        "mnist/training",
        ("mnist",),
        batch_norm.evaluation_is_better,
    ),
    Claim(
        "others-from-ap2",
        "Standard and WN work from AP2's start",
        f"In every experiment run, from init = AP2, every seed of Standard and of WN {_TRAINED}.",
        "mnist/training",
        PAPER_GRIDS,
        training.others_from_analytic_start,
    ),
    Claim(
        "bn-oscillates",
        "From AP2's start BN oscillates",
        "On MNIST BN's running training loss and its evaluation-mode loss are both rougher from init = AP2 than from "
        f"init = BN, by more than the noise; {_ROUGH}.",
        "mnist/training",
        ("mnist",),
        batch_norm.oscillates_from_analytic_start,
    ),
    Claim(
        "bn-smaller-rate",
        "From AP2's start BN wants a learning rate smaller by an order of magnitude than from its own",
        "On MNIST, seed by seed: the decimal logarithm of the rate found from init = AP2 is below that from init = BN "
        "by at least 0.5 (nearer to a tenth than to the same), with the noise to spare.",
        "mnist/learning-rate",
        ("mnist",),
        batch_norm.wants_a_smaller_rate,
    ),
    Claim(
        "trains",
        "AP2 trains from all three starts",
        f"In every experiment run, from each of the three starts, every seed {_TRAINED}.",
        "mnist/training",
        PAPER_GRIDS,
        training.analytic_trains,
    ),
    Claim(
        "near-zero",
        "On MNIST AP2 brings the training loss close to zero from all three starts",
        f"Every seed ends with a running training loss of at most {training.NEAR_ZERO:.3f}, 1 % of that of guessing.",
        "mnist/training",
        ("mnist",),
        training.near_zero,
    ),
    Claim(
        "overfits",
        "On MNIST AP2 overfits",
        "From every start, in every seed, the validation loss ends above the running training loss and more than "
        f"{training.RISEN:.0%} above its own lowest value.",
        "mnist/validation-loss",
        ("mnist",),
        training.overfits,
    ),
    Claim(
        "bn-generalizes",
        "BN generalizes better on clean MNIST",
        "From init = BN, as in the paper's figure: both the final validation loss and the final validation error of BN "
        "are lower than those of each other method by more than the noise.",
        "mnist/validation-accuracy",
        ("mnist",),
        batch_norm.generalizes,
    ),
)
_NOISY = (
    Claim(
        "noise-prevents",
        "On noisy MNIST overfitting does not occur",
        "From init = BN, as in the paper's figure, by the rule of the claim on overfitting, of BN and AP2.",
        "noisy-mnist/validation-loss",
        ("noisy-mnist",),
        training.does_not_overfit_with_noise,
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
        batch_norm.on_par,
    ),
    Claim(
        "cifar-close",
        "On noisy CIFAR-10 the differences in training loss are not pronounced",
        "From every start, the highest mean of the four methods' final running training losses is at most "
        f"{comparisons.SMALL_RATIO} times the lowest, with the noise to spare.",
        "noisy-cifar10/training",
        ("noisy-cifar10",),
        comparisons.cifar_close,
    ),
    Claim(
        "cifar-bn-trains-best",
        "On noisy CIFAR-10 BN has the best training objective",
        "BN's final running training loss, from the start that suits it best, is lower than that of each other method "
        "from the start that suits that one best, by more than the noise. (The paper calls the lead not decisive.)",
        "noisy-cifar10/training",
        ("noisy-cifar10",),
        comparisons.batch_trains_best,
    ),
    Claim(
        "cifar-bn-validates-best",
        "On noisy CIFAR-10 BN has the best validation accuracy",
        "The same for the final validation error.",
        "noisy-cifar10/validation-accuracy",
        ("noisy-cifar10",),
        comparisons.batch_validates_best,
    ),
    Claim(
        "bn-boost",
        "On noisy CIFAR-10 BN generalizes much better with accumulated statistics than with those of batches",
        "From every start, BN's final validation error in evaluation mode is lower than with the statistics of batches "
        "of the training's size, by more than the noise.",
        "noisy-cifar10/validation-accuracy",
        ("noisy-cifar10",),
        batch_norm.boost_in_evaluation,
    ),
)
_CONCLUSION = (
    Claim(
        "robust",
        "AP2 improves robustness to the start",
        "The highest final running training loss over the three starts divided by the lowest, seed by seed: AP2's is "
        "lower than that of each other method by more than the noise, in every experiment run.",
        "mnist/training",
        PAPER_GRIDS,
        training.robust_to_the_start,
    ),
    Claim(
        "lower-loss",
        "AP2 reaches a lower training loss than the others in many cases",
        "A case is an experiment and a start run with all four methods. AP2 wins it when its final running training "
        "loss is lower than that of each other method by more than the noise. Holds when it wins at least half of the "
        "cases; does not hold when it would miss half even if it won all undecided ones.",
        "mnist/training",
        PAPER_GRIDS,
        training.analytic_often_lowest,
    ),
    Claim(
        "lower-loss-evaluation",
        "AP2 reaches a lower training loss than the others in many cases: every method in evaluation mode",
        "The same with the loss on the training set in evaluation mode, where it was recorded for all four methods.",
        "mnist/training",
        PAPER_GRIDS,
        training.analytic_often_lowest_in_evaluation,
    ),
    Claim(
        "bn-unstable",
        "BN is unstable from other starts than its own",
        "In every experiment run, from init = None and from init = AP2, by the rule of the claim that it oscillates.",
        "mnist/training",
        PAPER_GRIDS,
        batch_norm.unstable_from_other_starts,
    ),
    Claim(
        "orthogonal",
        "AP2 may benefit from orthogonal weights",
        "AP2's final running training loss from the projection of orthogonal weights is lower than from that of random "
        "ones by more than the noise; the other methods are given beside it.",
        "orthogonal/training",
        ("orthogonal",),
        beyond.orthogonal_helps,
    ),
    Claim(
        "ap2-small-batches",
        "AP2 does not depend on the batch size",
        "With batches of 4 and 16 its final validation error is above that with 128 by at most "
        f"{100 * ACCURACY_TOLERANCE:.0f} percentage point, with the noise to spare. All see equally many samples.",
        "small-batches/batch-size-validation-accuracy",
        ("small-batches",),
        beyond.analytic_needs_no_large_batch,
    ),
    Claim(
        "bn-small-batches",
        "BN depends on the batch size: it loses with batches of 4 and of 16",
        "Its final validation error is higher with batches of 4, and of 16, than with 128, by more than the noise.",
        "small-batches/batch-size-validation-accuracy",
        ("small-batches",),
        beyond.batch_norm_needs_one,
    ),
    Claim(
        "recurrent",
        "There is no limitation to apply AP2 in recurrent networks",
        f"In the recurrent network, from each of the three starts, every seed {_TRAINED}.",
        "recurrent/training",
        ("recurrent",),
        training.recurrent_trains,
    ),
    Claim(
        "bn-recurrent",
        "BN's application to recurrent networks is problematic",
        "In the recurrent network, from every start and in every seed, the loss on the training set in evaluation mode "
        f"is more than {EVALUATION_GAP:.0%} above the running loss after epoch 10, its lag taken out.",
        "recurrent/training",
        ("recurrent",),
        batch_norm.evaluation_fails_in_recurrent,
    ),
)
CLAIMS = (*_STEPS, *_MNIST, *_NOISY, *_CONCLUSION)
