"""Many networks trained together: cells of one structure are stacked, and all of them make one step at a time.

The parameters of each are one row of a matrix. Every cell has its own parameters, learning rate and optimizer state;
cells of one seed see the same samples. What happens to one, divergence included, does not reach the others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.func import functional_call, grad_and_value, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from varprop.cli.models import first_line

from .batches import GENERAL, seed_of
from .protocol import DECAY, DOUBLE, MOMENTUM, UNIT_NORM, Cell
from .starts import StartingPoint
from .training import (
    LabelledImages,
    Loss,
    RunningLoss,
    Samples,
    Task,
    Tick,
    Trainer,
    adam_,
    captured_step,
    decaying_names,
    in_parallel_streams,
    invariant_names,
    loss_and_accuracy,
    project_,
)

Flat = Callable[..., list[Tensor]]


def flat_step(function: Flat, arguments: list[Tensor]) -> Flat:
    """The function as a graph of ATen operations for tensors of these shapes; what depends on none is computed here.

    The function may change copies of its arguments, but not these.
    """
    with _without_collection(), torch.no_grad():
        graph = _graph_of(function, arguments)
        # In two passes: torch cannot yet do it while a function with a derivative of its own is being differentiated.
        if any(getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.graph.nodes):
            graph = _graph_of(torch.func.functionalize(graph), arguments)
        return _reduced(_with_constants(_reduced(graph)))


def _graph_of(function: Callable[..., Any], arguments: list[Tensor]) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        return make_fx(lambda *tensors: function(*tensors))(*arguments)


def _reduced(graph: fx.GraphModule) -> fx.GraphModule:
    graph.graph.eliminate_dead_code()
    return fx.GraphModule(graph, fx_graph_cse(graph.graph))


def _with_constants(graph: fx.GraphModule) -> fx.GraphModule:
    """Tensors that depend on no argument become attributes, in place."""
    values: dict[fx.Node, Any] = {}
    for node in list(graph.graph.nodes):
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "get_attr":
            values[node] = operator.attrgetter(str(node.target))(graph)
        elif node.op == "call_function" and not random and all(x in values for x in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = value = node.target(*args, **kwargs)
            if isinstance(value, Tensor):
                graph.register_buffer(f"_constant{len(values)}", value)
                with graph.graph.inserting_before(node):
                    constant = graph.graph.get_attr(f"_constant{len(values)}")
                node.replace_all_uses_with(constant)
                values[constant] = value
    return graph


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Tracing makes millions of small objects and frees few: searching them for garbage takes a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def with_plain_norms_(model: nn.Module, batch_norm: bool) -> nn.Module:
    """Let normalizations compute in ordinary operations, in place; parameters, buffers and function stay.

    torch's own weight norm would run network by network. Its batch norm is cuDNN's on a GPU, which is made for one
    network; on a CPU it is faster than ordinary operations, and stays unless `batch_norm` is given.
    """
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for index, parametrization in enumerate(module):
                if type(parametrization).__name__ == "_WeightNorm":
                    module[index] = _PlainWeightNorm(int(parametrization.dim))  # type: ignore[arg-type]
        if batch_norm and type(module) in _BATCH_NORMS and module.momentum is not None and module.track_running_stats:
            module.__class__ = _PlainBatchNorm
    return model


class _PlainBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over all axes but the second."""

    def forward(self, input: Tensor) -> Tensor:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        mean, var = self.running_mean, self.running_var
        if self.training:
            var, mean = torch.var_mean(input, axes, correction=0)
            count = input.numel() // input.shape[1]
            unbiased = var.detach() * (count / max(count - 1, 1))
            self.running_mean.copy_(self.running_mean.lerp(mean.detach(), self.momentum))  # vmap has no rule for lerp_
            self.running_var.copy_(self.running_var.lerp(unbiased, self.momentum))
        normalized = (input - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        return torch.addcmul(self.bias.view(shape), normalized, self.weight.view(shape)) if self.affine else normalized


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _PlainWeightNorm(nn.Module):
    """w = g v / |v|."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        axes = [axis for axis in range(direction.ndim) if axis != self.dim % direction.ndim]
        return direction * (length / direction.square().sum(axes, keepdim=True).sqrt())


class _RowLayout:
    """How the tensors of a network lie one after another in a row, from all of them stacked, by name."""

    def __init__(self, stacked: dict[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape[1:] for name, tensor in stacked.items()}
        self.sizes = [shape.numel() for shape in self.shapes.values()]

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The stacked tensors by name, as views of the rows."""
        columns = rows.split(self.sizes, 1) if self.sizes else ()
        return {
            n: column.unflatten(1, s) if s else column[:, 0]
            for (n, s), column in zip(self.shapes.items(), columns, strict=True)
        }

    def rows(self, stacked: dict[str, Tensor]) -> Tensor:
        """The inverse of `views`, as a new tensor; there must be at least one."""
        columns = [stacked[name].flatten(1) if shape else stacked[name][:, None] for name, shape in self.shapes.items()]
        return torch.cat(columns, 1)


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
        indices = [list(seeds).index(cell.seed) for cell in cells]
        self.seed_index = torch.tensor(indices, device=device) if len(seeds) > 1 else None
        self.decay = self._decay([weight_decay * (cell.variant == DECAY) for cell in cells])
        self.unit = torch.tensor([cell.variant == UNIT_NORM for cell in cells], device=device)
        self.projected = invariant_names(models[0]) if self.unit.any() else []
        self.graph: Any = None

    def _decay(self, rates: list[float]) -> Tensor | None:
        """The factor of each parameter of each network that gives its part of the gradient."""
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
        """The samples of each network, out of samples with a first axis for the seeds; no axis if all share one."""
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

    def measured(self, batches: Iterable[LabelledImages], in_batches: bool = False) -> tuple[Tensor, Tensor]:
        """Loss and accuracy of every network on samples and targets of its own, with outputs as of `scores`."""
        scores = functools.partial(self.scores, in_batches=in_batches)
        if self.loss is None:
            return loss_and_accuracy(scores, batches)
        targets = None if self.seed_index is None else 0
        return loss_and_accuracy(scores, batches, torch.vmap(self.loss, in_dims=(0, targets)), axis=1)

    def tensors(self) -> list[dict[str, Tensor]]:
        """Parameters and buffers of every network, by name."""
        stacked = {**self.layout.views(self.parameters), **self.buffer_layout.views(self.buffers), **self.counters}
        return [{name: tensor[index].clone() for name, tensor in stacked.items()} for index in range(len(self.cells))]

    @torch.no_grad()
    def scores(self, images: Tensor, in_batches: bool = False) -> Tensor:
        """Outputs of each network in evaluation mode, for images with a first axis for the seeds.

        With `in_batches` a network that uses statistics of a batch uses those of these images; its buffers stay.
        """

        def run(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            return cast(Tensor, functional_call(self.template, (parameters, copies), (x,)))

        buffers = {**self.buffer_layout.views(self.buffers), **self.counters}
        samples = None if self.seed_index is None else 0
        together = torch.vmap(run, in_dims=(0, 0, samples), randomness="different")
        self.template.train(in_batches)
        result: Tensor = together(self.layout.views(self.parameters), buffers, self.own(images))
        self.template.train()
        return result


class CannotStack(RuntimeError):
    """Networks cannot be trained as an ensemble, though each of them can be trained by itself."""


class EnsembleTrainer(Trainer):
    """All given cells, of one batch size; their networks may be made already, and stay as they are."""

    def __init__(self, task: Task, cells: list[Cell], started: dict[Cell, StartingPoint] | None = None) -> None:
        sizes = {cell.batch_size for cell in cells}
        if len(sizes) != 1:
            raise ValueError(f"The cells of an ensemble must have one batch size, not {sorted(sizes)}.")
        self.task, self.protocol = task, task.experiment.protocol
        self.seeds = sorted({cell.seed for cell in cells})
        self.batches = [task.batches(seed, cells[0].batch_size) for seed in self.seeds]
        self.steps = self.batches[0].steps
        started = task.starts(cells) if started is None else started
        with _stacking():
            self.stacks = [
                StackedNetworks(
                    group, [started[c].model for c in group], self.seeds, self.protocol.weight_decay, task.loss
                )
                for group in _by_structure(cells)
            ]
        self.cells = [cell for stack in self.stacks for cell in stack.cells]
        self.gaps = [started[cell].gap for cell in self.cells]
        self.started = [started[cell].model for cell in self.cells]
        self.base_rates = [0.0] * len(self.cells)
        self.rates = torch.zeros(len(self.cells), dtype=torch.float64, device=task.device)
        self.number = torch.zeros((), dtype=torch.float64, device=task.device)
        self.running = RunningLoss(len(self.cells), self.steps, self.protocol.remain, task.device)
        images, labels = (tensor[:, 0] for tensor in next(self._chunks(0)))
        with _stacking():
            for stack in self.stacks:
                stack.prepare(images, labels)
        self._step = captured_step(self._one_step, images, labels)

    def _chunks(self, epoch: int) -> Iterator[LabelledImages]:
        """Images and labels with axes for seeds, steps and samples."""
        return self._stacked(batches.chunks(epoch) for batches in self.batches)

    def _stacked(self, sources: Iterable[Iterable[LabelledImages]]) -> Iterator[LabelledImages]:
        """Images and labels of sources, one for each seed, with a first axis for the seeds."""
        for pairs in zip(*sources, strict=True):
            images, labels = zip(*pairs, strict=True)
            yield self.task.as_input(torch.stack(images)), torch.stack(labels)

    @torch.no_grad()
    def _one_step(self, images: Tensor, labels: Tensor) -> None:
        self.number.add_(1)
        rates = self.rates.split([len(stack.cells) for stack in self.stacks])
        tasks = [
            functools.partial(stack.step, images, labels, rate, self.number)
            for stack, rate in zip(self.stacks, rates, strict=True)
        ]
        self.running.update(torch.cat(in_parallel_streams(tasks, images.device)))

    def reset(self, rates: list[float]) -> None:
        """Back to the start, with a learning rate for every cell."""
        self.base_rates = list(rates)
        self.number.zero_()
        self.running.reset_()
        for stack in self.stacks:
            stack.reset_()

    def epoch(self, number: int, tick: Tick) -> None:
        """Train for one epoch; epochs are counted from 0."""
        torch.manual_seed(seed_of(GENERAL, self.seeds[0], number))  # for networks that draw numbers themselves
        factor = self.protocol.decay**number
        self.rates.copy_(torch.tensor([rate * factor for rate in self.base_rates], dtype=torch.float64))
        for images, labels in self._chunks(number):
            for step in range(images.shape[1]):
                self._step(images[:, step], labels[:, step])
            tick(images.shape[1])

    def _measured(self, samples: Samples, in_batches: bool = False) -> list[Any]:
        result: list[Any] = []
        for stack in self.stacks:
            if in_batches and stack.cells[0].method != "batch":
                result += [None] * len(stack.cells)
                continue
            batches = self._stacked(samples(seed) for seed in self.seeds)
            measured = stack.measured(((x, stack.own(y)) for x, y in batches), in_batches)
            result += zip(*(tensor.tolist() for tensor in measured), strict=True)
        return result

    def trained(self) -> list[nn.Module]:
        """Every network as it is now."""
        values = [tensors for stack in self.stacks for tensors in stack.tensors()]
        models = [copy.deepcopy(model) for model in self.started]
        for model, tensors in zip(models, values, strict=True):
            model.load_state_dict(tensors, strict=False)  # what is not among the parameters and buffers does not change
        return models

    def state(self) -> dict[str, Tensor]:
        """All tensors that training changes, by name."""
        states = {f"group{index}": stack.state() for index, stack in enumerate(self.stacks)}
        named = {f"{group}.{name}": tensor for group, tensors in states.items() for name, tensor in tensors.items()}
        return {**named, **self.running.state(), "number": self.number}


@contextlib.contextmanager
def _stacking() -> Iterator[None]:
    """Within, what torch cannot do for many networks at once is a `CannotStack`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of which kind depends on the operation
        raise CannotStack(first_line(error)) from error


def _by_structure(cells: list[Cell]) -> list[list[Cell]]:
    """Cells that differ in nothing but values; an analytic network has the input moments of its seed in its graph."""
    groups: dict[tuple[str, str, int | None], list[Cell]] = {}
    for cell in cells:
        structure = cell.variant if cell.variant in (DOUBLE, MOMENTUM) else ""
        seed = cell.seed if cell.method == "analytic" else None
        groups.setdefault((cell.method, structure, seed), []).append(cell)
    return list(groups.values())
