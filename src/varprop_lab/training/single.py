"""One network at a time, in a plain PyTorch loop; on a GPU the step is captured."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp

from ..data.batches import GENERAL, MEASURE, seed_of
from ..protocol.experiments import DECAY, UNIT_NORM, Precision
from ..protocol.records import Cell
from ..protocol.starts import StartingPoint
from .trainer import (
    BETAS,
    EPS,
    RunningLoss,
    Task,
    Tick,
    Trainer,
    captured_step,
    decaying_names,
    full_batches,
    in_parts,
    loss_and_accuracy,
    started_optimizer,
)

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
        """The names of the parameters that decay."""
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

        Raises:
            RuntimeError: If it does not: nothing that it trained could be believed.
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

    def _validation(self) -> list[tuple[float, float]]:
        return [self._measured(in_parts(*self.task.validation(self.cell.seed)))]

    def _training_losses(self, number: int) -> list[float]:
        batches = ((x.flatten(0, 1), y.flatten(0, 1)) for x, y in self.batches.chunks(number, MEASURE))
        return [self._measured(batches)[0]]

    def _still_training_losses(self) -> list[float | None]:
        if not self.batches.augmentation.moves:
            return [None]
        chunks = self.batches.still().chunks(0, MEASURE)
        return [self._measured((x.flatten(0, 1), y.flatten(0, 1)) for x, y in chunks)[0]]

    def _batch_validation(self) -> list[tuple[float, float] | None]:
        if self.cell.method != "batch":
            return [None]
        saved = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        batches = full_batches(*self.task.validation(self.cell.seed), self.cell.batch_size)
        loss, right = loss_and_accuracy(functools.partial(self._scores, self.model), batches, self.task.loss)
        for buffer, value in saved:
            buffer.copy_(value)
        return [(float(loss), float(right))]

    def _measured(self, batches: Any) -> tuple[float, float]:
        self.model.eval()
        loss, right = loss_and_accuracy(functools.partial(self._scores, self.model), batches, self.task.loss)
        self.model.train()
        return float(loss), float(right)

    def test(self) -> list[tuple[float, float]]:
        """Loss and accuracy on the official test set."""
        return [self._measured(in_parts(*self.task.test()))]

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
