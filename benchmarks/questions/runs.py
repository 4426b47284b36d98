"""One way of training the paper's MNIST network, the runs of a question with its claims, and lines of its figure."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from varprop.text_table import Table
from varprop_lab.batches import MEASURE
from varprop_lab.datasets import Dataset
from varprop_lab.figures import (
    DOUBLE_COLOUR,
    METHOD_COLOURS,
    OTHER_COLOUR,
    Figure,
    Panel,
    PlottedSeries,
    over_seeds,
    rounded,
)
from varprop_lab.paper.experiments import EXPERIMENTS
from varprop_lab.paper.verdicts.evidence import Judgement, NotRun, all_of, judged
from varprop_lab.protocol import Cell, Experiment, Factory, Method, Start
from varprop_lab.seed_statistics import Sample, lower
from varprop_lab.starts import StartingPoint
from varprop_lab.training import Task, Trainer

from ..ratios import ratios

IMAGES = 10_000  # training images of a run; validation has 6000
MEASURED = 2048  # of the training images, for standard deviations
RATES = (0.004, 0.01, 0.025)
Change = Callable[[nn.Module, Task, int], nn.Module]  # of a network at its start, with the data and the seed
Run = dict[str, Any]
Measure = Callable[[nn.Module, Tensor], Run]  # of a network and training images


@dataclass(frozen=True)
class Arm:
    """A way of training, and how it is looked at."""

    name: str
    method: Method = "analytic"
    start: Start = "ap2"
    rates: tuple[float, ...] = RATES  # that are tried
    factory: str | Factory = "mnist"
    change: Change | None = None  # of the network before it is trained
    averaged: bool = False  # whether the mean of the weights over steps is validated too
    watched: Change | None = None  # makes the network whose standard deviations are kept, if they are
    measure: Measure | None = None  # what else is kept, before training and after every epoch
    decayed: tuple[str, ...] = ()  # the last parts of the names of parameters that decay


def experiment(epochs: int, images: int = IMAGES) -> Experiment:
    """The paper's MNIST experiment on fewer images, for fewer epochs."""
    usual = EXPERIMENTS["mnist"]
    return replace(usual, train_samples=images, protocol=replace(usual.protocol, epochs=epochs))


def trained(arm: Arm, seed: int, data: Dataset, settings: Experiment) -> Iterator[Run]:
    """A run for every rate: what was measured before training and after every epoch, by name."""
    task = Task(settings, data, arm.factory)
    cell = Cell("questions", arm.method, arm.start, seed, settings.batch_sizes[0])
    started = task.start(cell)
    if arm.change is not None:
        started = StartingPoint(arm.change(started.model, task, seed).train(), started.gap)
    trainer = AveragingTrainer(task, cell, started, arm.decayed)
    for rate in arm.rates:
        yield {"arm": arm.name, "rate": rate, "seed": seed, **_run(arm, rate, trainer)}


def _run(arm: Arm, rate: float, trainer: AveragingTrainer) -> Run:
    trainer.reset(rate)
    curves: Run = {}
    _keep(curves, _watched(arm, trainer))
    for number in range(trainer.protocol.epochs):
        trainer.epoch(number, lambda steps: None)
        _keep(curves, {**trainer.measured(arm.averaged), **_watched(arm, trainer)})
    return {**curves, "train_eval_loss": rounded(trainer.training_loss(number))}


def _watched(arm: Arm, trainer: AveragingTrainer) -> Run:
    if arm.watched is None and arm.measure is None:
        return {}
    task, seed = trainer.task, trainer.cell.seed
    images = next(trainer.batches.chunks(0, MEASURE))[0].flatten(0, 1)[:MEASURED]
    result = {} if arm.measure is None else arm.measure(trainer.model, images)
    if arm.watched is not None:
        result |= {"ratios": list(ratios(arm.watched(trainer.model, task, seed), images).values())}
    return result


def _keep(curves: Run, values: Run) -> None:
    for name, value in values.items():
        curves.setdefault(name, []).append(rounded(value))  # None where a run diverged


class AveragingTrainer(Trainer):
    """One network, and the mean of its parameters: what is older than an epoch has a tenth of the weight in it.

    Parameters whose names end in one of `decayed` decay as weights do in the protocol's variant with decay.
    """

    def __init__(self, task: Task, cell: Cell, started: StartingPoint, decayed: tuple[str, ...] = ()) -> None:
        self.decayed = decayed
        super().__init__(task, cell, started)

    def _decaying(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters() if name.endswith(self.decayed)]

    def reset(self, rate: float) -> None:
        """Back to the start, with a learning rate."""
        super().reset(rate)
        self.means = [parameter.detach().clone() for parameter in self.model.parameters()]

    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        super()._one_step(images, labels)
        with torch.no_grad():
            torch._foreach_lerp_(self.means, list(self.model.parameters()), 1 - self.running.decay)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Within, the network has the means for its parameters."""
        parameters: list[Tensor] = list(self.model.parameters())
        weights = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.means)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, weights)

    def measured(self, averaged: bool) -> Run:
        """Running training loss; loss and error in validation, with averaged weights and in batches if there are."""
        (loss, right), in_batches = self.validation(), self.batch_validation()
        result = {"train_loss": self.loss(), "valid_loss": loss, "valid_error": 1 - right}
        if in_batches is not None:
            result |= {"batch_loss": in_batches[0], "batch_error": 1 - in_batches[1]}
        if averaged:
            with self._averaged():
                loss, right = self.validation()
            result |= {"averaged_loss": loss, "averaged_error": 1 - right}
        return result


TRAINED = "train_eval_loss"  # at the end, in evaluation mode
Value = Callable[[Run], float | None]
Place = tuple[str, str]  # an arm, and the name of what was measured


class ArmNotRun(NotRun):
    """There are no runs of an arm."""

    def __init__(self, arm: str) -> None:
        self.lines = (f"{arm} was not run", "to be made by: python -m benchmarks.questions")


@dataclass(frozen=True)
class Records:
    """Runs of one question."""

    runs: Sequence[Run]

    def at(self, arm: str, rate: float | None = None) -> list[Run]:
        """The runs of an arm by seed, by default at the rate of the lowest training loss, the mean over seeds.

        Raises:
            ArmNotRun: If there are none.
        """
        rates = {run["rate"] for run in self.runs if run["arm"] == arm}
        if not rates:
            raise ArmNotRun(arm)
        chosen = (
            min(sorted(rates), key=lambda candidate: self.last(arm, TRAINED, candidate).mean) if rate is None else rate
        )
        return sorted((r for r in self.runs if r["arm"] == arm and r["rate"] == chosen), key=lambda r: int(r["seed"]))

    def last(self, arm: str, name: str, rate: float | None = None) -> Sample:
        """The last value of a curve, or the only one."""
        return self.of(arm, lambda run: run[name][-1] if isinstance(run[name], list) else run[name], rate)

    def of(self, arm: str, value: Value, rate: float | None = None) -> Sample:
        """A number of every run; infinite where it diverged."""
        values = {int(run["seed"]): value(run) for run in self.at(arm, rate)}
        return Sample(tuple(math.inf if v is None else v for v in values.values()), tuple(values))


Rule = Callable[[Records], Judgement]
Claims = Iterable[tuple[str, Rule]]  # in words, with what judges


def is_lower(*pairs: tuple[Place, Place]) -> Rule:
    """The rule that the first of every pair ends below the second, seed by seed, by more than the noise."""

    def rule(records: Records) -> Judgement:
        verdicts, lines = [], []
        for first, second in pairs:
            a, b = records.last(*first), records.last(*second)
            verdicts.append(lower(a, b))
            texts = [sample.percent() if first[1].endswith("error") else sample.text() for sample in (a, b)]
            lines.append(f"{first[1].rpartition('_')[2]} {texts[0]} against {texts[1]}: {verdicts[-1]}")
        return Judgement(all_of(verdicts), tuple(lines))

    return rule


@dataclass(frozen=True)
class Question:
    """A question with the arms trained for it, the claims on their records, and the figure."""

    name: str
    title: str
    arms: tuple[Arm, ...]
    settings: Experiment
    claims: tuple[tuple[str, Rule], ...]
    figure: Callable[[Records], Figure]
    seeds: int = 3

    def verdicts(self, records: Records) -> str:
        """A table: every claim, its verdict, and the numbers it rests on."""
        judgements = [(text, judged(rule, records)) for text, rule in self.claims]
        rows = [(text, judgement.verdict, "; ".join(judgement.measured)) for text, judgement in judgements]
        columns = ("claim", "verdict", "measured")
        return Table("", columns, rows, left=columns).markdown()


_METHODS = ("standard", "batch", "weight", "analytic", "layer")
COLOURS = [light for light, _ in (*(METHOD_COLOURS[method] for method in _METHODS), OTHER_COLOUR, DOUBLE_COLOUR)]
MARKERS = ("s", "o", "^", "D", "P", "X", "v")
BANDS = "Lines are means over seeds, bands reach from the lowest to the highest."


def line(label: str, look: int, x: Sequence[float], runs: Sequence[Sequence[float | None]]) -> PlottedSeries:
    """Values of several runs at the same places; a diverged one is left out."""
    columns = [[v for v in column if v is not None and math.isfinite(v)] for column in zip(*runs, strict=True)]
    drawn = (COLOURS[look], COLOURS[look], "solid", MARKERS[look])
    return PlottedSeries(label, *drawn, tuple(x), **over_seeds(columns, statistics.fmean), rank=look)


def curve(records: Records, arm: str, name: str, label: str, look: int) -> PlottedSeries:
    """A curve over epochs, at the best rate."""
    runs = [run[name] for run in records.at(arm)]
    return line(label, look, range(1, len(runs[0]) + 1), runs)


def ratio_figure(name: str, records: Records, arms: Sequence[str]) -> Figure:
    """True over predicted standard deviations: a panel for every arm, a line for every layer."""
    panels = []
    for arm in arms:
        layers = zip(*(zip(*run["ratios"], strict=True) for run in records.at(arm)), strict=True)
        lines = [line(f"layer {k + 1}", k, range(len(runs[0])), runs) for k, runs in enumerate(layers)]
        panels.append(Panel(arm, tuple(lines)))
    caption = f"Standard deviation on training images over the predicted one. {BANDS}"
    title = "True over predicted standard deviation"
    return Figure(name, title, caption, tuple(panels), "epoch", "true / predicted std")
