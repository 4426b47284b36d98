"""Times the kernels on the layers of ResNet-50 beside the bytes they move.

Run as ``python -m tests.norm.backends.triton.benchmark [--channels-last] [--centred]``.

Every pass is captured in a CUDA graph and replayed; weights of 100 MB do not stay in the cache from one to the next.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from varprop.norm.backends import triton as kernels
from varprop.norm.layout import Lanes, Layout, Rows, Step

from .functions import ADD, RELU


class Network:
    """A layout in the making: sites, lanes and steps of a residual network."""

    def __init__(self, data: int) -> None:
        self.sites: list[tuple[int, int, int]] = []
        self.calls: list[tuple[int, list[tuple[str, int]]]] = []
        self.links: list[tuple[object, list[list[tuple[str, int]]]]] = []
        self.entering: list[list[tuple[str, int]]] = []
        self.rows, self.computed, self.data = 0, 0, [("data", n) for n in range(data)]

    def conv(self, lanes: list[tuple[str, int]], outputs: int, kernel: int) -> list[tuple[str, int]]:
        self.sites.append((outputs, len(lanes), kernel))
        self.entering.append(lanes)
        self.rows += outputs
        return [("source", n) for n in range(self.rows - outputs, self.rows)]

    def apply(self, function: object, *arguments: list[tuple[str, int]]) -> list[tuple[str, int]]:
        count = len(arguments[0])
        self.links.append((function, list(arguments)))
        self.computed += count
        return [("computed", n) for n in range(self.computed - count, self.computed)]

    def layout(self) -> Layout:
        base = {"source": 0, "data": self.rows, "computed": self.rows + len(self.data)}

        def index(lanes: list[tuple[str, int]]) -> Tensor:
            return torch.tensor([base[kind] + n for kind, n in lanes])

        steps, start = [], base["computed"]
        for function, arguments in self.links:
            steps.append(Step(function, tuple(index(lanes) for lanes in arguments), start, len(arguments[0])))
            start += len(arguments[0])
        constants = torch.zeros(len(self.data), dtype=torch.float64)
        entering = torch.cat([index(lanes) for lanes in self.entering])
        rows, row, channel, place = [], 0, 0, 0
        for outputs, channels, kernel in self.sites:
            taps = torch.ones(kernel * kernel, 1, dtype=torch.float64)
            if kernel > 1:
                taps = torch.cat([0.9 * taps, 0.1 * torch.randn(kernel * kernel, 8, dtype=torch.float64)], 1)
            rows.append(Rows(outputs, 1, channels, taps, row, channel, place))
            row, channel, place = row + outputs, channel + channels, place + rows[-1].weights
        return Layout(Lanes(self.rows, constants, constants + 1.0, 0, tuple(steps), entering), tuple(rows))


def resnet50(width: int = 64, classes: int = 1000) -> Layout:
    """Its layers, each with the activations that enter it."""
    net = Network(3)
    x = net.apply(RELU, net.conv(net.data, width, 7))
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = width << stage
        for block in range(blocks):
            y = net.apply(RELU, net.conv(x, inner, 1))
            y = net.apply(RELU, net.conv(y, inner, 3))
            y = net.conv(y, 4 * inner, 1)
            short = net.conv(x, 4 * inner, 1) if block == 0 else x
            x = net.apply(RELU, net.apply(ADD, y, short))
    net.conv(x, classes, 1)
    return net.layout()


def median_us(action, repeats: int = 30) -> float:
    """Microseconds of one replay, the median of many."""
    action()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    times = []
    for _ in range(repeats + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000.0 * start.elapsed_time(end))
    return statistics.median(times[5:])


def kernels_us(action, replays: int = 15) -> list[float]:
    """Medians of the time of every kernel of the work alone, as the profiler sees them in replays of its graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    on_gpu = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu.sort(key=lambda event: event.time_range.start)
    count = len(on_gpu) // replays
    return [statistics.median(event.device_time for event in on_gpu[n::count]) for n in range(count)]


def main(channels_last: bool, centred: bool) -> None:
    torch.manual_seed(0)
    free = resnet50()
    layout = Layout(free.lanes, tuple(replace(rows, centred=centred) for rows in free.rows))
    weights = []
    for rows in layout.rows:
        side = round(rows.tap_count**0.5)
        weight = torch.randn(rows.outputs, rows.channels, side, side, device="cuda")
        weights.append(weight.contiguous(memory_format=torch.channels_last) if channels_last else weight)
    begun = time.perf_counter()
    backend = kernels.TritonBackend(layout, weights)
    tables, lanes, count = backend.tables, layout.lanes, layout.weight_count
    print(f"{count / 1e6:.1f} M weights, {layout.row_count} rows, {lanes.total} lanes")
    print(f"channels_last {channels_last}, centred {centred}")
    print(f"tables {time.perf_counter() - begun:.2f} s")
    shift, scale = torch.randn(layout.row_count, device="cuda"), torch.rand(layout.row_count, device="cuda") + 0.5
    grads = torch.randn(count, device="cuda").bfloat16(), torch.randn(layout.row_count, device="cuda").bfloat16()
    none = torch.empty(0, device="cuda")
    mean, var, slopes = kernels.moments_forward(lanes, tables, shift, scale, none, none)
    _, _, saved = kernels.rows_forward(layout, tables, weights, scale, shift, mean, var, torch.bfloat16)
    passes = {
        "moments forward": (lambda: kernels.moments_forward(lanes, tables, shift, scale, none, none), 0),
        "moments backward": (lambda: kernels.moments_backward(lanes, tables, slopes, scale, mean, var), 0),
        "rows forward": (
            lambda: kernels.rows_forward(layout, tables, weights, scale, shift, mean, var, torch.bfloat16),
            6 * count,
        ),
        "rows backward": (
            lambda: kernels.rows_backward(layout, tables, weights, saved, scale, mean, var, *grads),
            10 * count,
        ),
    }
    big = torch.empty(1 << 28, device="cuda")
    copy = median_us(lambda: big[: 1 << 27].copy_(big[1 << 27 :]))
    print(f"{'a copy of 512 MB':20} {copy:8.1f} us  {(1 << 30) / copy / 1e6:5.2f} TB/s")
    for name, (action, moved) in passes.items():
        begun = time.perf_counter()
        us = median_us(action)
        rate = f"{moved / us / 1e6:5.2f} TB/s" if moved else ""
        alone = " ".join(f"{one:.1f}" for one in kernels_us(action))
        print(f"{name:20} {us:8.1f} us  {rate}  kernels {alone}  (in {time.perf_counter() - begun:.1f} s)")


if __name__ == "__main__":
    main("--channels-last" in sys.argv, "--centred" in sys.argv)
