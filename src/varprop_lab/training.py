"""Training of a cell: its losses and accuracies, the optimizer, steps as CUDA graphs, the data of an experiment."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
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
from .starts import StartData, StartingPoint, starting_point

LabelledImages = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

_AT_ONCE = {"cpu": 2000, "cuda": 10_000}  # images that are measured


def in_parts(images: Tensor, labels: Tensor, size: int | None = None) -> Iterator[LabelledImages]:
    """Images and labels, so many at a time, or as many as the device takes well."""
    size = size or _AT_ONCE.get(images.device.type, 2000)
    yield from zip(images.split(size), labels.split(size), strict=True)


@torch.no_grad()
def loss_and_accuracy(
    scores: Callable[[Tensor], Tensor], batches: Iterable[LabelledImages], loss: Loss
) -> tuple[float, float]:
    """Mean loss and share of right answers; the latter is NaN unless targets are classes of the outputs' last axis."""
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for images, targets in batches:
        outputs = scores(images)
        means = torch.stack([loss(outputs, targets).double(), _share_right(outputs, targets)])
        sums, count = sums.to(means.device) + len(targets) * means, count + len(targets)
    mean_loss, right = (sums / count).tolist()
    return mean_loss, right


def _share_right(outputs: Tensor, targets: Tensor) -> Tensor:
    if targets.is_floating_point() or outputs.ndim < 2 or targets.shape[-1:] != outputs.shape[:-1][-1:]:
        return outputs.new_tensor(torch.nan, dtype=torch.float64)
    right = (outputs.argmax(-1) == targets) & outputs.isfinite().all(-1)  # what is not finite is not right
    return right.double().mean()


class RunningLoss:
    """The mean of losses whose weights vanish to `remain` in one epoch.

    After losses l_1 ... l_n it is sum q^(n-i) l_i / sum q^(n-i) with q = remain^(1 / steps): the objective of
    `vp.training_objective`, without waiting for the device. Once infinite or NaN it stays so.
    """

    def __init__(self, steps: int, remain: float, device: torch.device) -> None:
        self.decay = remain ** (1.0 / steps)
        self.sum = torch.zeros((), dtype=torch.float64, device=device)
        self.weight = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, loss: Tensor) -> None:
        """Take in one loss."""
        self.sum.mul_(self.decay).add_(loss)
        self.weight.mul_(self.decay).add_(1)

    def value(self) -> float:
        """The mean so far."""
        return float(self.sum / self.weight)

    def reset_(self) -> None:
        """Forget everything."""
        self.sum.zero_()
        self.weight.zero_()

    def state(self) -> dict[str, Tensor]:
        """The tensors that change in training."""
        return {"sum": self.sum, "weight": self.weight}


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


_PROBE = 256  # images on which functions are compared


@dataclass(frozen=True, eq=False)
class Task:
    """An experiment with its data."""

    experiment: Experiment  # what is done
    dataset: Dataset  # on the device of the training
    factory: str | Factory  # of the network; a name, or a function
    dtype: torch.dtype = torch.float32  # of the networks
    loss: Loss | None = None  # of outputs and targets, a mean over samples; cross-entropy by default
    optimizer: MakeOptimizer | None = None  # made of parameter groups, instead of Adam

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

    def start(self, cell: Cell) -> StartingPoint:
        """Where a cell begins."""
        size = max(self.experiment.batch_sizes)  # the start does not depend on the batch size trained with
        batch, probe = self.batches(cell.seed, size).first_batch(), self.validation(cell.seed)[0][:_PROBE]
        data = StartData(
            self.moments(cell.seed),
            self.as_input(batch),
            self.as_input(probe),
            self.dataset.classes > 0,
            self.experiment.borders,
        )
        return starting_point(self.factory, cell, data, self.experiment.own_weights)


Tick = Callable[[int], None]  # called with a number of steps done
_TRIAL, _STEPS = 1e-3, 10  # rate and number of the steps a captured one is tried with: the loss changes, nothing bursts
_LIMITS = {False: 1e-3, True: 2e-2}  # of the difference of losses, in single and in half precision


class Trainer:
    """Trains a cell from its start, as often as asked; its network may be made already, and stays as it is."""

    def __init__(self, task: Task, cell: Cell, started: StartingPoint | None = None) -> None:
        started = task.start(cell) if started is None else started
        self.task, self.cell, self.gap = task, cell, started.gap
        self.protocol = task.experiment.protocol
        self.precision = task.experiment.precision if task.device.type == "cuda" else Precision()
        self.loss_of = task.loss or F.cross_entropy
        self.batches = task.batches(cell.seed, cell.batch_size)
        self.steps = self.batches.steps
        self.model = copy.deepcopy(started.model).train()
        if self.precision.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network: Any = torch.compile(self.model) if self.precision.compiled else self.model
        self.start = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        self.running = RunningLoss(self.steps, self.protocol.remain, task.device)
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
        cuda = self.task.device.type == "cuda"
        adam = functools.partial(torch.optim.Adam, capturable=cuda, fused=True)
        return started_optimizer(adam, groups, (lambda: torch.tensor(0.0, device="cuda")) if cuda else float)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        chosen = self._decaying()
        named = dict(self.model.named_parameters())
        decaying = {"params": [named[n] for n in chosen], "weight_decay": self.protocol.weight_decay}
        plain = {"params": [p for n, p in named.items() if n not in chosen], "weight_decay": 0.0}
        return [group for group in (decaying, plain) if group["params"]]

    def _decaying(self) -> list[str]:
        """The names of the parameters that decay: weights, not the lengths of weight norm. A benchmark has others."""
        names = [n for n, p in self.model.named_parameters() if p.ndim > 1 and not n.endswith(".original0")]
        return names if self.cell.variant == DECAY else []

    def _placed(self, images: Tensor) -> Tensor:
        images = self.task.as_input(images)
        last = self.precision.channels_last and images.ndim == 4
        return images.contiguous(memory_format=torch.channels_last) if last else images

    def _scores(self, network: nn.Module, images: Tensor) -> Tensor:
        half = torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self.precision.half else None
        with half or contextlib.nullcontext():
            result: Tensor = network(self._placed(images))
        return result if result.dtype == torch.float64 else result.float()

    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(self._scores(self.network, images), labels)
        loss.backward()
        self.optimizer.step()
        if self.cell.variant == UNIT_NORM:
            vp.unit_norm_(self.model)
        self.running.update(loss.detach())

    def _require_the_same_function(self, images: Tensor, labels: Tensor) -> None:
        """Check that the compiled and captured step follows inputs and parameters as the model does, after a step too.

        Raises a RuntimeError if it does not: nothing that it trained could be believed.
        """
        self.reset(_TRIAL)
        self._compare(images, labels)
        self._set_rate(_TRIAL)
        for _ in range(_STEPS):
            self._step(self._placed(images), labels)
        self._compare(images, labels)
        self.reset(0.0)

    def _compare(self, images: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            plain = [float(self.loss_of(self._scores(self.model, images), labels)) for _ in range(2)]
        self._set_rate(0.0)
        self.running.reset_()
        self._step(self._placed(images), labels)
        loss, limit = self.loss(), _LIMITS[self.precision.half] * (1 + abs(plain[0]))
        if plain[0] == plain[1] and not abs(loss - plain[0]) <= limit:  # a model may draw random numbers
            raise RuntimeError(
                f"The training step of {self.cell.key} does not compute what the model does: "
                f"its loss is {loss:.6g} instead of {plain[0]:.6g}."
            )

    @torch.no_grad()
    def reset(self, rate: float) -> None:
        """Back to the start, with a learning rate."""
        self.base_rate = rate
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

    def loss(self) -> float:
        """The running mean of the loss; not finite where training diverged."""
        return self.running.value()

    def test(self) -> tuple[float, float]:
        """Loss and accuracy on the official test set, in evaluation mode."""
        return self._measured(in_parts(*self.task.test()))

    def validation(self) -> tuple[float, float]:
        """Loss and accuracy on the validation part, in evaluation mode."""
        return self._measured(in_parts(*self.task.validation(self.cell.seed)))

    def batch_validation(self) -> tuple[float, float] | None:
        """Validation with statistics of batches as large as in training; None for all but batch norm."""
        if self.cell.method != "batch":
            return None
        images, labels = self.task.validation(self.cell.seed)
        size = min(self.cell.batch_size, len(images))
        count = len(images) // size * size  # a smaller batch would have worse statistics
        return self._measured(in_parts(images[:count], labels[:count], size), training=True)

    def training_loss(self, number: int, still: bool = False) -> float:
        """In evaluation mode on the training set of an epoch, without offsets and flips if it is to be `still`."""
        chunks = (self.batches.still() if still else self.batches).chunks(number, MEASURE)
        return self._measured((images.flatten(0, 1), labels.flatten(0, 1)) for images, labels in chunks)[0]

    def _measured(self, batches: Iterable[LabelledImages], training: bool = False) -> tuple[float, float]:
        saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.model.train(training)
        result = loss_and_accuracy(functools.partial(self._scores, self.model), batches, self.loss_of)
        self.model.train()
        for buffer, value in saved:
            buffer.copy_(value)
        return result

    def measurements(self, number: int) -> dict[str, float]:
        """The values of the curves after an epoch, by their names; no accuracy where targets are no classes."""
        loss, right = self.validation()
        result = {TRAIN_LOSS: self.loss(), TRAIN_EVAL_LOSS: self.training_loss(number)}
        result |= {VALID_LOSS: loss, VALID_ACCURACY: right}
        if self.task.experiment.augmentation.moves:
            result[TRAIN_STILL_LOSS] = self.training_loss(0, still=True)
        if in_batches := self.batch_validation():
            result[VALID_BATCH_LOSS], result[VALID_BATCH_ACCURACY] = in_batches
        accuracies = (VALID_ACCURACY, VALID_BATCH_ACCURACY)
        return {name: value for name, value in result.items() if not (name in accuracies and math.isnan(value))}

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name: the tensors themselves."""
        moments = {
            f"adam.{name}.{kind}": tensor
            for name, parameter in self.model.named_parameters()
            for kind, tensor in self.optimizer.state[parameter].items()
            if isinstance(tensor, Tensor)
        }
        named = {f"model.{name}": tensor.detach() for name, tensor in self._tensors().items()}
        return {**named, **moments, **self.running.state()}

    def load_(self, rate: float, state: dict[str, Tensor]) -> None:
        """Put the trainer back to where it was when its state was kept."""
        self.reset(rate)
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
