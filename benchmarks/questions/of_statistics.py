"""Questions about the predicted statistics: are they true, would others be truer, and do these train better?"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp
from varprop_lab.batches import MEASURE
from varprop_lab.environment import require
from varprop_lab.figures import Figure, Panel
from varprop_lab.paper.verdicts.batch_norm import LOSS_TOLERANCE
from varprop_lab.paper.verdicts.evidence import Judgement, in_every_seed
from varprop_lab.protocol import PAPER_BATCH, Start
from varprop_lab.seed_statistics import Sample, lower, within
from varprop_lab.starts import watch
from varprop_lab.training import Task

from ..ratios import normalized_layers
from .runs import (
    BANDS,
    RATES,
    TRAINED,
    Arm,
    Claims,
    Question,
    Records,
    Rule,
    Run,
    Value,
    curve,
    experiment,
    is_lower,
    line,
    ratio_figure,
)

# --- truth: Is the predicted standard deviation true, at the start and while a network trains?

NEAR, FAR = 1.1, 1.5  # factors, either way
TRUTH_NAMES: dict[Start, str] = {
    "none": "AP2, init = None",
    "bn": "AP2, init = BN",
    "ap2": "AP2, init = AP2",
    "orthogonal": "AP2, orthogonal",
}


def itself(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A normalized network has its predictions for scales."""
    return model


def _normalized(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """The function of a plain network, with its predictions for scales."""
    return vp.reparametrize(model, "analytic", moments=task.moments(seed))


def farthest(epoch: int) -> Value:
    """By which factor, either way, the prediction is off in the layer where it is off most."""

    def value(run: Run) -> float | None:
        layers = run["ratios"][epoch]
        return max(max(r, 1 / r) for r in layers) if all(layers) else None  # diverged, or nothing varies any more

    return value


def _is_off(arm: str, epoch: int, passes: Callable[[float], bool]) -> Rule:
    def rule(records: Records) -> Judgement:
        off = records.of(arm, farthest(epoch))
        return Judgement(in_every_seed([passes(value) for value in off.values]), (f"off by {off.text()} times",))

    return rule


def is_near(arm: str, epoch: int) -> Rule:
    """The rule that no layer is off by more than a little."""
    return _is_off(arm, epoch, lambda factor: factor <= NEAR)


def is_far(arm: str, epoch: int, limit: float) -> Rule:
    """The rule that some layer is off by more than that."""
    return _is_off(arm, epoch, lambda factor: factor > limit)


def is_nearer(first: tuple[str, int], second: tuple[str, int]) -> Rule:
    """The rule that the worst layer of an arm after an epoch is nearer than that of another."""

    def rule(records: Records) -> Judgement:
        near, far = (records.of(arm, farthest(epoch)) for arm, epoch in (first, second))
        return Judgement(lower(near, far), (f"off by {near.text()} and {far.text()} times",))

    return rule


def _claims_of_truth(arm: str) -> Claims:
    yield f"{arm}: before training every layer is within {NEAR} times", is_near(arm, 0)
    yield (
        f"{arm}: after one epoch some layer is off by more than {FAR} times",
        is_far(arm, 1, FAR),
    )
    yield f"{arm}: the worst layer is closer after one epoch than at the end", is_nearer((arm, 1), (arm, -1))


TRUTH_ARMS = (
    *(Arm(name, start=start, rates=(0.01,), watched=itself) for start, name in TRUTH_NAMES.items()),
    Arm("Standard, init = AP2", method="standard", rates=(0.01,), watched=_normalized),
)
DRAWN = [
    arm.name for arm in TRUTH_ARMS[1:]
]  # the first begins at a thousandth, which would leave no room for the others
TRUTH = Question(
    "truth",
    "Is the predicted standard deviation true while a network trains?",
    TRUTH_ARMS,
    experiment(epochs=10),
    tuple(claim for arm in TRUTH_ARMS for claim in _claims_of_truth(arm.name)),
    lambda records: ratio_figure("truth", records, DRAWN),
)


# --- correlations: Would statistics with all covariances be truer, and would they train better?

DIAGONAL, FULL = "variances alone", "all covariances"
EPS = 1e-6  # as varprop has it, beside the variances of what enters a layer
NODES = 24


def hermite() -> tuple[Tensor, Tensor]:
    """Nodes and weights of the mean over a normal variable."""
    rule = require("numpy.polynomial.hermite_e", "Quadrature").hermegauss(NODES)
    nodes, weights = map(torch.from_numpy, rule)
    return nodes, weights / weights.sum()


class Layer(nn.Module):
    """A linear layer whose outputs are brought to mean `shift` and deviation `scale`, by statistics it is given."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.weight, self.scale, self.shift = (
            nn.Parameter(p.detach().clone()) for p in (like.weight, like.scale, like.shift)
        )

    def forward(self, x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """The normalized outputs."""
        return (x @ self.weight.t() - mean) / std * self.scale + self.shift


class WithCovariances(nn.Module):
    """The paper's network, normalized by means and covariances of all units.

    Behind an activation Cov(f(X_i), f(X_j)) = C_ij E f'(X_i) E f'(X_j); variances are exact (mathematics.md, 9).
    """

    mean: Tensor
    covariance: Tensor
    nodes: Tensor
    weights: Tensor

    def __init__(self, layers: list[Any], mean: Tensor, covariance: Tensor) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(layer) for layer in layers)
        nodes, weights = hermite()
        for name, value in (("mean", mean), ("covariance", covariance), ("nodes", nodes), ("weights", weights)):
            self.register_buffer(name, value.to(layers[0].weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x, mean, covariance = x.flatten(1), self.mean, self.covariance
        layer: Any
        for index, layer in enumerate(self.layers):
            out = layer.weight @ covariance @ layer.weight.t() + EPS * torch.diag(layer.weight.square().sum(1))
            std = out.diagonal().sqrt()
            x = layer(x, layer.weight @ mean, std)
            if index < len(self.layers) - 1:
                x = torch.sigmoid(x)
                mean, covariance = self._logistic(layer, out / std / std[:, None])
        return x

    def _logistic(self, layer: Any, correlation: Tensor) -> tuple[Tensor, Tensor]:
        """Means and covariances behind logistic units that come with mean `shift` and deviation `scale`."""
        values = torch.sigmoid(layer.shift + layer.scale * self.nodes[:, None])
        mean, slope = self.weights @ values, self.weights @ (values * (1 - values))
        var = self.weights @ (values - mean).square()
        through = layer.scale * slope
        across = correlation * through * through[:, None]
        return mean, across - torch.diag(across.diagonal()) + torch.diag(var)


def with_covariances(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model's weights under statistics with covariances; those of the images are measured."""
    chunks = [images.flatten(0, 1).flatten(1).double() for images, _ in task.batches(seed, 128).chunks(0, MEASURE)]
    images = torch.cat(chunks)
    return WithCovariances(list(normalized_layers(model).values()), images.mean(0), torch.cov(images.t(), correction=0))


CORRELATIONS = Question(
    "correlations",
    "Would statistics with covariances do better?",
    (Arm(DIAGONAL, watched=itself), Arm(FULL, change=with_covariances, watched=itself)),
    experiment(epochs=10),
    (
        (f"with all covariances every layer is within {NEAR} times at the end", is_near(FULL, -1)),
        (
            "they are closer than variances alone, in the worst layer, at the end",
            is_nearer((FULL, -1), (DIAGONAL, -1)),
        ),
        ("they have a lower training loss", is_lower(((FULL, TRAINED), (DIAGONAL, TRAINED)))),
        ("they have a lower validation loss", is_lower(((FULL, "valid_loss"), (DIAGONAL, "valid_loss")))),
    ),
    lambda records: ratio_figure("correlations", records, [DIAGONAL, FULL]),
)


# --- frozen: Must statistics follow scale and shift while these are trained?

Behind = Callable[[Any, Tensor], tuple[Tensor, Tensor]]  # mean and variance behind a layer's units of that deviation


class WithVariances(nn.Module):
    """The paper's network, normalized by means and variances as a rule has them behind its logistic units.

    Every standard deviation is taken `over` times as large as the rule says, and scales are read as `over` times what
    they are, so that the network of a start is the same function.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, model: nn.Module, task: Task, seed: int, behind: Behind, over: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(layer) for layer in normalized_layers(model).values())
        self.behind, self.over = behind, over
        self.held: list[tuple[Tensor, Tensor]] | None = None  # statistics that stay as they are
        moments: Any = task.moments(seed)
        for name, value in (("mean", moments.mean), ("var", moments.var)):
            self.register_buffer(name, value.flatten().clone())
        with torch.no_grad():
            for layer in self.layers:
                layer.scale.mul_(over)  # type: ignore[operator]

    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        """Mean and standard deviation in front of every layer's scale and shift, as they are taken to be."""
        mean, var, result = self.mean, self.var, []
        layer: Any
        for layer in self.layers:
            result.append((layer.weight @ mean, self.over * (layer.weight.square() @ (var + EPS)).sqrt()))
            mean, var = self.behind(layer, layer.scale / self.over)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = x.flatten(1)
        for layer, (mean, std) in zip(self.layers, self.held or self.statistics(), strict=True):
            x = layer(x if layer is self.layers[0] else torch.sigmoid(x), mean, std)
        return x


def followed(layer: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the logistic function of normal variables of mean `shift`: what the analytic normalization has."""
    nodes, weights = (values.to(scale.dtype) for values in hermite())
    values = torch.sigmoid(layer.shift + scale * nodes[:, None])
    mean = weights @ values
    return mean, weights @ (values - mean).square()


def first(layer: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The moments that `followed` gave at the start: constants, as in normalization propagation."""
    return layer.first_mean, layer.first_var


def with_first_moments(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model that follows its weights, and takes what enters them to be distributed as at the start."""
    network = WithVariances(model, task, seed, first)
    with torch.no_grad():
        for layer in network.layers:
            mean, var = followed(layer, layer.scale)  # type: ignore[arg-type]
            layer.register_buffer("first_mean", mean)
            layer.register_buffer("first_var", var)
    return network


def with_held_statistics(model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model that divides by the standard deviations of its start, whatever its weights become."""
    network = WithVariances(model, task, seed, followed)
    network.held = [(mean.detach(), std.detach()) for mean, std in network.statistics()]
    return network


FOLLOWED, FIRST, HELD = "followed", "first moments of units (Arpit et al.)", "all held"
FROZEN_ARMS = (
    Arm(FOLLOWED, watched=itself),
    Arm(FIRST, rates=(0.0016, *RATES), change=with_first_moments, watched=itself),
    Arm(HELD, rates=(0.00064, 0.0016, *RATES), change=with_held_statistics, watched=itself),
)


def _frozen_figure(records: Any) -> Figure:
    panels = tuple(
        Panel(title, tuple(curve(records, arm.name, name, arm.name, look) for look, arm in enumerate(FROZEN_ARMS)))
        for title, name in (("training", "train_loss"), ("validation", "valid_loss"))
    )
    caption = f"Losses of AP2, each at its best rate. {BANDS}"
    return Figure("frozen", "Statistics that follow, and statistics that stay", caption, panels, "epoch", "loss")


def _claims_of_frozen() -> Any:
    for arm in (FIRST, HELD):
        for kind, name in (("training", TRAINED), ("validation", "valid_loss")):
            yield f"{FOLLOWED} has a lower {kind} loss than {arm}", is_lower(((FOLLOWED, name), (arm, name)))
    yield (
        f"{FOLLOWED} is closer to the truth than {FIRST}, in the worst layer, at the end",
        is_nearer((FOLLOWED, -1), (FIRST, -1)),
    )


FROZEN = Question(
    "frozen",
    "Must statistics follow scale and shift?",
    FROZEN_ARMS,
    experiment(epochs=10),
    tuple(_claims_of_frozen()),
    _frozen_figure,
    seeds=5,
)


# --- linear: Is linearization of the activation enough, and from which variance on is it not?

SMALL, USUAL, LARGE = 0.25, 1.0, 4.0  # standard deviations before hidden units, at the start


def linearized(layer: Any, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Moments of the tangent of the logistic function at the mean."""
    mean = torch.sigmoid(layer.shift)
    return mean, (mean * (1 - mean) * scale).square()


def scaled(std: float, linear: bool, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model with another standard deviation before its hidden units, with its own moments or by tangents."""
    with torch.no_grad():
        for layer in list(normalized_layers(model).values())[:-1]:
            layer.scale.mul_(std)
    return WithVariances(model, task, seed, linearized) if linear else model


def linear_arm(std: float, linear: bool) -> str:
    """Its arm."""
    return f"{'linearized' if linear else 'normal'}, std {std:g}"


def _claims_of_linear() -> Claims:
    for std in (SMALL, USUAL, LARGE):
        arm = linear_arm(std, linear=False)
        yield f"{arm}: before training every layer is within {NEAR} times", is_near(arm, 0)
    yield (
        f"{linear_arm(SMALL, True)}: before training every layer is within {NEAR} times",
        is_near(linear_arm(SMALL, True), 0),
    )
    for std, limit in ((USUAL, NEAR), (LARGE, FAR)):
        yield (
            f"{linear_arm(std, True)}: before training some layer is off by more than {limit} times",
            is_far(linear_arm(std, True), 0, limit),
        )
    normal, linear = linear_arm(USUAL, False), linear_arm(USUAL, True)
    yield f"{normal} is nearer than {linear} at the end", is_nearer((normal, -1), (linear, -1))
    for kind, name in (("training", TRAINED), ("validation", "valid_loss")):
        yield f"{normal} has a lower {kind} loss than {linear}", is_lower(((normal, name), (linear, name)))


LINEAR_ARMS = tuple(
    Arm(
        linear_arm(std, linear),
        start="orthogonal",
        rates=(0.004, 0.01, 0.025) if std == USUAL else (0.01,),
        change=functools.partial(scaled, std, linear),
        watched=itself,
    )
    for std in (SMALL, USUAL, LARGE)
    for linear in (False, True)
)
LINEAR = Question(
    "linear",
    "Is linearization enough?",
    LINEAR_ARMS,
    experiment(epochs=10),
    tuple(_claims_of_linear()),
    lambda records: ratio_figure("linear", records, [arm.name for arm in LINEAR_ARMS]),
    seeds=5,
)


# --- overestimated: Does a normalization that takes variances too large, or too small, look faster at one rate?

FACTOR = 3.0  # of standard deviations, as a normalization takes them
OVERESTIMATED_RATES = (0.0025, 0.005, 0.01, 0.02, 0.04)
ONE_RATE = OVERESTIMATED_RATES[2]
RIGHT = "right"


def taken(factor: float, kept: bool, model: nn.Module, task: Task, seed: int) -> nn.Module:
    """A model whose deviations are taken so many times as large; the function of the start is kept, or the scales."""
    network = WithVariances(model, task, seed, followed, factor)
    if not kept:
        with torch.no_grad():
            for layer in network.layers:
                layer.scale.div_(factor)  # type: ignore[operator]
    return network


def overestimated_arm(factor: float, kept: bool) -> str:
    """Its arm."""
    return f"std x {factor:.2g}, {'the same function' if kept else 'scales of 1'} at the start"


def _mean_loss(records: Records, arm: str, rate: float | None) -> Sample:
    """Of training, over all epochs: a measure of speed."""
    return records.of(arm, lambda run: statistics.fmean(run["train_loss"]), rate)


def _is_faster(arm: str) -> Rule:
    def rule(records: Records) -> Judgement:
        a, b = (_mean_loss(records, name, ONE_RATE) for name in (arm, RIGHT))
        return Judgement(lower(a, b), (f"mean training loss over epochs {a.text()} against {b.text()}",))

    return rule


def _is_alike(arm: str) -> Rule:
    def rule(records: Records) -> Judgement:
        a, b = (_mean_loss(records, name, None) for name in (arm, RIGHT))
        rates = ", ".join(f"{records.at(name)[0]['rate']:g}" for name in (arm, RIGHT))
        line = f"mean training loss over epochs {a.text()} against {b.text()}, at rates {rates}"
        return Judgement(within(a, b, LOSS_TOLERANCE * b.mean), (line,))

    return rule


CASES = [(factor, kept) for kept in (True, False) for factor in (FACTOR, 1 / FACTOR)]


def _claims_of_overestimated() -> Claims:
    for factor, kept in CASES:
        arm = overestimated_arm(factor, kept)
        yield f"{arm}: at one rate, {ONE_RATE:g}, it is faster than with the predicted one", _is_faster(arm)
    for factor, kept in CASES:
        arm = overestimated_arm(factor, kept)
        yield f"{arm}: each at the best of five rates they are alike, within {LOSS_TOLERANCE:.0%}", _is_alike(arm)


def _overestimated_figure(records: Records) -> Figure:
    lines = [curve(records, RIGHT, "train_loss", RIGHT, 0)]
    lines += [
        curve(records, overestimated_arm(*case), "train_loss", overestimated_arm(*case), look)
        for look, case in enumerate(CASES, 1)
    ]
    at_one = [
        curve(Records([run for run in records.runs if run["rate"] == ONE_RATE]), arm, "train_loss", arm, look)
        for look, arm in enumerate([RIGHT, *(overestimated_arm(*case) for case in CASES)])
    ]
    panels = Panel(f"all at rate {ONE_RATE:g}", tuple(at_one)), Panel("each at its best rate", tuple(lines))
    caption = f"Running training loss of AP2, standard deviations taken {FACTOR:g} times too large or small. {BANDS}"
    title = "Standard deviations taken too large or too small"
    return Figure("overestimated", title, caption, panels, "epoch", "training loss")


OVERESTIMATED = Question(
    "overestimated",
    "Does an overestimated variance look faster?",
    (
        Arm(RIGHT, rates=OVERESTIMATED_RATES, change=functools.partial(taken, 1.0, True)),
        *(
            Arm(overestimated_arm(*case), rates=OVERESTIMATED_RATES, change=functools.partial(taken, *case))
            for case in CASES
        ),
    ),
    experiment(epochs=4),
    tuple(_claims_of_overestimated()),
    _overestimated_figure,
    seeds=5,
)


# --- normality: Are pre-activations normally distributed over the images, as the propagation of moments assumes?

LEVEL = 0.05  # of the test
FEW, MANY = 0.10, 0.50  # shares of tests that reject; 0.05 is what normal variables give
CLOSE, APART = 0.05, 0.10  # distances of distribution functions
NORMALITY_NAMES: dict[Start, str] = {"ap2": "init = AP2", "orthogonal": "orthogonal"}


def of_layers(model: nn.Module, images: Tensor) -> Run:
    """For every layer, how often a test on a batch's outputs of a unit rejects, and how far units are from normal."""
    layers = normalized_layers(model)
    values: dict[str, Tensor] = {}

    def keep(path: str, output: Tensor) -> None:
        values[path] = output.detach().double()

    watch(model, images, layers, keep)
    return {
        "rejected": [rejected(output) for output in values.values()],
        "distance": [distance(output) for output in values.values()],
    }


def rejected(outputs: Tensor) -> float:
    """Share of D'Agostino and Pearson's tests that reject at 5 %: one for every unit and every batch of 128."""
    batches = outputs[: len(outputs) // PAPER_BATCH * PAPER_BATCH].unflatten(0, (-1, PAPER_BATCH))
    test = require("scipy.stats", "A test of normality").normaltest(batches.numpy(), axis=1)
    return float((test.pvalue < LEVEL).mean())


def distance(outputs: Tensor) -> float:
    """Largest difference between the distribution functions of a unit and of the normal one, the mean over units."""
    ordered = ((outputs - outputs.mean(0)) / outputs.std(0)).sort(0).values
    normal = torch.special.ndtr(ordered)
    steps = torch.arange(len(outputs) + 1, dtype=torch.float64)[:, None] / len(outputs)
    away = torch.maximum((normal - steps[:-1]).abs(), (steps[1:] - normal).abs())
    return float(away.amax(0).mean())


def _compare(arm: str, name: str, epoch: int, limit: float, above: bool) -> Rule:
    """The rule that in every seed all layers are below a limit, or some layer is above."""

    def rule(records: Records) -> Judgement:
        worst = records.of(arm, lambda run: max(run[name][epoch]) if None not in run[name][epoch] else None)
        verdict = in_every_seed([value > limit if above else value <= limit for value in worst.values])
        text = worst.percent() if name == "rejected" else worst.text()
        return Judgement(verdict, (f"{text} in the layer where it is most",))

    return rule


def _claims_of_normality(arm: str) -> Claims:
    test = "a test of normality on 128 images rejects"
    yield f"{arm}: before training {test} {FEW:.0%} at most in every layer", _compare(arm, "rejected", 0, FEW, False)
    yield f"{arm}: at the end {test} more than {MANY:.0%} in some layer", _compare(arm, "rejected", -1, MANY, True)
    far = "the distribution functions of units are"
    yield f"{arm}: before training {far} within {CLOSE} in every layer", _compare(arm, "distance", 0, CLOSE, False)
    yield f"{arm}: at the end {far} away by more than {APART} in some layer", _compare(arm, "distance", -1, APART, True)


def _normality_figure(records: Records) -> Figure:
    panels = []
    for arm in NORMALITY_NAMES.values():
        layers = zip(*(zip(*run["distance"], strict=True) for run in records.at(arm)), strict=True)
        lines = [line(f"layer {k + 1}", k, range(len(runs[0])), runs) for k, runs in enumerate(layers)]
        panels.append(Panel(arm, tuple(lines)))
    caption = f"Distance between the distribution functions of pre-activations and of a normal variable. {BANDS}"
    title = "How far pre-activations are from normal"
    return Figure("normality", title, caption, tuple(panels), "epoch", "distance")


NORMALITY = Question(
    "normality",
    "Are pre-activations normal?",
    tuple(Arm(name, start=start, rates=(0.01,), measure=of_layers) for start, name in NORMALITY_NAMES.items()),
    experiment(epochs=10),
    tuple(claim for arm in NORMALITY_NAMES.values() for claim in _claims_of_normality(arm)),
    _normality_figure,
    seeds=5,
)
