"""A training step in each mode (eager, compiled, captured as a CUDA graph), its time, memory and kernels."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..training import captured
from .cases import Case


def clean() -> None:
    """Give unused memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    """Bytes in use on a GPU; 0 on a CPU, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Begin to look for the peak of memory in use."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """The most bytes in use since `reset_peak`."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def kernels(step: Callable[[], Any], device: torch.device) -> int | None:
    """How many kernels the GPU runs in a step, as the profiler sees them; None where it sees none."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        return count_kernels(json.loads(trace.read_text("utf-8"))) or None


def count_kernels(trace: dict[str, Any]) -> int:
    """Kernels in a trace: not copies, fills, calls on the host, or annotations."""
    return sum(event.get("cat") == "kernel" for event in trace.get("traceEvents", []))


Function = Callable[[], Any]


def interleaved(
    functions: Mapping[str, Function], rounds: int, seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of one call of every function, once a round; each round begins with another function.

    `seconds` are for all turns of one function together; each turn is at least one call, and the device is waited for
    at both ends of it.
    """
    counts = {name: repetitions(function, seconds / rounds, device) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            times[name].append(timed(functions[name], counts[name], device))
    return times


def repetitions(function: Function, seconds: float, device: torch.device) -> int:
    """How many calls take about that long; it is called twice before, to be warm."""
    function()
    function()
    once = timed(function, 1, device)
    return max(1, min(1000, round(seconds / once)))


def timed(function: Function, count: int, device: torch.device) -> float:
    """Mean seconds of a call, from an idle device until everything is done."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        function()
    wait(device)
    return (time.perf_counter() - start) / count


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(value / divisor for value, divisor in zip(values, base, strict=True))


TimedStep = Callable[[], Tensor]  # returns the loss
LR = 1e-7  # nothing is learned: what is timed must not depend on how training goes
SETTLE = 6  # steps after which all that is recorded when repeated is


@dataclass(frozen=True)
class BenchModel:
    """A model of a case with its batch, used in all modes."""

    case: Case
    variant: str
    model: nn.Module
    images: Tensor
    labels: Tensor
    bytes: int  # device memory that the model took when it was made
    losses: dict[str, Callable[..., Tensor]]  # compiled, by precision; filled when first asked for

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.images.device

    def loss(self, name: str) -> Callable[..., Tensor]:
        """Mean cross entropy of images and labels.

        What is compiled is kept by code object; if variants shared one, each call would look through all of them.
        """
        model = self.model

        def loss(images: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(images), labels)

        loss.__code__ = loss.__code__.replace(co_name=f"loss_{self.case.name}_{self.variant.replace('-', '_')}_{name}")
        return loss

    def compiled(self, precision: str, backend: str) -> Callable[..., Tensor]:
        """The loss compiled, with the same settings for all variants."""
        if precision not in self.losses:
            compiled = torch.compile(self.loss(precision), backend=backend, fullgraph=True, dynamic=False)
            self.losses[precision] = compiled
        return self.losses[precision]


def network(case: Case, variant: str, images: Tensor, labels: Tensor) -> BenchModel:
    """Built on the device of the batch."""
    clean()  # what others left behind must not be counted as freed by this one
    before = allocated(images.device)
    model = case.network(variant, images.device)
    clean()
    return BenchModel(case, variant, model, images, labels, allocated(images.device) - before, {})


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast to bfloat16 for ``bf16``, nothing otherwise."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def optimizer(network: BenchModel, capturable: bool) -> torch.optim.Optimizer:
    """The optimizer of the case over all parameters, with the foreach implementation."""
    parameters = list(network.model.parameters())
    if network.case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=LR, foreach=True, capturable=capturable)
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9, foreach=True)


def make_step(network: BenchModel, mode: str, backend: str) -> tuple[TimedStep, int]:
    """The step of a mode, warmed up, and the peak of device memory in it.

    Raises:
        RuntimeError: Whatever torch raises if it cannot be compiled, captured, or held in memory.
    """
    precision = network.case.precision(mode)
    loss_of = network.loss(mode) if mode == "eager" else network.compiled(precision, backend)
    if mode == "captured":
        capture_stream(network.device)
    before = allocated(network.device)
    update = optimizer(network, capturable=mode == "captured")

    def step() -> Tensor:
        update.zero_grad(set_to_none=True)
        with autocast(precision, network.device):
            loss = loss_of(network.images, network.labels)
        loss.backward()
        update.step()
        return loss.detach()

    final = _captured(step, network) if mode == "captured" else _warm(step, network)
    return final, peak(network.device) - before + network.bytes


def _warm(step: TimedStep, network: BenchModel) -> TimedStep:
    """The step itself after a few runs, the last of which is watched."""
    for _ in range(SETTLE):
        step()
    reset_peak(network.device)
    step()
    return step


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of all captures."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        prime(device)
    return stream


def prime(device: torch.device) -> None:
    """Let a GPU's libraries take their workspaces, which would be counted as memory of whichever step comes first.

    A CPU has none, and one without bfloat16 would compute without oneDNN from there on.
    """
    if device.type == "cpu":
        return
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()


def _captured(step: TimedStep, network: BenchModel) -> TimedStep:
    def settle() -> None:
        network.model.zero_grad(set_to_none=True)
        clean()
        reset_peak(network.device)

    replay = captured(step, capture_stream(network.device), settle)
    replay()
    return replay


def drop_traces(network: BenchModel) -> None:
    """Let go of gradients and of folded weights, so that the next mode finds the model as it was made."""
    network.model.zero_grad(set_to_none=True)
    network.model.eval().train()
    clean()
