"""DP-SGD by normalization: a grid of private trainings that share a GPU, in as many sittings as it takes.

    python -m benchmarks.deep.private run RECORDS [--jobs 4] [--max-seconds 300] [--data DIR] [--tasks cifar10-3 ...]
    python -m benchmarks.deep.private show RECORDS      # the tables
    python -m benchmarks.deep.private common RECORDS    # what gradients of samples have in common before training

RECORDS is a file of JSON lines, one for every finished training; those that it has are not made again. For every task
and method, rates and clipping bounds are searched on held-out training images, in the same grid for all, which is
extended while the best rate lies at its edge; then the best setting is trained on all training images once for every
seed and judged on the test images. Needs Opacus, for its accountant and for `varprop.opacus`.

Training is what Opacus does with Poisson sampling, on the device: every sample's gradient is clipped, the sum gets
noise and is divided by the expected size of a batch. An analytic normalization is trained through the plain twin of
`varprop.opacus`: folded weights are what is clipped and gets noise. Images are standardized by the published means and
deviations of the data sets, which are taken as public.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from normalizations import StandardizedConv2d
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab import datasets
from varprop_lab.batches import Augmentation, augmented
from varprop_lab.environment import git_state, require, versions
from varprop_lab.training import captured_step

from .grid import read

DELTA = 1e-5
MOMENTUM = 0.9
EXTENSIONS = 2  # rates tried beyond an edge of the grid, at most
SEEDS = (0, 1, 2)
SEARCH, TEST = "search", "test"
SHIFT = 4  # pixels, of augmented images
ROUNDING = 2**-10  # taken off the bound: norms and sums come of different products, each rounded to TF32
AT_ONCE = {"": 1152, "wrn-16-4": 576}  # images whose gradients are held in memory, at most, by network
UNCENTRED = "deep form, inputs not centred"  # its gradients are those by the folded weights as they are
FIXED = ", fixed scales"  # and shifts, but for those of the last layer: noise does not reach them
UNIT_ROWS = ", unit rows"  # brought to norm 1 after every step, so that noise cannot lengthen them
ANALYTIC = {
    "analytic, deep form": "deep",
    "analytic, deep form" + FIXED: "deep",
    "analytic, deep form" + UNIT_ROWS: "deep",
    "analytic, paper's form": "paper",
    UNCENTRED: "deep",
}
METHODS = (  # the most important first
    "analytic, deep form",
    "analytic, deep form" + FIXED,
    "analytic, deep form" + UNIT_ROWS,
    "group norm + WS",
    "group norm + WS" + FIXED,
    "group norm",
    "group norm + WS" + UNIT_ROWS,
    "none, tanh",
    "none",
    "analytic, paper's form",
    UNCENTRED,
)


@dataclass(frozen=True)
class PrivateTask:
    """A data set and a budget of privacy to train with."""

    data: str
    epsilon: float
    epochs: int
    search_epochs: int  # of the trainings that choose rate and bound, with the noise that these epochs need
    batch: int  # expected; batches are Poisson samples
    rates: tuple[float, ...]  # times the bound: where every gradient is clipped, the bound then changes nothing
    bounds: tuple[float, ...] = (1.0, 8.0)
    multiplicity: int = 1  # augmented copies of an image over which its gradient is the mean; 1 is without augmentation
    network: str = ""  # else that of the data set


TASKS = {
    "cifar10-3": PrivateTask("cifar10", 3.0, 20, 10, 1024, (0.05, 0.1, 0.2, 0.4)),
    "mnist-1": PrivateTask("mnist", 1.0, 2, 2, 512, (0.03, 0.1, 0.3, 1.0), bounds=(1.0,)),
    "cifar10-1": PrivateTask("cifar10", 1.0, 20, 10, 1024, (0.05, 0.1, 0.2, 0.4)),
    "cifar10-8": PrivateTask("cifar10", 8.0, 20, 10, 1024, (0.05, 0.1, 0.2, 0.4)),
    "cifar10-3-x4": PrivateTask("cifar10", 3.0, 20, 10, 1024, (0.05, 0.1, 0.2, 0.4), multiplicity=4),
    "wrn-3": PrivateTask("cifar10", 3.0, 20, 10, 1024, (0.1, 0.2, 0.4, 0.8), (1.0,), network="wrn-16-4"),
    "wrn-3-x4": PrivateTask("cifar10", 3.0, 20, 10, 1024, (0.1, 0.2, 0.4, 0.8), (1.0,), 4, "wrn-16-4"),
    "wrn-1": PrivateTask("cifar10", 1.0, 20, 10, 1024, (0.1, 0.2, 0.4, 0.8), (1.0,), network="wrn-16-4"),
    "wrn-8": PrivateTask("cifar10", 8.0, 20, 10, 1024, (0.1, 0.2, 0.4, 0.8), (1.0,), network="wrn-16-4"),
}
PUBLISHED = {  # means and deviations of pixels
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


@dataclass(frozen=True)
class PrivateCell:
    """One training: a task by a method at a rate and a bound."""

    task: str
    method: str
    kind: str
    rate: float
    bound: float
    seed: int

    @property
    def key(self) -> str:
        """Under which it is recorded."""
        return f"{self.task} {self.method} {self.kind} {self.rate:g} {self.bound:g} {self.seed}"


# ---------------------------------------------------------------------------------------------------- networks


class WideBlock(nn.Module):
    """Two convolutions of a wide ResNet, each behind a normalization and an activation, and a skip around both."""

    def __init__(self, before: int, channels: int, stride: int, convolution: Any, active: Any) -> None:
        super().__init__()
        self.active = active(before)
        self.branch = nn.Sequential(
            convolution(before, channels, 3, stride, 1), active(channels), convolution(channels, channels, 3, 1, 1)
        )
        self.shortcut = convolution(before, channels, 1, stride) if before != channels else None

    def forward(self, x: Tensor) -> Tensor:
        """The sum of skip and branch."""
        y = self.active(x)
        result: Tensor = self.branch(y) + (x if self.shortcut is None else self.shortcut(y))
        return result


def wide_resnet(convolution: Any, active: Any, width: int = 4, blocks: int = 2) -> nn.Module:
    """WRN-16-4: six blocks of 64, 128 and 256 channels.

    Args:
        convolution: Makes one.
        active: Makes normalization and activation, by the channels.
        width: Times 16, 32 and 64 channels.
        blocks: With as many channels.
    """
    layers: list[nn.Module] = [convolution(3, 16, 3, 1, 1)]
    before = 16
    for stage in range(3):
        for number in range(blocks):
            layers.append(WideBlock(before, 16 * width << stage, 2 if stage and not number else 1, convolution, active))
            before = 16 * width << stage
    return nn.Sequential(*layers, active(before), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def group_statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / deviation of the group of every channel, (samples, channels)."""
    values = x.flatten(2).transpose(1, 2) if x.ndim > 2 else x[:, None]
    var, mean = torch.var_mean(values.unflatten(2, (groups, -1)), (1, 3), correction=0)
    size = x.shape[1] // groups
    return mean.repeat_interleave(size, 1), (var + eps).rsqrt().repeat_interleave(size, 1)


class ChannelsLastGroupNorm(torch.autograd.Function):
    """Group norm of images; torch's own would copy them to a layout with channels first and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
        """Its result, which is a line in x for every sample and channel."""
        mean, rstd = group_statistics(x, groups, eps)
        ctx.groups = groups
        ctx.save_for_backward(x, mean, rstd, weight)
        slope = rstd * weight
        return torch.addcmul((bias - mean * slope)[:, :, None, None], x, slope[:, :, None, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """The gradient by x alone: those by weight and bias are taken sample by sample."""
        x, mean, rstd, weight = ctx.saved_tensors
        size = x.shape[1] // ctx.groups

        def of_group(values: Tensor) -> Tensor:
            means: Tensor = values.unflatten(1, (ctx.groups, size)).mean(2) / x[0, 0].numel()
            return means.repeat_interleave(size, 1)

        by_bias = grad.sum((2, 3))
        constant = of_group(by_bias * weight)
        along = of_group(((grad * x).sum((2, 3)) - mean * by_bias) * rstd * weight)
        of_x, offset = -along * rstd.square(), rstd * (along * rstd * mean - constant)
        line = torch.addcmul(offset[:, :, None, None], x, of_x[:, :, None, None])
        return line.addcmul_(grad, (rstd * weight)[:, :, None, None]), None, None, None, None


class GroupNorm(nn.GroupNorm):
    """torch's, fast for images whose channels come last in memory."""

    def forward(self, x: Tensor) -> Tensor:
        """The same values."""
        if x.ndim != 4 or not x.is_contiguous(memory_format=torch.channels_last):
            return super().forward(x)
        weight, bias = (self.weight, self.bias) if self.affine else (x.new_ones(x.shape[1]), x.new_zeros(x.shape[1]))
        result: Tensor = ChannelsLastGroupNorm.apply(x, weight, bias, self.num_groups, self.eps)  # type: ignore[no-untyped-call]
        return result


def network(data: str, method: str) -> nn.Module:
    """The network of a data set; a normalization stands after every layer but the last, the analytic one after all.

    CIFAR-10: seven convolutions of 3 x 3 with 32-32-64-64-128-128-128 channels, maxima of 2 x 2 after the second,
    fourth and sixth, a global average and a linear layer. MNIST: that of examples/private_training.py. "wrn-16-4": the
    wide ResNet that De et al. (2022) train privately, with its 16 groups.
    """
    norm = method.startswith("group norm")
    groups = 4 if data == "mnist" else 16
    convolution = StandardizedConv2d if "WS" in method else nn.Conv2d
    activation: Callable[[], nn.Module] = nn.Tanh if method.endswith("tanh") else nn.ReLU

    def block(layer: nn.Module, channels: int) -> list[nn.Module]:
        return (
            [layer, GroupNorm(groups, channels, affine=FIXED not in method), activation()]
            if norm
            else [layer, activation()]
        )

    if data == "wrn-16-4":
        return wide_resnet(convolution, lambda channels: nn.Sequential(*block(nn.Identity(), channels)[1:]))
    if data == "mnist":
        return nn.Sequential(
            *block(convolution(1, 8, 5, stride=2), 8),
            *block(convolution(8, 16, 4, stride=2), 16),
            nn.Flatten(),
            *block(nn.Linear(16 * 25, 32), 32),
            nn.Linear(32, 10),
        )
    layers: list[nn.Module] = []
    before = 3
    for number, channels in enumerate((32, 32, 64, 64, 128, 128, 128)):
        layers += block(convolution(before, channels, 3, padding=1), channels)
        layers += [nn.MaxPool2d(2)] if number in (1, 3, 5) else []
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def first_model(data: str, method: str, seed: int, shape: tuple[int, ...]) -> nn.Module:
    """The network of a data set as training begins, for standardized images of a shape."""
    torch.manual_seed(seed)
    model = network(data, method)
    if method not in ANALYTIC:
        return model
    moments = vp.Moments(torch.zeros(1, shape[0], 1, 1), torch.ones(1, shape[0], 1, 1), (1, *shape))
    model = vp.normalize(model, moments, form=ANALYTIC[method])  # type: ignore[arg-type]
    if method.endswith(FIXED):
        *layers, _ = (layer for layer in model.modules() if hasattr(layer, "shift"))
        for layer in layers:
            layer.scale.requires_grad_(False)
            layer.shift.requires_grad_(False)
    return model


@torch.no_grad()
def unit_rows_(model: nn.Module) -> None:
    """Bring the rows of weights whose length and mean have no effect to norm 1 and mean 0."""
    vp.unit_norm_(model)
    for layer in model.modules():
        if isinstance(layer, StandardizedConv2d):
            rows = layer.weight.flatten(1)
            rows = rows - rows.mean(1, keepdim=True)
            layer.weight.copy_((rows / rows.norm(dim=1, keepdim=True)).view_as(layer.weight))


# ---------------------------------------------------------------------------------------------------- gradients


@dataclass(frozen=True)
class RowMap:
    """The gradient by a weight from that by the weight in effect, for every row: (g - sum of share u (u g)) / divisor.

    It is applied to norms and sums alone: applied to the gradients of all samples, it would take a third of a step.
    """

    directions: tuple[Tensor, ...]  # u, (rows or 1, entries of one), orthogonal to each other
    shares: tuple[Tensor, ...]  # of each direction, (rows,)
    divisor: Tensor  # (rows,)

    def __call__(self, gradients: Tensor) -> Tensor:
        """Gradients (..., rows, entries of one) by the weight."""
        for direction, share in zip(self.directions, self.shares, strict=True):
            gradients = gradients - (share * (gradients * direction).sum(-1))[..., None] * direction
        return gradients / self.divisor[:, None]

    def lost_squares(self, grad: Tensor, read: Tensor) -> Tensor:
        """By how much it lowers the squared norm of every sample, of the factors that `SampleGradients` has."""
        lost = torch.zeros_like(grad[:, 0])
        for direction, share in zip(self.directions, self.shares, strict=True):
            along = (grad * (read @ direction.T)).sum(1)
            lost = lost + (2 * share - share.square() * direction.square().sum(1)) * along.square()
        return (lost / self.divisor.square()).sum(1)


@dataclass(frozen=True)
class SampleGradients:
    """Gradients of samples by one parameter: sums over positions of the outer products of grad and read.

    They are multiplied out only where that is smaller than the factors; else norms and sums are taken of the factors.
    """

    grad: Tensor  # (samples, positions, rows), by the output
    read: Tensor  # (samples, positions, entries of a row), what the parameter in effect is multiplied with
    shape: tuple[int, ...]  # of the parameter in memory
    order: tuple[int, ...]  # its dimensions in that order
    to_parameter: RowMap | None = None

    @functools.cached_property
    def rows(self) -> Tensor:
        """Gradients by the parameter in effect, (samples, rows, entries of one)."""
        return self.grad.transpose(1, 2) @ self.read

    @property
    def multiplied_out(self) -> bool:
        """True if there are no more rows than positions, so that the products are smaller than `read`."""
        return self.grad.shape[2] <= self.grad.shape[1]

    def each(self) -> Tensor:
        """The gradient of every sample, in the parameter's shape."""
        rows = self.to_parameter(self.rows) if self.to_parameter else self.rows
        return rows.view(-1, *self.shape).permute(0, *(axis + 1 for axis in self.order))

    def squares(self) -> Tensor:
        """Squared norms, one a sample."""
        divisor = self.to_parameter.divisor if self.to_parameter else None
        if self.multiplied_out:
            norms = torch.linalg.vector_norm(self.rows, dim=2)
            squares: Tensor = (norms if divisor is None else norms / divisor).square().sum(1)
        else:
            grad = self.grad if divisor is None else self.grad / divisor
            squares = ((grad @ grad.mT) * (self.read @ self.read.mT)).sum((1, 2))
        return squares - self.to_parameter.lost_squares(self.grad, self.read) if self.to_parameter else squares

    def total(self, factors: Tensor) -> Tensor:
        """The sum over samples, each times its factor."""
        if self.multiplied_out:
            rows = (factors @ self.rows.flatten(1)).view(self.rows.shape[1:])
        else:
            rows = (self.grad * factors[:, None, None]).flatten(0, 1).T @ self.read.flatten(0, 1)
        rows = self.to_parameter(rows) if self.to_parameter else rows
        return rows.view(self.shape).permute(self.order)


def sample_gradients(model: nn.Module, x: Tensor, y: Tensor, copies: int = 1) -> dict[str, SampleGradients]:
    """The gradient of every sample's cross entropy by every parameter that is trained; each layer is called once.

    Args:
        model: A network of convolutions, linear layers and group norms.
        x: Inputs; every `copies` rows in a row are of one sample, whose loss is their mean.
        y: Labels of the rows.
        copies: Rows of a sample.
    """
    calls: list[tuple[str, Any, Tensor, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: calls.append((name, module, inputs[0].detach(), output))

    layers = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    handles = [module.register_forward_hook(note(name)) for name, module in layers.items()]
    try:
        losses = F.cross_entropy(model(x), y, reduction="sum") / copies
    finally:
        for handle in handles:
            handle.remove()
    if sorted(call[0] for call in calls) != sorted(layers):
        raise ValueError("Every layer with parameters must be called once.")
    outputs = torch.autograd.grad(losses, [call[3] for call in calls])
    gradients = {}
    with torch.no_grad():
        for (name, module, entered, _), grad in zip(calls, outputs, strict=True):
            for parameter, value in _of_layer(module, entered, grad, len(x) // copies):
                if module.get_parameter(parameter).requires_grad:
                    gradients[f"{name}.{parameter}"] = value
    return gradients


def _of_layer(module: Any, x: Tensor, grad: Tensor, samples: int) -> Iterator[tuple[str, SampleGradients]]:
    """Gradients of every sample by the parameters of a layer, of its input and the gradient of its output."""

    def vectors(name: str, values: Tensor) -> tuple[str, SampleGradients]:
        read = values.view(samples, -1, values.shape[1]).sum(1, keepdim=True)
        return name, SampleGradients(torch.ones_like(read[..., :1]), read, read.shape[2:], (0,))

    by_bias = grad.sum((2, 3)) if grad.ndim > 2 else grad
    if module.bias is not None:
        yield vectors("bias", by_bias)
    if isinstance(module, nn.GroupNorm):
        mean, rstd = group_statistics(x, module.num_groups, module.eps)
        products = (grad * x).sum((2, 3)) if grad.ndim > 2 else grad * x
        yield vectors("weight", (products - mean * by_bias) * rstd)
        return
    if isinstance(module, nn.Conv2d):
        height, width = module.kernel_size
        rows, columns = (int(extent) for extent in module.padding)
        x = F.pad(x, (columns, columns, rows, rows))
    if hasattr(module, "offset"):  # of a layer of inputs minus their predicted mean
        x = x - module.offset
    weight: Tensor = module.weight
    order: tuple[int, ...] = (0, 1)
    if isinstance(module, nn.Conv2d):
        patches = x.unfold(2, height, module.stride[0]).unfold(3, width, module.stride[1])
        x = patches.permute(0, 2, 3, 4, 5, 1).reshape(samples, -1, height * width * x.shape[1])  # channels last
        grad = grad.permute(0, 2, 3, 1).reshape(samples, -1, grad.shape[1])
        weight, order = weight.permute(0, 2, 3, 1), (0, 3, 1, 2)
    else:
        x, grad = x.reshape(samples, -1, x.shape[1]), grad.reshape(samples, -1, grad.shape[1])
    yield "weight", SampleGradients(grad, x, weight.shape, order, _row_map(module, weight.flatten(1)))


def _row_map(module: Any, weight: Tensor) -> RowMap | None:
    """What centring or standardization of the rows (D, K) of its weight makes of gradients."""
    count = weight.shape[1]
    means, share = torch.ones_like(weight[:1]), torch.full_like(weight[:, 0], 1 / count)
    if isinstance(module, StandardizedConv2d):
        std, mean = torch.std_mean(weight, 1, keepdim=True)
        std, divisor = std[:, 0], std[:, 0] + 1e-5
        return RowMap((means, weight - mean), (share, 1 / ((count - 1) * std * divisor)), divisor)
    if getattr(module, "centred_rows", False):
        return RowMap((means,), (share,), torch.ones_like(share))
    return None


def clipped_sum(
    gradients: dict[str, SampleGradients], counts: Tensor, bound: float
) -> tuple[dict[str, Tensor], Tensor]:
    """The sum of the samples' gradients, each brought to a norm of at most `bound`; how many were longer.

    Args:
        gradients: By every parameter.
        counts: 1 for samples that count, 0 for others.
        bound: Of the norm over all parameters.
    """
    norm = torch.stack([each.squares() for each in gradients.values()]).sum(0).clamp(min=0).sqrt()
    factors = counts * (bound / (norm + 1e-6)).clamp(max=1.0)
    return {name: each.total(factors) for name, each in gradients.items()}, (counts * (norm > bound)).sum()


# ---------------------------------------------------------------------------------------------------- one training


@functools.lru_cache
def noise_multiplier(epsilon: float, sample_rate: float, steps: int) -> tuple[float, float]:
    """The noise over the bound that Opacus' RDP accountant asks for, and the epsilon that it then charges."""
    accountants = require("opacus.accountants", "Private training", "opacus")
    utils = require("opacus.accountants.utils", "Private training", "opacus")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {"target_delta": DELTA, "sample_rate": sample_rate, "steps": steps, "accountant": "rdp"}
        sigma = float(utils.get_noise_multiplier(target_epsilon=epsilon, **settings))
        accountant = accountants.RDPAccountant()
        accountant.history = [(sigma, sample_rate, steps)]
        return sigma, float(accountant.get_epsilon(DELTA))


@functools.lru_cache
def images_of(name: str, root: str | None, device: str, kind: str, limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bytes and labels to train on, and to judge by: held-out training images, or the test images."""
    data = datasets.load(name, root, device)
    if kind == SEARCH:
        train, judged = datasets.split(data, seed=0)
        tensors = data.train_x[train], data.train_y[train], data.train_x[judged], data.train_y[judged]
    else:
        tensors = data.train_x, data.train_y, data.test_x, data.test_y
    return tuple(tensor[:limit] if limit else tensor for tensor in tensors)  # type: ignore[return-value]


def train(cell: PrivateCell, options: dict[str, Any], until: float) -> dict[str, Any] | None:
    """The record of a private training; None if time was up before its end."""
    start = time.time()
    task, device = TASKS[cell.task], torch.device(options["device"])
    torch.set_float32_matmul_precision("high")  # TF32
    torch.set_num_threads(1)
    x, y, judged_x, judged_y = images_of(task.data, options["root"], options["device"], cell.kind, options["limit"])
    batch = min(task.batch, len(x) // 4)
    epochs = options["epochs"] or (task.search_epochs if cell.kind == SEARCH else task.epochs)
    steps, rate = round(epochs * len(x) / batch), batch / len(x)
    sigma, epsilon = noise_multiplier(task.epsilon, rate, steps)
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in PUBLISHED[task.data])

    def pixels(images: Tensor, augmentation: Augmentation) -> Tensor:
        standardized = (augmented(images, augmentation) - mean) / std
        return standardized.contiguous(memory_format=torch.channels_last)

    model = first_model(task.network or task.data, cell.method, cell.seed, x.shape[1:]).to(device)
    free = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.SGD(free, cell.rate / cell.bound, MOMENTUM)
    trained, normalized = dict(model.named_parameters()), model
    if cell.method in ANALYTIC:
        private = require("varprop.opacus", "Private training", "opacus")
        twin = private.Twin(model, centred=cell.method != UNCENTRED)
        if cell.method.endswith(FIXED):  # biases are the shifts: what is clipped need not hold them
            *biases, _ = (name for name in twin.parameters if name.endswith("bias"))
            for name in biases:
                twin.parameters[name].requires_grad_(False)
        model, trained, optimizer = twin.plain, twin.parameters, private.PullBack(twin, optimizer)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    copies = task.multiplicity
    augmentation = Augmentation(SHIFT, flip=True) if copies > 1 else Augmentation()

    def summed(rows: Tensor, counts: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows = rows.repeat_interleave(copies)
        gradients = sample_gradients(model, pixels(x[rows], augmentation), y[rows], copies)
        return clipped_sum(gradients, counts, cell.bound * (1 - ROUNDING))

    at_once = min(
        AT_ONCE[task.network] // copies, -(-9 * batch // 512) * 64
    )  # one size for all: rarely are more samples drawn
    nothing = torch.zeros(at_once, device=device)
    if cell.method not in ANALYTIC:  # a twin copies constants from the CPU whenever it is called
        summed = captured_step(summed, nothing.long(), nothing)
    draws = torch.Generator().manual_seed(1000 + cell.seed)  # on the CPU: the same samples on all devices
    clipped = torch.zeros((), device=device)
    for _ in range(steps):
        if time.time() > until:
            return None
        chosen = (torch.rand(len(x), generator=draws) < rate).nonzero().flatten()
        sums: dict[str, Tensor] = {}
        for some in chosen.split(at_once):
            counts = (torch.arange(at_once) < len(some)).float()
            part, longer = summed(F.pad(some, (0, at_once - len(some))).to(device), counts.to(device))
            sums = {name: sums[name] + value if sums else value.clone() for name, value in part.items()}
            clipped += longer / max(len(chosen), 1) / steps
        for name, total in sums.items():
            trained[name].grad = (total + sigma * cell.bound * torch.randn(total.shape, device=device)) / batch
        optimizer.step()
        if cell.method.endswith(UNIT_ROWS):
            unit_rows_(normalized)
    with torch.no_grad():
        plain = Augmentation()
        right = [(model(pixels(a, plain)).argmax(1) == b).sum() for a, b in _batches(judged_x, judged_y)]
    finite = all(bool(parameter.isfinite().all()) for parameter in trained.values())
    return {
        "cell": cell.key,
        **asdict(cell),
        "accuracy": round(100 * sum(map(int, right)) / len(judged_x), 2) if finite else None,
        "epsilon": round(epsilon, 4),
        "delta": DELTA,
        "sigma": sigma,
        "batch": batch,
        "steps": steps,
        "epochs": epochs,
        "multiplicity": copies,
        "images": len(x),
        "clipped": round(float(clipped), 3),
        "seconds": round(time.time() - start, 1),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "git": git_state(),
        "versions": {**versions(), "opacus": require("opacus", "Private training", "opacus").__version__},
    }


def _batches(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(1000), y.split(1000), strict=True)


def common(options: argparse.Namespace) -> None:
    """Record how much of the clipped gradients is the same for all samples, before training, by method."""
    methods = [method for method in METHODS if not method.endswith(UNIT_ROWS)]  # before training nothing differs
    for data, method in ((data, method) for data in PUBLISHED for method in methods):
        images, labels, *_ = images_of(data, options.root, "cpu", SEARCH, 64)
        mean, std = (torch.tensor(values)[:, None, None] for values in PUBLISHED[data])
        shares, lengths = [], []
        for seed in SEEDS:
            model = first_model(data, method, seed, images.shape[1:])
            if method in ANALYTIC:
                opacus = require("varprop.opacus", "Private training", "opacus")
                model = opacus.Twin(model, centred=method != UNCENTRED).plain
            gradients = sample_gradients(model, (images.float() / 255 - mean) / std, labels)
            flat = torch.cat([each.each().flatten(1) for each in gradients.values()], 1)
            norms = flat.norm(dim=1)
            total = (flat / norms[:, None]).sum(0)  # as clipping leaves them, bound 1
            count = len(images)
            shares.append((float(total.square().sum()) / count - 1) / (count - 1))  # without bias
            lengths.append(float(norms.median()))
        shown = {"common": [round(share, 4) for share in shares], "norm": [round(length, 2) for length in lengths]}
        about = {"images": len(images), "git": git_state(), "versions": versions()}
        record = {"cell": f"{data} {method} common", "data": data, "method": method, "kind": "common", **shown, **about}
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record["cell"], shown, flush=True)


# ---------------------------------------------------------------------------------------------------- the grid


def searched(task: str, method: str, records: dict[str, Any]) -> tuple[list[PrivateCell], dict[str, Any] | None]:
    """Trainings of the search that are missing, and its best record if none is."""
    rates = list(TASKS[task].rates)
    while True:
        cells = [PrivateCell(task, method, SEARCH, rate, bound, 0) for rate in rates for bound in TASKS[task].bounds]
        missing = [cell for cell in cells if cell.key not in records]
        if missing:
            return missing, None
        best = max((records[cell.key] for cell in cells), key=lambda record: record["accuracy"] or 0.0)
        added = len(rates) - len(TASKS[task].rates)
        if added >= EXTENSIONS or best["rate"] not in (min(rates), max(rates)):
            return [], best
        rates.append(float(f"{best['rate'] * (2 if best['rate'] == max(rates) else 0.5):g}"))


def ready(records: dict[str, Any], tasks: list[str], methods: Sequence[str] = METHODS) -> list[PrivateCell]:
    """Trainings that can be made now, in order: task by task, a method's search before its seeds."""
    cells = []
    for task in tasks:
        for method in methods:
            missing, best = searched(task, method, records)
            if best is not None:
                seeds = [PrivateCell(task, method, TEST, best["rate"], best["bound"], seed) for seed in SEEDS]
                missing = [cell for cell in seeds if cell.key not in records]
            cells += missing
    return cells


def run(options: argparse.Namespace) -> None:
    """All trainings that there is time for, several at once, each recorded when it ends."""
    until = time.time() + options.max_seconds
    names = ("device", "root", "limit", "epochs")
    settings = {name: getattr(options, name) for name in names}
    records = read(options.records)
    failed: set[str] = set()
    longest: dict[str, float] = {}
    pool = ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"))
    running: dict[Future[Any], PrivateCell] = {}
    try:
        while True:
            begun = {cell.key for cell in running.values()} | failed
            for cell in ready(records, options.tasks, options.methods):
                if len(running) == options.jobs:
                    break
                if cell.key not in begun and time.time() + longest.get(f"{cell.task} {cell.kind}", 0.0) < until:
                    running[pool.submit(train, cell, settings, until)] = cell
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                record = None if future.exception() else future.result()
                if record is None:
                    failed.add(cell.key)
                    print(f"{cell.key}: {future.exception() or 'time was up'}", flush=True)
                    continue
                records[cell.key] = record
                name = f"{cell.task} {cell.kind}"
                longest[name] = max(longest.get(name, 0.0), record["seconds"])
                with options.records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{cell.key}: {record['accuracy']} % ({record['seconds']} s)", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    print(f"{len(records)} records; ready and missing: {len(ready(records, options.tasks, options.methods))}")


def table(task: str, records: dict[str, Any]) -> str:
    """Test accuracies of a task by method, with the settings that were chosen."""
    lines = []
    for method in METHODS:
        _, best = searched(task, method, records)
        if best is None:
            continue
        keys = (PrivateCell(task, method, TEST, best["rate"], best["bound"], seed).key for seed in SEEDS)
        tests = [records[key]["accuracy"] for key in keys if key in records]
        if not tests:
            continue
        spread = f" ± {statistics.stdev(tests):.2f}" if len(tests) > 1 else ""
        seeds = ", ".join(f"{test:.2f}" for test in tests)
        settings = [f"{best['rate'] / best['bound']:.3g}", f"{best['bound']:g}", f"{best['accuracy']:.2f} %"]
        lines.append([method, *settings, f"{statistics.mean(tests):.2f}{spread} %", seeds])
    columns = ["method", "rate", "bound", "held out", "test accuracy", "seeds"]
    return Table("", columns, lines, left=("method", "seeds")).markdown()


def epsilon_with_search(task: str, method: str, records: dict[str, Any]) -> float:
    """Epsilon by the RDP accountant of all trainings of a method's search and one on all training images."""
    accountant = require("opacus.accountants", "Private training", "opacus").RDPAccountant()
    mine = [r for r in records.values() if (r.get("task"), r["method"]) == (task, method)]
    tests = [record for record in mine if record["kind"] == TEST]
    counted = [record for record in mine if record["kind"] == SEARCH] + tests[:1]
    accountant.history = [(r["sigma"], r["batch"] / r["images"], r["steps"]) for r in counted]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(DELTA))


def search_table(task: str, records: dict[str, Any]) -> str:
    """Held-out accuracies of a task by method and rate, the better bound of each; searches may be unfinished."""
    tried = [r for r in records.values() if r.get("task") == task and r["kind"] == SEARCH and r["accuracy"] is not None]
    rates = sorted({record["rate"] for record in tried})
    lines = []
    for method in METHODS:
        best = {
            rate: max((r["accuracy"] for r in tried if (r["method"], r["rate"]) == (method, rate)), default=None)
            for rate in rates
        }
        if any(value is not None for value in best.values()):
            state = "yes" if searched(task, method, records)[1] else "no"
            lines.append([method, *(f"{v:.2f}" if v is not None else "" for v in best.values()), state])
    return Table(
        "", ["rate x bound", *(f"{rate:g}" for rate in rates), "finished"], lines, left=("rate x bound",)
    ).markdown()


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "show", "common"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="to train by")
    parser.add_argument("--data", dest="root", help="where the data sets lie; else $VARPROP_DATA or the cache")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--epochs", type=int, default=0, help="of all trainings, for tests; else those of the task")
    parser.add_argument("--limit", type=int, default=0, help="the first so many images only, for tests")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    options.records.parent.mkdir(parents=True, exist_ok=True)
    if options.action != "show":
        {"run": run, "common": common}[options.action](options)
        return
    records = read(options.records)
    for task in options.tasks:
        print(f"{task}\n\n{table(task, records)}\n\n{search_table(task, records)}\n")


if __name__ == "__main__":
    main()
