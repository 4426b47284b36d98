"""Networks trained side by side on a GPU, which takes hardly longer for six steps of two images than for one.

`SideBySide` gives every network of `joined.joined` a rate, bounds of its gradient and an order of the images, and
replays its steps as a CUDA graph on a GPU (`tests/benchmarks/test_side_by_side.py`).
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from normalizations import BatchRenorm2d, clip_adaptively_, renorm_limits
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from varprop_lab.demo import one_cycle
from varprop_lab.environment import write_atomically
from varprop_lab.training import captured

from .joined import WIDER, accuracies, member_losses, move_

CHECKED_EVERY = 200  # steps between two looks at the clock
WIDER[BatchRenorm2d] = lambda norm, count: BatchRenorm2d(count * len(norm.weight), norm.momentum, norm.eps)


class _ByProducts(torch.autograd.Function):
    """A convolution in groups as a batched matrix product of its windows, in both directions.

    Everything stays in channels-last order: a group's channels are a strided matrix, which products take as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int, groups: int) -> Tensor:
        columns, shape = _columns(x, weight.shape[2], stride, padding, groups)
        ctx.save_for_backward(columns, weight)
        ctx.layout = x.shape, stride, padding, groups
        return _product(columns, _rows(weight, groups).transpose(1, 2), shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        columns, weight = ctx.saved_tensors
        (count, _, height, width), stride, padding, groups = ctx.layout
        _, inputs, size, _ = weight.shape
        grad = grad.contiguous(memory_format=torch.channels_last)
        by_rows = grad.permute(0, 2, 3, 1).reshape(-1, groups, weight.shape[0] // groups).permute(1, 2, 0)
        grad_weight = torch.bmm(by_rows, columns).view(-1, size, size, inputs).permute(0, 3, 1, 2)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None, None
        # the gradient by the input is a convolution of the spread gradient with the mirrored kernel
        if stride > 1:
            spread = grad.new_zeros(
                count, grad.shape[1], (grad.shape[2] - 1) * stride + 1, (grad.shape[3] - 1) * stride + 1
            )
            spread = spread.contiguous(memory_format=torch.channels_last)
            spread[:, :, ::stride, ::stride] = grad
            grad = spread
        before = size - 1 - padding
        below, right = height + padding - grad.shape[2], width + padding - grad.shape[3]
        grad = F.pad(grad, (before, right, before, below))
        columns, shape = _columns(grad, size, 1, 0, groups)
        mirrored = weight.flip(2, 3).unflatten(0, (groups, -1)).permute(0, 3, 4, 1, 2).reshape(groups, -1, inputs)
        return _product(columns, mirrored, shape), grad_weight, None, None, None


def _columns(x: Tensor, size: int, stride: int, padding: int, groups: int) -> tuple[Tensor, tuple[int, int, int]]:
    """Windows of all groups, (groups, positions, size * size * channels); images, rows and columns of the positions."""
    x = x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    if padding:
        x = F.pad(x, (0, 0, padding, padding, padding, padding))
    windows = (
        x.unfold(1, size, stride).unfold(2, size, stride).unflatten(3, (groups, -1))
    )  # N, H, W, K, C, rows, columns
    shape = windows.shape[:3]
    return windows.permute(3, 0, 1, 2, 5, 6, 4).reshape(groups, math.prod(shape), -1), shape


def _rows(weight: Tensor, groups: int) -> Tensor:
    """(groups, outputs, size * size * channels)."""
    rows: Tensor = weight.unflatten(0, (groups, -1)).permute(0, 1, 3, 4, 2).flatten(2)
    return rows


def _product(left: Tensor, right: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Products of all groups as images in channels-last order."""
    result = left.new_empty(*shape, left.shape[0], right.shape[2])
    torch.bmm(left, right, out=result.view(-1, *result.shape[3:]).transpose(0, 1))
    return result.flatten(3).permute(0, 3, 1, 2)


def by_products(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int) -> Tensor:
    """`F.conv2d` of square kernels by batched matrix products; casts as autocast does."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        result: Tensor = _ByProducts.apply(x, weight, stride, padding, groups)  # type: ignore[no-untyped-call]
    return result if bias is None else result + bias[:, None, None]


def _by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, groups: int) -> Tensor:
    return F.conv2d(x, weight, bias, stride, padding, 1, groups)


class GroupedConvolutions(TorchFunctionMode):
    """Computes every convolution in groups by whichever way `ways` says for its shapes, torch's own by default."""

    def __init__(self, ways: dict[str, str]) -> None:
        super().__init__()
        self.ways = ways
        self.met: dict[str, tuple[Any, ...]] = {}  # shapes in this use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Takes over convolutions, leaves the rest."""
        kwargs = kwargs or {}
        if func is not torch.conv2d or kwargs or len(args) != 7 or args[6] == 1:
            return func(*args, **kwargs)
        x, weight, bias, stride, padding, _, groups = args
        shapes = tuple(x.shape), tuple(weight.shape), stride[0], padding[0], groups
        self.met[str(shapes)] = shapes
        if self.ways.get(str(shapes)) == "products":
            return by_products(x, weight, bias, stride[0], padding[0], groups)
        return func(*args)


def fastest_way(shapes: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> str:
    """How a convolution in groups takes the least time on a GPU, forward and backward replayed as a CUDA graph."""
    x_shape, weight_shape, stride, padding, groups = shapes
    last = {"memory_format": torch.channels_last}
    x = torch.randn(x_shape, device=device, dtype=dtype).contiguous(**last).requires_grad_()
    weight = torch.randn(weight_shape, device=device, dtype=dtype).contiguous(**last).requires_grad_()
    seconds = {}
    for way, function in (("torch", _by_torch), ("products", by_products)):

        def both(function: Any = function) -> Any:
            out = function(x, weight, None, stride, padding, groups)
            return torch.autograd.grad(out, (x, weight), torch.ones_like(out))

        replay = captured(both)
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                replay()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds[way] = min(times)
    return min(seconds, key=lambda way: seconds[way])


@dataclass(frozen=True)
class Member:
    """How one of the networks is trained."""

    rate: float  # the highest
    clip: float  # bound of the gradient's norm; 0 for none
    seed: int  # of weights and of the order of images
    adaptive: float = 0.0  # bound of adaptive gradient clipping; 0 for none


class SideBySide:
    """Trains networks side by side as examples/train_cifar.py trains one: SGD, Nesterov momentum, one-cycle rate.

    Args:
        model: `joined` networks, normalized or not.
        members: How each is trained.
        epoch: Gives the images and labels of a seed's epoch, in the order in which they are used.
        size: Images of an epoch.
        batch: Images of a step.
        epochs: How many there are.
        device: Where to train.
        ways: How to compute convolutions in groups, by their shapes; found out and written here on a GPU.
        compiled: Whether the network is compiled, which takes a minute and pays where many trainings follow (`begin`).
        smoothing: Of the labels.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Sequence[Member],
        epoch: Callable[[int, int], tuple[Tensor, Tensor]],
        size: int,
        batch: int,
        epochs: int,
        device: torch.device,
        weight_decay: float = 5e-4,
        ways: dict[str, str] | None = None,
        compiled: bool = False,
        smoothing: float = 0.0,
    ) -> None:
        last: Any = {"memory_format": torch.channels_last}  # which torch's own declarations do not know
        self.model = model.to(device, **last).train()
        self.call = torch.compile(self.model) if compiled else self.model
        self.compiled, self.batch, self.device = compiled, batch, device
        self.half = device.type == "cuda"
        self.ways: dict[str, str] = {} if ways is None else ways
        self.parameters = list(self.model.parameters())
        self.momenta = [torch.zeros_like(p) for p in self.parameters]
        self.step = torch.zeros(1, dtype=torch.int64, device=device)  # an index without an axis would be read back
        self.total = torch.zeros(len(members), device=device)
        # what differs between two trainings by the same recorded step
        count, longest = len(members), size // batch * epochs
        self.clips = [(member.clip > 0, member.adaptive > 0) for member in members]
        self.bounds = torch.zeros(2, count, device=device)
        self.length = torch.zeros(1, dtype=torch.int64, device=device)  # steps of an epoch
        self.rates, self.limits = torch.zeros(longest, count, device=device), torch.zeros(longest, 2, device=device)
        self.seed_of = torch.zeros(count, dtype=torch.int64, device=device)
        renorms = [layer for layer in self.model.modules() if isinstance(layer, BatchRenorm2d)]
        for layer in renorms:
            layer.limits = renorms[0].limits
        self.renorm = renorms[0] if renorms else None
        self.weight_decay, self.smoothing = weight_decay, smoothing
        self.images: Tensor | None = None
        self.replay: Callable[[], Any] | None = None
        self.begin(members, epoch, size, epochs)

    @torch.no_grad()
    def begin(
        self,
        members: Sequence[Member],
        epoch: Callable[[int, int], tuple[Tensor, Tensor]],
        size: int,
        epochs: int,
        start: nn.Module | None = None,
    ) -> None:
        """Begin a training, from the parameters and buffers of `start` if there is one, with the step recorded before.

        There are as many members as at first, and neither more images nor more steps; who was not clipped at first is
        not clipped.
        """
        self.members, self.make_epoch, self.steps, self.epochs = list(members), epoch, size // self.batch, epochs
        self.done = 0  # steps
        self.losses: list[list[float]] = []  # of every epoch and member
        self.seeds = sorted({member.seed for member in members})
        self.seed_of.copy_(torch.tensor([self.seeds.index(member.seed) for member in members]))
        schedule = [one_cycle(step, self.steps * epochs) for step in range(self.steps * epochs)]
        rates = [[member.rate * part for member in members] for part in schedule]
        self.rates[: len(schedule)].copy_(torch.tensor(rates))
        limits = [renorm_limits(n / len(schedule)) for n in range(len(schedule))]
        self.limits[: len(schedule)].copy_(torch.tensor(limits))
        bounds = [[member.clip or math.inf for member in members], [member.adaptive or math.inf for member in members]]
        self.bounds.copy_(torch.tensor(bounds))
        self.length.fill_(self.steps)
        for tensor in (*self.momenta, self.step, self.total):
            tensor.zero_()
        if start is not None:
            for name, value in (*start.named_parameters(), *start.named_buffers()):
                owner, _, last = name.rpartition(".")
                getattr(self.model.get_submodule(owner), last).copy_(value)

    def train(self, until: float = math.inf) -> bool:
        """Go on to the end or until a time by `time.time`; whether the end was reached."""
        while self.done < self.steps * self.epochs:
            epoch, start = divmod(self.done, self.steps)
            self._load_epoch(epoch)
            self.prepare()
            assert self.replay is not None
            for number in range(start, self.steps):
                self.replay()
                self.done += 1
                if number % CHECKED_EVERY == 0:
                    self._wait()
                    if time.time() > until:
                        return False
            mean = (self.total / self.steps).tolist()
            self.losses.append(mean)
            self.total.zero_()
            if not any(math.isfinite(loss) for loss in mean):
                break  # nothing comes after NaN
        return True

    def milliseconds(self, seconds: float) -> float:
        """Milliseconds of a step, over that time; leaves everything as it was."""
        self.prepare()
        assert self.replay is not None
        values = [value.clone() for value in self._state()]
        self._wait()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for _ in range(20 if self.device.type == "cuda" else 1):
                self.replay()
                count += 1
            self._wait()
        result = 1000 * (time.perf_counter() - start) / count
        self._set_state(values)
        return result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _load_epoch(self, epoch: int) -> None:
        """Into memory that the graph reads."""
        sets = [self.make_epoch(seed, epoch) for seed in self.seeds]
        dtype = torch.bfloat16 if self.half else sets[0][0].dtype
        if self.images is None:
            self.images = torch.stack([images.permute(0, 2, 3, 1).to(dtype) for images, _ in sets])
            self.labels = torch.stack([labels for _, labels in sets])
        else:
            for number, (images, labels) in enumerate(sets):
                self.images[number][: len(images)].copy_(images.permute(0, 2, 3, 1))
                self.labels[number][: len(labels)].copy_(labels)

    def prepare(self) -> None:
        """Find the fastest convolutions and record a step on a GPU, once; leaves everything as it was."""
        if self.replay is not None:
            return
        if self.images is None:
            self._load_epoch(0)
        if self.device.type != "cuda":
            self.replay = self._step
            return
        torch.backends.cudnn.benchmark = True
        values = [value.clone() for value in self._state()]
        if not self.compiled:
            mode = GroupedConvolutions(self.ways)
            with mode:
                self._step()
            for name, shapes in mode.met.items():
                if name not in self.ways:
                    self.ways[name] = fastest_way(shapes, torch.bfloat16, self.device)

        def step() -> None:
            with contextlib.nullcontext() if self.compiled else GroupedConvolutions(self.ways):
                self._step()

        self.replay = captured(step, before_capture=torch.cuda.reset_peak_memory_stats)
        self._set_state(values)

    def _state(self) -> list[Tensor]:
        """All that a step changes."""
        parameters = [parameter.detach() for parameter in self.parameters]
        return [*parameters, *self.momenta, *self.model.buffers(), self.step, self.total]

    @torch.no_grad()
    def _set_state(self, values: Sequence[Tensor]) -> None:
        for here, value in zip(self._state(), values, strict=True):
            here.copy_(value)

    def _step(self) -> None:
        now = self.step % len(self.rates)  # a step that only warms up may come after the last
        chosen = self.step % self.length * self.batch + torch.arange(self.batch, device=self.device)
        assert self.images is not None
        images = self.images[self.seed_of[:, None], chosen]  # K, N, H, W, C
        x = images.permute(1, 2, 3, 0, 4).flatten(3).permute(0, 3, 1, 2)
        labels = self.labels[self.seed_of[:, None], chosen]
        if self.renorm is not None:
            self.renorm.limits.copy_(self.limits[now][0])
        for parameter in self.parameters:
            parameter.grad = None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            losses = member_losses(self.call(x), labels, self.smoothing)
        losses.sum().backward()
        with torch.no_grad():
            move_(self.parameters, self.momenta, self.rates[now][0], self.weight_decay, self._clip)
            self.total += losses.detach()
            self.step += 1

    def _clip(self, number: int, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        clipped, adaptive = self.clips[number]
        if clipped:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, (self.bounds[0, number] / (norm + 1e-6)).clamp(max=1.0))
        if adaptive:  # but not the last layer, weight and bias
            clip_adaptively_(parameters[:-2], gradients[:-2], self.bounds[1, number])

    def accuracies(self, images: Tensor, labels: Tensor) -> list[float]:
        """The share of these images that every network gets right."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return accuracies(self.model, len(self.members), images, labels)

    def save(self, path: Path) -> None:
        """Into a file that is either the old one or the new one, whatever happens."""
        state = {"values": self._state(), "done": self.done, "losses": self.losses}
        content = io.BytesIO()
        torch.save(state, content)
        write_atomically(path, content.getvalue())

    def load(self, path: Path) -> None:
        """Go on from a file."""
        saved = torch.load(path, map_location=self.device, weights_only=True)
        self._set_state(saved["values"])
        self.done, self.losses = saved["done"], saved["losses"]
