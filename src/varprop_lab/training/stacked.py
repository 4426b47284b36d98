"""Networks of one structure, stacked: the parameters of each are one row of a matrix, and all make a step at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state

from ..protocol.experiments import DECAY, UNIT_NORM
from ..protocol.records import Cell
from .metrics import LabelledImages, Scores, loss_and_accuracy
from .optimizer import adam_, decaying_names, invariant_names, project_
from .task import Loss
from .tracing import flat_step
from .vmap_norms import with_plain_norms_


class _RowLayout:
    """How the tensors of a network lie one after another in a row, from all of them stacked, by name."""

    def __init__(self, stacked: dict[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape[1:] for name, tensor in stacked.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The stacked tensors by name, as views of the rows."""
        parts = rows.split(self.sizes, 1) if self.sizes else ()
        return {
            n: part.unflatten(1, s) if s else part[:, 0]
            for (n, s), part in zip(self.shapes.items(), parts, strict=True)
        }

    def rows(self, stacked: dict[str, Tensor]) -> Tensor:
        """The inverse of `views`, as a new tensor; there must be at least one."""
        parts = [stacked[name].flatten(1) if shape else stacked[name][:, None] for name, shape in self.shapes.items()]
        return torch.cat(parts, 1)


class StackedNetworks:
    """Cells whose networks differ in nothing but values; each reads the samples of its seed, of all those given."""

    def __init__(
        self,
        cells: Sequence[Cell],
        models: Sequence[nn.Module],
        seeds: Sequence[int],
        weight_decay: float,
        loss: Loss | None = None,
    ) -> None:
        self.cells, self.loss = list(cells), loss
        self.template = with_plain_norms_(copy.deepcopy(models[0]), next(models[0].parameters()).is_cuda)
        parameters, buffers = stack_module_state(list(models))
        floating = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point()}
        self.counters = {name: buffer for name, buffer in buffers.items() if name not in floating}
        self.layout, self.buffer_layout = _RowLayout(parameters), _RowLayout(floating)
        self.start = self.layout.rows(parameters).detach()
        self.buffer_start = self.buffer_layout.rows(floating) if floating else self.start[:, :0]
        self.parameters, self.buffers = self.start.clone(), self.buffer_start.clone()
        self.mean, self.square = torch.zeros_like(self.start), torch.zeros_like(self.start)  # of gradients, for Adam
        device = self.start.device
        own = [list(seeds).index(cell.seed) for cell in cells]
        self.seed_index = torch.tensor(own, device=device) if len(seeds) > 1 else None
        self.decay = self._decay([weight_decay * (cell.variant == DECAY) for cell in cells])
        self.unit = torch.tensor([cell.variant == UNIT_NORM for cell in cells], device=device)
        self.projected = invariant_names(models[0]) if self.unit.any() else []
        self.graph: Any = None

    def _decay(self, rates: list[float]) -> Tensor | None:
        """What each parameter of each network is multiplied by to give its part of the gradient."""
        if not any(rates):
            return None
        decaying = decaying_names(self.template)
        like = dict(self.template.named_parameters())
        row = torch.cat([torch.full_like(p, float(name in decaying)).flatten() for name, p in like.items()])
        return self.start.new_tensor(rates)[:, None] * row.detach()

    def reset_(self) -> None:
        """Back to the start."""
        self.parameters.copy_(self.start)
        self.buffers.copy_(self.buffer_start)
        self.mean.zero_()
        self.square.zero_()

    def state(self) -> dict[str, Tensor]:
        """Everything that changes in training."""
        return {"parameters": self.parameters, "buffers": self.buffers, "mean": self.mean, "square": self.square}

    def own(self, samples: Tensor) -> Tensor:
        """Of samples with a first axis for the seeds, those of each network; without that axis if all share one."""
        return samples[0] if self.seed_index is None else samples.index_select(0, self.seed_index)

    def prepare(self, images: Tensor, labels: Tensor) -> None:
        """Trace the step, for samples of this shape, and try evaluation mode: what cannot be stacked fails here."""
        x, y = self.own(images), self.own(labels)
        self.graph = flat_step(self._gradients, [self.parameters, self.buffers, x, y])
        self.scores(images)

    def _gradients(self, parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        """Gradients and buffers as rows, and the loss of each network."""
        counters = {name: counter.clone() for name, counter in self.counters.items()}
        samples = None if self.seed_index is None else 0
        step = torch.vmap(
            grad_and_value(self._loss, has_aux=True), in_dims=(0, 0, 0, samples, samples), randomness="different"
        )
        named = self.buffer_layout.views(buffers)
        gradients, (losses, after) = step(self.layout.views(parameters), named, counters, x, y)
        return [self.layout.rows(gradients), losses, self.buffer_layout.rows(after) if after else buffers]

    def _loss(self, parameters: Any, buffers: Any, counters: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Any]:
        buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        scores = functional_call(self.template, (parameters, {**buffers, **counters}), (x,))
        return (self.loss or F.cross_entropy)(scores, y), buffers

    def step(self, images: Tensor, labels: Tensor, rates: Tensor, number: Tensor) -> Tensor:
        """One training step of all networks; their losses."""
        arguments = self.parameters, self.buffers, self.own(images), self.own(labels)
        gradients, losses, buffers = cast(list[Tensor], self.graph(*arguments))
        if self.decay is not None:
            gradients = torch.addcmul(gradients, self.decay, self.parameters)
        adam_(self.parameters, gradients, self.mean, self.square, rates, number)
        if buffers is not self.buffers:
            self.buffers.copy_(buffers)
        for name in self.projected:
            project_(self.layout.views(self.parameters)[name], self.unit)
        return losses

    def measured(self, parts: Iterable[LabelledImages], scores: Scores | None = None) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of every network on samples and targets of its own; in evaluation mode by default."""
        scores = scores or self.scores
        if self.loss is None:
            return loss_and_accuracy(scores, parts)
        targets = None if self.seed_index is None else 0
        return loss_and_accuracy(scores, parts, torch.vmap(self.loss, in_dims=(0, targets)), axis=1)

    def tensors(self) -> list[dict[str, Tensor]]:
        """Parameters and buffers of every network, by name."""
        stacked = {**self.layout.views(self.parameters), **self.buffer_layout.views(self.buffers), **self.counters}
        return [{name: tensor[index].clone() for name, tensor in stacked.items()} for index in range(len(self.cells))]

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """What each network, in evaluation mode, makes of images with a first axis for the seeds."""
        self.template.eval()
        found = self.scores_in_batch_mode(images)
        self.template.train()
        return found

    @torch.no_grad()
    def scores_in_batch_mode(self, images: Tensor) -> Tensor:
        """The same with the statistics of these images where a network uses them; its buffers stay."""

        def run(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            return cast(Tensor, functional_call(self.template, (parameters, copies), (x,)))

        buffers = {**self.buffer_layout.views(self.buffers), **self.counters}
        samples = None if self.seed_index is None else 0
        together = torch.vmap(run, in_dims=(0, 0, samples), randomness="different")
        found: Tensor = together(self.layout.views(self.parameters), buffers, self.own(images))
        return found
