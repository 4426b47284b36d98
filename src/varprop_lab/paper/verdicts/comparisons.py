"""Claims on comparing, on noisy CIFAR-10 as a whole, on equal learning rates, and on what normalizations cost."""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp

from ...protocol import METHODS, PAPER_LR_MAX, STARTS, TRAIN_LOSS, Outcome, build, method_label, start_label
from ...seed_statistics import (
    FAILS,
    HOLDS,
    Metric,
    Sample,
    at_most,
    average_loss,
    final,
    final_error,
    log_rate,
    lower,
    number,
    within,
)
from ...starts import doubled
from .batch_norm import ACCURACY_TOLERANCE, LOSS_TOLERANCE, POINT
from .evidence import MISSING, Evidence, Judgement, NotRun, all_of, claim, each, in_every_seed, opposite

_RATE = 1e-4
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam}


@functools.cache
def step_factor(optimizer: str) -> float:
    """The change of all weights of the MNIST network in one step of w = 2w' over that of w, with SGD or Adam."""
    images = torch.randn(128, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(128) % 10
    plain = build("mnist", 0, dtype=torch.float64)
    changes = []
    for model in (doubled(plain), plain):
        before, update = _weights(model), _OPTIMIZERS[optimizer](model.parameters(), lr=_RATE)  # type: ignore[call-arg]
        F.cross_entropy(model(images), labels).backward()
        update.step()
        changes.append(float((_weights(model) - before).norm()))
    return changes[0] / changes[1]


@torch.no_grad()
def _weights(model: nn.Module) -> Tensor:
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return torch.cat([layer.weight.flatten() for layer in layers])


SMALL_RATIO = 1.25
MUCH_CLOSER = 0.5  # of the logarithm of the ratio
PAPER_FACTOR, FACTOR_TOLERANCE = 4.0, 0.1
_OWN = (("standard", "none"), ("weight", "wn"), ("batch", "bn"), ("analytic", "ap2"))
_STEP = (
    "Measured when this page is written, on the first step of the MNIST network in float64: the change of all weights "
    "written as w = 2w' over that of w,"
)


@claim(
    "four-times",
    "Minimizing f(2θ') by steepest descent at the same learning rate makes 4 times larger steps",
    f"{_STEP} with SGD; it is 4 ± {FACTOR_TOLERANCE}.",
    optimizer="SGD",
)
@claim(
    "four-times-adam",
    "Ours, not the paper's: with Adam, by which its comparison is made, these steps are 4 times larger too",
    f"{_STEP} with Adam; it is 4 ± {FACTOR_TOLERANCE}. (By Adam's formula it is 2, and more where gradients are not "
    "large beside its eps.)",
    optimizer="Adam",
)
def _step_is_four_times_as_large(_: Evidence, optimizer: str) -> Judgement:
    return four_times(optimizer, step_factor(optimizer))


def four_times(optimizer: str, factor: float) -> Judgement:
    """Judge if a factor is the paper's."""
    verdict = HOLDS if abs(factor - PAPER_FACTOR) <= FACTOR_TOLERANCE else FAILS
    return Judgement(verdict, (f"with {optimizer} the step of w is {number(factor)} times as large",))


@claim(
    "equal-rates",
    "Comparing at equal learning rates misleads: w = 2w' looks like an improvement",
    "Both networks are the same function at the start and have the same rate. The running training loss, averaged over "
    "all epochs, of the network written as w = 2w' is lower than that of the standard one by more than the noise.",
    "naive/naive-training",
)
def _equal_rates_mislead(evidence: Evidence) -> Judgement:
    plain, double = (evidence.sample("naive", "standard", "none", average_loss, variant) for variant in ("", "double"))
    ratio = number(plain.mean / double.mean) if double.mean else "undefined"
    line = f"mean loss over epochs: Standard {plain.text()}, w = 2w' {double.text()}, ratio {ratio}"
    return Judgement(lower(double, plain), (line,))


@claim(
    "great-improvement",
    "Compared so, w = 2w' appears as a great improvement of the speed of training",
    "In every seed the network written as w = 2w' comes to the running training loss at which the standard one ends in "
    f"fewer than 1 / {SMALL_RATIO} of the epochs: up to that factor differences on noisy CIFAR-10 count as not "
    "pronounced.",
    "naive/naive-training",
)
def _improvement_of_the_speed_is_great(evidence: Evidence) -> Judgement:
    ends = evidence.sample("naive", "standard", "none", final(TRAIN_LOSS)).by_seed

    def epochs_to_the_same_loss(outcome: Outcome) -> float:
        losses = outcome.curves.get(TRAIN_LOSS, [])
        if outcome.cell.seed not in ends or not losses:
            return math.nan
        reached = (n for n, loss in enumerate(losses, 1) if loss <= ends[outcome.cell.seed])
        return next(reached, math.inf) / len(losses)

    shares = evidence.sample("naive", "standard", "none", epochs_to_the_same_loss, "double")
    verdict = in_every_seed([share < 1 / SMALL_RATIO for share in shares.values])
    texts = ", ".join("never" if math.isinf(share) else f"{100 * share:.0f} %" for share in shares.values)
    return Judgement(verdict, (f"share of the epochs after which w = 2w' is where Standard ends: {texts}",))


@claim(
    "search-undoes",
    "A learning rate found for each removes the effect of w = 2w'",
    "Both networks are the same function at the start, and a rate up to 0.1 is found for each: the running training "
    f"losses, averaged over all epochs, differ by at most {LOSS_TOLERANCE:.0%} of the standard one's, with the noise "
    "to spare.",
    "reparametrized/training",
)
def _search_undoes_a_reparametrization(evidence: Evidence) -> Judgement:
    plain, double = (
        evidence.sample("reparametrized", "standard", "none", average_loss, variant) for variant in ("", "double")
    )
    rates = [
        evidence.sample("reparametrized", "standard", "none", log_rate, variant).map(lambda log: 10**log).text()
        for variant in ("", "double")
    ]
    losses = f"mean loss over epochs: Standard {plain.text()}, w = 2w' {double.text()}"
    line = f"rates found: Standard {rates[0]}, w = 2w' {rates[1]}"
    return Judgement(within(plain, double, LOSS_TOLERANCE * plain.mean), (losses, line))


@claim(
    "fair-is-closer",
    "With optimized rates and the same start, methods differ much less than when compared naively",
    "The highest final running training loss of the four methods over the lowest, seed by seed: from init = BN with "
    "rates found its logarithm is at most half that at one rate from each method's own start, with the noise to spare.",
    "naive/naive-training",
)
def _fair_is_closer(evidence: Evidence) -> Judgement:
    rate = min((o.cell.lr_max for o in evidence.outcomes if o.cell.experiment == "naive"), default=None)
    naive = evidence.spread("naive", _OWN, rate)
    fair = evidence.spread("mnist", [(method, "bn") for method in METHODS], PAPER_LR_MAX)
    verdict = at_most(fair.map(math.log), naive.map(lambda ratio: MUCH_CLOSER * math.log(ratio)), 0.0)
    return Judgement(verdict, (f"highest / lowest: naive {naive.text()}, from init = BN {fair.text()}",))


@claim(
    "cifar-close",
    "On noisy CIFAR-10 the differences in training loss between starts and methods are not pronounced",
    "Of any two of the twelve pairs of method and start, the mean of the higher final running training loss is at most "
    f"{SMALL_RATIO} times the lower, with the noise to spare.",
    "noisy-cifar10/training",
)
def _cifar_close(evidence: Evidence) -> Judgement:
    cells: list[tuple[str, str]] = [(method, start) for start in STARTS for method in METHODS]
    samples = {cell: evidence.sample("noisy-cifar10", *cell, final(TRAIN_LOSS)) for cell in cells}
    cells.sort(key=lambda cell: samples[cell].mean)
    verdicts = {
        (low, high): within(samples[high], samples[low], (SMALL_RATIO - 1) * samples[low].mean)
        for low, high in itertools.combinations(cells, 2)
    }
    apart = [pair for pair, verdict in verdicts.items() if verdict == FAILS]
    lines = [_lowest_and_highest([cell for cell in cells if cell[1] == start], samples) for start in STARTS]
    lines += [f"beyond the limit: {_lowest_and_highest(pair, samples)}" for pair in apart]
    return Judgement(all_of(verdicts.values()), tuple(lines))


def _lowest_and_highest(cells: Sequence[tuple[str, str]], samples: Mapping[tuple[str, str], Sample]) -> str:
    texts = [f"{method_label(m)} from {start_label(s)} {samples[m, s].text()}" for m, s in (cells[0], cells[-1])]
    return " to ".join(texts)


@claim(
    "cifar-bn-trains-best",
    "On noisy CIFAR-10 BN has the best training objective",
    "BN's final running training loss, from the start that suits it best, is lower than that of each other method from "
    "the start that suits that one best, by more than the noise. (The paper calls the lead not decisive.)",
    "noisy-cifar10/training",
    metric=final(TRAIN_LOSS),
)
@claim(
    "cifar-bn-validates-best",
    "On noisy CIFAR-10 BN has the best validation accuracy",
    "The same for the final validation error.",
    "noisy-cifar10/validation-accuracy",
    metric=final_error,
)
def _batch_first(evidence: Evidence, metric: Metric) -> Judgement:
    best: dict[str, tuple[str, Sample]] = {m: _from_the_best_start(evidence, m, metric) for m in METHODS}
    orders = {m: lower(best["batch"][1], best[m][1]) for m in METHODS if m != "batch"}
    against = ", ".join(f"{method_label(method)} {verdict}" for method, verdict in orders.items())
    return Judgement(all_of(orders.values()), (_best_starts(best, metric), f"against: {against}"))


@claim(
    "cifar-comparable-training",
    "On noisy CIFAR-10 AP2 is comparable to BN in training: the difference is not decisive",
    "The final running training losses of the two, each from the start that suits it best, differ by at most "
    f"{LOSS_TOLERANCE:.0%} of BN's, with the noise to spare. Does not hold when they differ by more, beyond the noise, "
    "whoever is better.",
    "noisy-cifar10/training",
    metric=final(TRAIN_LOSS),
)
@claim(
    "cifar-comparable-validation",
    "On noisy CIFAR-10 AP2 is comparable to BN in validation",
    f"The same for the final validation errors, which differ by at most {POINT}.",
    "noisy-cifar10/validation-accuracy",
    metric=final_error,
)
def _analytic_comparable(evidence: Evidence, metric: Metric) -> Judgement:
    best = {method: _from_the_best_start(evidence, method, metric) for method in ("batch", "analytic")}
    batch, analytic = (sample for _, sample in best.values())
    tolerance = ACCURACY_TOLERANCE if metric is final_error else LOSS_TOLERANCE * batch.mean
    return Judgement(within(analytic, batch, tolerance), (_best_starts(best, metric),))


def _from_the_best_start(evidence: Evidence, method: str, metric: Metric) -> tuple[str, Sample]:
    samples = [(start, evidence.find("noisy-cifar10", method, start, metric)) for start in STARTS]
    measured = [(start, sample) for start, sample in samples if sample is not None]
    if not measured:
        raise NotRun(f"{method_label(method)} not run", "noisy-cifar10")
    return min(measured, key=lambda pair: pair[1].mean)


def _best_starts(best: Mapping[str, tuple[str, Sample]], metric: Metric) -> str:
    what, text = ("validation error", Sample.percent) if metric is final_error else ("training loss", Sample.text)
    ends = [f"{method_label(method)} {text(s)} from {start_label(start)}" for method, (start, s) in best.items()]
    return f"{what} from the best start: {', '.join(ends)}"


SIDES = (32, 64)
NO_CHANGE = 1e-3


@claim(
    "image-size",
    "The normalization is independent of the image size",
    "Measured when this page is written, on the network of noisy CIFAR-10 with inputs of mean 0 and variance 1: the "
    f"scales of all units for images of {SIDES[1]} pixels a side are those for {SIDES[0]}, within {NO_CHANGE:.1%}. "
    "(Zeros beyond the border count here by the share of positions that meet them. With `--borders plain`, as in the "
    "paper, they do not count, and nothing depends on the size.)",
)
def _independent_of_the_image_size(_: Evidence) -> Judgement:
    change = change_with_the_image_size()
    verdict = HOLDS if change <= NO_CHANGE else FAILS
    return Judgement(verdict, (f"scales of units change by up to {100 * change:.1f} %",))


@functools.cache
def change_with_the_image_size() -> float:
    """The largest change of a unit's scale from the smaller images to the larger ones, as a share."""
    scales = []
    for side in SIDES:
        mean = torch.zeros(1, 3, 1, 1)
        moments = vp.Moments(mean, torch.ones_like(mean), (1, 3, side, side))
        folded = vp.fold(vp.normalize(build("cifar10", 0), moments))
        layers = [layer for layer in folded.modules() if isinstance(layer, nn.Conv2d)]
        scales.append(torch.cat([layer.weight.detach().flatten(1).norm(dim=1) for layer in layers]))
    return float((scales[1] / scales[0] - 1).abs().max())


LITTLE = 0.05  # of the step without normalization
SIMILAR = 0.10
CONVOLUTIONAL = ("cifar", "resnet50", "unet")  # cases of the benchmark
NAMES = {"none": "Standard", "weight": "WN", "batch": "BN", "analytic": "AP2"}
Steps = dict[str, Sample]  # seconds of a step in every round, by variant
Limit = Callable[[Sample, Sample], str]
_FOR_EVERY = (
    "For every convolutional network and mode of `varprop bench`, round by round (shares are medians over rounds) and "
    "with the noise to spare:"
)
_STANDARD = "the same network without normalization, which has biases instead"


def _at_most_above(share: float) -> Limit:
    return lambda a, b: at_most(a, b.map(lambda seconds: (1 + share) * seconds), 0.0)


@claim(
    "bn-overhead",
    "BN's computation overhead is not negligible (the paper cites up to 25 %)",
    f"{_FOR_EVERY} the time of a training step with BN is more than {LITTLE:.0%} above that of {_STANDARD}.",
    variant="batch",
    against="none",
    limit=lambda a, b: opposite(_at_most_above(LITTLE)(a, b)),
)
@claim(
    "overhead",
    "The proposed normalization has very little overhead for CNNs, also considering back-propagation",
    f"{_FOR_EVERY} the time of a training step with AP2 is at most {LITTLE:.0%} above that of {_STANDARD}. Other "
    "networks are given for comparison.",
    variant="analytic",
    against="none",
    limit=_at_most_above(LITTLE),
)
@claim(
    "overhead-bn",
    "In CNNs the proposed normalization costs less than BN",
    f"{_FOR_EVERY} the time of a training step with AP2 is at most that with BN. Other networks are given for "
    "comparison.",
    variant="analytic",
    against="batch",
    limit=_at_most_above(0.0),
)
@claim(
    "overhead-wn",
    "In CNNs the complexity of the proposed normalization is similar to that of weight normalization",
    f"{_FOR_EVERY} the time of a training step with AP2 is at most {SIMILAR:.0%} above that with WN, where that was "
    "measured.",
    variant="analytic",
    against="weight",
    limit=_at_most_above(SIMILAR),
)
def overhead(evidence: Evidence, variant: str, against: str, limit: Limit) -> Judgement:
    """One variant against another, by the first file of the benchmark that exists."""
    file = next((file for file in evidence.benchmarks if file.is_file()), None)
    if file is None:
        return Judgement(MISSING, ("no benchmark was found", "to be made by: varprop bench"))
    try:
        measured = _read(file)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return Judgement(MISSING, (f"{file} was not understood ({type(error).__name__}: {error})",))
    comparable = {where: steps for where, steps in measured.items() if {variant, against} <= steps.keys()}
    convolutional = [where for where in comparable if where[0] in CONVOLUTIONAL]
    names = f"{NAMES[variant]} and {NAMES[against]}"
    missing = () if convolutional else (f"{names} were not both measured in a convolutional network",)

    def compare(where: tuple[str, str]) -> Judgement:
        a, b = comparable[where][variant], comparable[where][against]
        verdict = limit(a, b)
        return Judgement(verdict, (f"{where[1]}: {_line(variant, a, against, b)}: {verdict}",))

    judgement = each(compare, convolutional)
    beside = each(compare, [where for where in comparable if where not in convolutional])
    return Judgement(
        judgement.verdict, (*missing, *judgement.measured, *(f"for comparison: {line}" for line in beside.measured))
    )


def _read(file: Path) -> dict[tuple[str, str], Steps]:
    """The times by network and how it was run."""
    steps_by_case: dict[tuple[str, str], Steps] = {}
    for cell in json.loads(file.read_text("utf-8"))["cells"]:
        where = f"{cell['title']}, batch {cell['batch']}, {cell['mode']} {cell['precision']}"
        if cell["rounds"]:
            steps_by_case.setdefault((cell["case"], where), {})[cell["variant"]] = Sample(
                tuple(map(float, cell["rounds"]))
            )
    return steps_by_case


def _line(variant: str, a: Sample, against: str, b: Sample) -> str:
    pairs = ((variant, a), (against, b))
    texts = [f"{NAMES[name]} {1e3 * statistics.median(sample.values):.3g} ms" for name, sample in pairs]
    ratio = statistics.median(x / y for x, y in zip(a.values, b.values, strict=False))
    return f"{', '.join(texts)}, {number(abs(100 * (ratio - 1)), 2)} % {'less' if ratio < 1 else 'more'}"
