"""Training of cells: losses and accuracies, Adam on stacks, steps as CUDA graphs, a task, and one network by itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.cli.models import embedding_rows

from . import datasets
from .batches import GENERAL, MEASURE, Batches, evaluation_images, is_tokens, seed_of, statistics
from .datasets import Dataset
from .protocol import (
    DECAY,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    TRAIN_STILL_LOSS,
    UNIT_NORM,
    VALID_ACCURACY,
    VALID_BATCH_ACCURACY,
    VALID_BATCH_LOSS,
    VALID_LOSS,
    Cell,
    Experiment,
    Factory,
    Precision,
    build,
)
from .starts import StartData, StartingPoint, starting_points

LabelledImages = tuple[Tensor, Tensor]
Losses = Callable[[Tensor, Tensor], Tensor]
Scores = Callable[[Tensor], Tensor]

_AT_ONCE = {"cpu": 2000, "cuda": 10_000}  # images


def in_parts(images: Tensor, labels: Tensor, axis: int = 0) -> Iterator[LabelledImages]:
    """Images and labels, as many at a time as the device takes well."""
    count = _AT_ONCE.get(images.device.type, 2000)
    yield from zip(images.split(count, axis), labels.split(count, axis), strict=True)


def full_batches(images: Tensor, labels: Tensor, size: int, axis: int = 0) -> Iterator[LabelledImages]:
    """Images and labels in batches of one size, for statistics of batches; the rest is left out, unless it is all."""
    count = images.shape[axis]
    size = min(size, count)
    for first in range(0, count - size + 1, size):
        yield images.narrow(axis, first, size), labels.narrow(axis, first, size)


@torch.no_grad()
def loss_and_accuracy(
    scores: Scores, batches: Iterable[LabelledImages], losses: Losses | None = None, axis: int = 0
) -> tuple[Tensor, Tensor]:
    """Mean loss and share of right answers as float64 tensors on the device; what is not finite is not right.

    Scores are (..., samples, classes), labels of a shape that broadcasts to (..., samples). With `losses`, mean losses
    of networks in place of cross-entropy, outputs may have any shape (samples along `axis`), and the share of right
    answers is NaN unless targets are classes of their last axis.
    """
    if losses is None:
        sums = [_sums(scores(images), labels) for images, labels in batches]
    else:
        sums = [_own_sums(scores(images), labels, losses, axis) for images, labels in batches]
    loss, right, count = (torch.stack(tensors).sum(0) for tensors in zip(*sums, strict=True))
    return loss / count, right / count


def _sums(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logs = F.log_softmax(scores.float() if scores.dtype != torch.float64 else scores, -1)
    labels = labels.expand(logs.shape[:-1])
    loss = -logs.gather(-1, labels[..., None])[..., 0].double().sum(-1)
    right = (logs.argmax(-1) == labels) & logs.isfinite().all(-1)
    return loss, right.double().sum(-1), torch.full_like(loss, labels.shape[-1])


def _own_sums(outputs: Tensor, targets: Tensor, losses: Losses, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    loss = losses(outputs, targets).double()
    count = torch.full_like(loss, outputs.shape[axis])
    return loss * count, _share_right(outputs, targets, axis).expand_as(loss) * count, count


def _share_right(outputs: Tensor, targets: Tensor, axis: int) -> Tensor:
    if targets.is_floating_point() or outputs.ndim < 2 or targets.shape[-1:] != outputs.shape[:-1][-1:]:
        return outputs.new_tensor(torch.nan, dtype=torch.float64)
    right = (outputs.argmax(-1) == targets) & outputs.isfinite().all(-1)
    return right.double().flatten(axis).mean(-1)


class RunningLoss:
    """Means of several streams of losses whose weights vanish to `remain` in one epoch.

    After losses l_1 ... l_n it is sum q^(n-i) l_i / sum q^(n-i) with q = remain^(1 / steps): the objective of
    `vp.training_objective`, without waiting for the device. Once infinite or NaN it stays so.
    """

    def __init__(self, count: int, steps: int, remain: float, device: torch.device) -> None:
        self.decay = remain ** (1.0 / steps)
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, losses: Tensor) -> None:
        """Take in one loss of each stream."""
        self.sums.mul_(self.decay).add_(losses)
        self.weight.mul_(self.decay).add_(1)

    def values(self) -> list[float]:
        """The means so far."""
        means: list[float] = (self.sums / self.weight).tolist()
        return means

    def reset_(self) -> None:
        """Forget everything."""
        self.sums.zero_()
        self.weight.zero_()

    def state(self) -> dict[str, Tensor]:
        """The tensors that change in training."""
        return {"sums": self.sums, "weight": self.weight}


BETAS = (0.9, 0.999)
EPS = 1e-8


def adam_(parameters: Tensor, gradients: Tensor, mean: Tensor, square: Tensor, rates: Tensor, step: Tensor) -> None:
    """One step of Adam (Kingma & Ba 2015) in place, as `torch.optim.Adam` makes it: a row is a network with its rate.

    `mean` and `square` are the running means of gradients and of their squares, zero before the first step. `step` is
    its number, from 1, as a float64 tensor: nothing here waits for the device.
    """
    first, second = BETAS
    mean.lerp_(gradients, 1 - first)
    square.mul_(second).addcmul_(gradients, gradients, value=1 - second)
    size = (rates / (1 - first**step)).to(parameters.dtype)
    root = (1 - second**step).sqrt().to(parameters.dtype)
    parameters.sub_((mean / (square.sqrt() / root).add_(EPS)).mul_(size[:, None]))


def started_optimizer(
    make: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]], rate: Callable[[], Any] = float
) -> torch.optim.Optimizer:
    """An optimizer with its state in place, as before its first step; `rate` makes a learning rate of 0.

    Raises a VarpropError if it keeps something between steps that a checkpoint could not hold.
    """
    optimizer = make([{**group, "lr": rate()} for group in groups], lr=rate())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()  # at rate 0 and without gradients: it has no effect but to make the state
    except TypeError as error:
        message = f"{type(optimizer).__name__} needs more than gradients in a step ({error}): take another optimizer."
        raise vp.VarpropError(message) from error
    for values in optimizer.state.values():
        for name, value in values.items():
            if value is not None and not isinstance(value, Tensor):
                kind = f"{type(optimizer).__name__} keeps {name!r}, a {type(value).__name__}"
                raise vp.VarpropError(f"{kind}, which is no tensor: a run could not be resumed with it.")
        if isinstance(values.get("step"), Tensor):
            values["step"].zero_()
    return optimizer


def decaying_names(model: nn.Module) -> list[str]:
    """The weights that decay in the variant with decay: all with several axes but the lengths of weight norm."""
    return [n for n, p in model.named_parameters() if p.ndim > 1 and not n.endswith(".original0")]


def invariant_names(model: nn.Module) -> list[str]:
    """The weights whose scale does not matter, as `vp.unit_norm_` knows them: it is asked on a copy."""
    longer = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in longer.parameters():
            parameter.mul_(3)
    before = {name: parameter.detach().clone() for name, parameter in longer.named_parameters()}
    vp.unit_norm_(longer)
    return [name for name, parameter in longer.named_parameters() if not torch.equal(parameter, before[name])]


def project_(weight: Tensor, chosen: Tensor) -> None:
    """Scale the output channels (axis 1) of stacked weights to norm 1 in place, in the networks (axis 0) chosen."""
    norms = torch.linalg.vector_norm(weight.flatten(2), dim=2)
    factor = torch.where(chosen[:, None] & (norms > 0), norms, torch.ones_like(norms))
    weight.div_(factor.reshape(*factor.shape, *[1] * (weight.ndim - 2)))


Tick = Callable[[int], None]  # called with a number of steps done
Samples = Callable[[int], Iterable[LabelledImages]]  # of a seed


class Trainer(ABC):
    """Cells of one batch size that train together, from their starts, as often as asked."""

    task: Task
    cells: list[Cell]
    gaps: list[float]
    steps: int
    running: RunningLoss

    @abstractmethod
    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""

    @abstractmethod
    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""

    @abstractmethod
    def trained(self) -> list[nn.Module]:
        """The network of every cell as it is now."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name: the tensors themselves."""

    @abstractmethod
    def _measured(self, samples: Samples, in_batches: bool = False) -> list[Any]:
        """Loss and accuracy of every cell on the samples of its seed, as pairs.

        They are those of evaluation mode; `in_batches` those with the statistics of these samples, and None where that
        is no other thing: for all but batch norm.
        """

    def test(self) -> list[tuple[float, float]]:
        """Loss and accuracy of every cell on the official test set."""
        return self._measured(lambda _: in_parts(*self.task.test()))

    def validation(self) -> list[tuple[float, float]]:
        """Loss and accuracy of every cell on the validation part of its seed."""
        return self._measured(lambda seed: in_parts(*self.task.validation(seed)))

    def batch_validation(self) -> list[tuple[float, float] | None]:
        """Validation with statistics of batches as large as in training; None for all but batch norm."""
        size = self.cells[0].batch_size
        return self._measured(lambda seed: full_batches(*self.task.validation(seed), size), in_batches=True)

    def training_losses(self, number: int, still: bool = False) -> list[float]:
        """In evaluation mode on the training set of an epoch, without offsets and flips if it is to be `still`."""

        def samples(seed: int) -> Iterator[LabelledImages]:
            batches = self.task.batches(seed, self.cells[0].batch_size)
            for images, labels in (batches.still() if still else batches).chunks(number, MEASURE):
                yield images.flatten(0, 1), labels.flatten(0, 1)

        return [loss for loss, _ in self._measured(samples)]

    def losses(self) -> list[float]:
        """The running mean of the loss of every cell; not finite where it diverged."""
        return self.running.values()

    def curves(self, number: int) -> list[dict[str, float]]:
        """The measurements of every cell after an epoch, by the names of `records`."""
        moves = self.task.experiment.augmentation.moves
        still = self.training_losses(0, still=True) if moves else [None] * len(self.cells)
        measured = self.training_losses(number), still, self.validation(), self.batch_validation()
        result = []
        for train, evaluated, unmoved, (loss, right), in_batches in zip(self.losses(), *measured, strict=True):
            curve = {TRAIN_LOSS: train, TRAIN_EVAL_LOSS: evaluated, VALID_LOSS: loss}
            curve |= _unless_nan(VALID_ACCURACY, right)
            if unmoved is not None:
                curve[TRAIN_STILL_LOSS] = unmoved
            if in_batches is not None:
                curve |= {VALID_BATCH_LOSS: in_batches[0]} | _unless_nan(VALID_BATCH_ACCURACY, in_batches[1])
            result.append(curve)
        return result

    def load_(self, rates: list[float], state: dict[str, Tensor]) -> None:
        """Put the trainer back to where it was when its state was kept."""
        self.reset(rates)
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _unless_nan(name: str, value: float) -> dict[str, float]:
    """An accuracy under its name; nothing where targets are no classes."""
    return {} if math.isnan(value) else {name: value}


Result = TypeVar("Result")
_WARM_UP = 3


def captured(
    function: Callable[[], Result],
    stream: torch.cuda.Stream | None = None,
    before_capture: Callable[[], None] = lambda: None,
) -> Callable[[], Result]:
    """The function as a CUDA graph; it is run a few times first, so whatever it changes has to be set afterwards.

    It reads and changes tensors in place, and must not wait for the device. A replay returns what the function returned
    at capture, with the values of this replay.
    """
    side = torch.cuda.Stream() if stream is None else stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(side)
    before_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = function()

    def replay(_function: Any = function) -> Result:  # the graph works in memory that the function owns
        graph.replay()
        return result

    return replay


def captured_step(step: Callable[..., Result], *inputs: Tensor) -> Callable[..., Result]:
    """A step, for inputs of these shapes, as a CUDA graph; on other devices the step itself."""
    if inputs[0].device.type != "cuda":
        return step
    read = [tensor.clone() for tensor in inputs]
    replay = captured(lambda: step(*read))

    def replayed_step(*inputs: Tensor) -> Result:
        for here, new in zip(read, inputs, strict=True):
            here.copy_(new)
        return replay()

    return replayed_step


def in_parallel_streams(tasks: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """Results of tasks that do not depend on each other; on a GPU each in a stream of its own."""
    if device.type != "cuda":
        return [task() for task in tasks]
    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in tasks]
    results = []
    for task, stream in zip(tasks, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(task())
    for stream in streams:
        main.wait_stream(stream)
    return results


Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

_PROBE = 256  # images on which functions are compared


@dataclass(frozen=True, eq=False)
class Task:
    """An experiment with its data."""

    experiment: Experiment  # what is done
    dataset: Dataset  # on the device of the training
    factory: str | Factory  # of the network; a name, or a function
    dtype: torch.dtype = torch.float32  # of the networks
    loss: Loss | None = None  # of outputs and targets, a mean over samples; cross-entropy by default
    # makes an optimizer of parameter groups, instead of Adam; cells are trained one at a time then
    optimizer: MakeOptimizer | None = None

    @property
    def device(self) -> torch.device:
        """Where everything happens."""
        return self.dataset.train_x.device

    def as_input(self, samples: Tensor) -> Tensor:
        """Samples in the dtype of the networks; tokens stay what they are."""
        return samples.to(self.dtype) if samples.is_floating_point() else samples

    @functools.cache  # noqa: B019  (it lives as long as its experiment)
    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Indices of the training and of the validation images."""
        training, validation = datasets.split(self.dataset, seed)
        return training[: self.experiment.train_samples], validation

    @functools.cache  # noqa: B019
    def moments(self, seed: int) -> vp.Moments | vp.Tokens:
        """Mean and variance of the augmented images that a seed trains on, or how frequent tokens are there.

        What it validates on has no part in them.
        """
        chosen = self.split(seed)[0]
        if is_tokens(self.dataset.train_x):
            tokens = self.dataset.train_x[chosen]
            rows = embedding_rows(build(self.factory, 0), tokens[:1].cpu())
            return vp.Tokens(torch.bincount(tokens.flatten(), minlength=rows).to(self.dtype))
        moments = statistics(self.dataset, chosen, self.experiment.augmentation)
        return vp.Moments(moments.mean.to(self.dtype), moments.var.to(self.dtype))

    def batches(self, seed: int, batch_size: int) -> Batches:
        """The training batches of a seed."""
        data, indices = self.dataset, self.split(seed)[0]
        return Batches(data.train_x, data.train_y, indices, self.experiment.augmentation, batch_size, seed)

    @functools.cache  # noqa: B019
    def validation(self, seed: int) -> tuple[Tensor, Tensor]:
        """Images and labels of the validation part."""
        chosen = self.split(seed)[1]
        images = evaluation_images(self.dataset.train_x[chosen], self.experiment.augmentation, seed)
        return images, self.dataset.train_y[chosen]

    @functools.cache  # noqa: B019
    def test(self) -> tuple[Tensor, Tensor]:
        """Images and labels of the official test set."""
        return evaluation_images(self.dataset.test_x, self.experiment.augmentation, 0), self.dataset.test_y

    def starts(self, cells: list[Cell]) -> dict[Cell, StartingPoint]:
        """Where each cell begins."""
        result: dict[Cell, StartingPoint] = {}
        for seed in sorted({cell.seed for cell in cells}):
            of_seed = [cell for cell in cells if cell.seed == seed]
            size = max(self.experiment.batch_sizes)  # the start does not depend on the batch size trained with
            batch, probe = self.batches(seed, size).first_batch(), self.validation(seed)[0][:_PROBE]
            classes = self.dataset.classes > 0
            samples = self.as_input(batch), self.as_input(probe)
            data = StartData(self.moments(seed), *samples, classes, self.experiment.borders)
            result.update(starting_points(self.factory, of_seed, data, self.experiment.own_weights))
        return result


_TRIAL, _STEPS = 1e-3, 10  # rate and number of the steps a captured one is tried with: the loss changes, nothing bursts
_LIMITS = {False: 1e-3, True: 2e-2}  # of the difference of losses, in single and in half precision


class SingleTrainer(Trainer):
    """One cell; its network may be made already, and stays as it is."""

    def __init__(self, task: Task, cell: Cell, started: StartingPoint | None = None) -> None:
        started = task.starts([cell])[cell] if started is None else started
        self.task, self.cell, self.cells, self.gaps = task, cell, [cell], [started.gap]
        self.protocol = task.experiment.protocol
        self.precision = task.experiment.precision if task.device.type == "cuda" else Precision()
        self.loss = task.loss or F.cross_entropy
        self.batches = task.batches(cell.seed, cell.batch_size)
        self.steps = self.batches.steps
        self.model = copy.deepcopy(started.model).train()
        if self.precision.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network: Any = torch.compile(self.model) if self.precision.compiled else self.model
        self.start = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        self.running = RunningLoss(1, self.steps, self.protocol.remain, task.device)
        self.optimizer = self._optimizer()
        self.base_rate = 0.0
        images, labels = next(self.batches.chunks(0))
        self._step: Callable[[Tensor, Tensor], None] = self._one_step
        if task.optimizer is None:  # others may do what cannot be captured
            self._step = captured_step(self._one_step, self._placed(images[0]), labels[0])
        if self._step != self._one_step:
            self._require_the_same_function(images[-1], labels[-1])

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def _optimizer(self) -> torch.optim.Optimizer:
        groups = self._parameter_groups()
        if self.task.optimizer is not None:
            return started_optimizer(self.task.optimizer, groups)
        adam = functools.partial(torch.optim.Adam, betas=BETAS, eps=EPS)
        if self.task.device.type != "cuda":
            return started_optimizer(adam, groups)
        adam = functools.partial(adam, capturable=True, fused=True)
        return started_optimizer(adam, groups, lambda: torch.tensor(0.0, device="cuda"))

    def _parameter_groups(self) -> list[dict[str, Any]]:
        chosen = self._decaying()
        named = dict(self.model.named_parameters())
        decaying = {"params": [named[n] for n in chosen], "weight_decay": self.protocol.weight_decay}
        plain = {"params": [p for n, p in named.items() if n not in chosen], "weight_decay": 0.0}
        return [group for group in (decaying, plain) if group["params"]]

    def _decaying(self) -> list[str]:
        """The names of the parameters that decay; a benchmark has others decay."""
        return decaying_names(self.model) if self.cell.variant == DECAY else []

    def _placed(self, images: Tensor) -> Tensor:
        images = images.to(next(self.model.parameters()).dtype) if images.is_floating_point() else images
        last = self.precision.channels_last and images.ndim == 4
        return images.contiguous(memory_format=torch.channels_last) if last else images

    def _scores(self, network: nn.Module, images: Tensor) -> Tensor:
        half = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.precision.half else None
        with half or contextlib.nullcontext():
            result: Tensor = network(self._placed(images))
        return result if result.dtype == torch.float64 else result.float()

    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self._scores(self.network, images), labels)
        loss.backward()
        self.optimizer.step()
        if self.cell.variant == UNIT_NORM:
            vp.unit_norm_(self.model)
        self.running.update(loss.detach())

    def _require_the_same_function(self, images: Tensor, labels: Tensor) -> None:
        """Check that the compiled and captured step follows inputs and parameters as the model does, after a step too.

        Raises a RuntimeError if it does not: nothing that it trained could be believed.
        """
        self.reset([_TRIAL])
        self._compare(images, labels)
        self._set_rate(_TRIAL)
        for _ in range(_STEPS):
            self._step(self._placed(images), labels)
        self._compare(images, labels)
        self.reset([0.0])

    def _compare(self, images: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            plain = [float(self.loss(self._scores(self.model, images), labels)) for _ in range(2)]
        self._set_rate(0.0)
        self.running.reset_()
        self._step(self._placed(images), labels)
        loss, limit = self.losses()[0], _LIMITS[self.precision.half] * (1 + abs(plain[0]))
        if plain[0] == plain[1] and not abs(loss - plain[0]) <= limit:  # a model may draw random numbers
            raise RuntimeError(
                f"The training step of {self.cell.key} does not compute what the model does: "
                f"its loss is {loss:.6g} instead of {plain[0]:.6g}."
            )

    @torch.no_grad()
    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""
        (self.base_rate,) = rates
        for name, tensor in self._tensors().items():
            tensor.copy_(self.start[name])
        if self.task.optimizer is not None:
            self.optimizer = self._optimizer()
        else:
            for values in self.optimizer.state.values():
                for value in values.values():
                    value.zero_()
        self.running.reset_()

    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""
        torch.manual_seed(seed_of(GENERAL, self.cell.seed, number))  # for networks that draw numbers themselves
        self._set_rate(self.base_rate * self.protocol.decay**number)
        self.model.train()
        for images, labels in self.batches.chunks(number):
            placed = self._placed(images.flatten(0, 1)).unflatten(0, labels.shape[:2])  # of all steps at once
            for x, y in zip(placed, labels, strict=True):
                self._step(x, y)
            tick(len(labels))

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _measured(self, samples: Samples, in_batches: bool = False) -> list[Any]:
        if in_batches and self.cell.method != "batch":
            return [None]
        saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.model.train(in_batches)
        scores = functools.partial(self._scores, self.model)
        loss, right = loss_and_accuracy(scores, samples(self.cell.seed), self.task.loss)
        self.model.train()
        for buffer, value in saved:
            buffer.copy_(value)
        return [(float(loss), float(right))]

    def trained(self) -> list[nn.Module]:
        """The network as it is now."""
        return [copy.deepcopy(self.model)]

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name."""
        moments = {
            f"adam.{name}.{kind}": tensor
            for name, parameter in self.model.named_parameters()
            for kind, tensor in self.optimizer.state[parameter].items()
            if isinstance(tensor, Tensor)
        }
        named = {f"model.{name}": tensor.detach() for name, tensor in self._tensors().items()}
        return {**named, **moments, **self.running.state()}
