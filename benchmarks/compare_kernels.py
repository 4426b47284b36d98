"""A/B of two source trees on one machine: folds alone and steps of the CIFAR network, in alternation.

    python -m benchmarks.compare_kernels OLD NEW [--rounds 3] [--seconds 95] [--no-steps] [--tiny --device cpu]

OLD and NEW are folders that hold `src/`. First both trees compile what they need, side by side and untimed, each into a
cache of its own. Then every round is a subprocess per tree, in the order old new, new old, old new. Medians over rounds
are printed as JSON: {"old": {...}, "new": {...}, "ratio": {name: new / old}, "rounds": ..., "seconds": ...}.

Names: `<layout>_<pass>_us` is the median of replays of a CUDA graph of one pass of the backend alone (forward: moments
and rows; backward: rows, partial sums, moments), bf16 results, float32 weights; `_launches` its kernels. Layouts:
resnet50_last (the named benchmark), resnet50_plain (contiguous weights), cifar_last, depthwise (7x7 and 3x3, 256
groups, 24 layers), long_rows (linear 25088 -> 4096), resnet50_centred (the deep form). `cifar_eager_us` and
`cifar_captured_us` are steps as `varprop_lab.bench` makes them. `tables_s` is the time to build the tables of
resnet50_last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace


def options_of(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=95.0, help="begin no round that would end later")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-steps", action="store_true")
    parser.add_argument("--layouts", default="", help="names separated by commas; all by default")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    options, begun = options_of(), time.time()
    trees = {"old": os.path.abspath(options.old), "new": os.path.abspath(options.new)}
    caches = {name: tempfile.mkdtemp(prefix=f"ab-{name}-") for name in trees}
    warming = {name: started(trees[name], caches[name], options, warm=True) for name in trees}
    for name, process in warming.items():
        finished(process, trees[name])
    found, longest = {"old": [], "new": []}, 0.0
    for turn in range(options.rounds):
        start = time.time()
        if turn and start - begun + longest > options.seconds:
            break
        for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
            found[name].append(finished(started(trees[name], caches[name], options, warm=False), trees[name]))
        longest = max(longest, time.time() - start)
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    ratio = {
        key: round(medians["new"][key] / medians["old"][key], 4) for key in medians["old"] if key in medians["new"]
    }
    print(json.dumps({**medians, "ratio": ratio, "rounds": found, "seconds": round(time.time() - begun, 1)}, indent=1))


def started(tree: str, cache: str, options: argparse.Namespace, warm: bool) -> subprocess.Popen:
    own = {**os.environ, "PYTHONPATH": os.path.join(tree, "src"), "AB_WORKER": "1"}
    own |= {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    flags = [
        "--device",
        options.device,
        "--layouts",
        options.layouts,
        *["--tiny"] * options.tiny,
        *["--no-steps"] * options.no_steps,
        *["--warm"] * warm,
    ]
    command = [sys.executable, os.path.abspath(__file__), tree, tree, *flags]
    return subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tree)


def finished(process: subprocess.Popen, tree: str) -> dict:
    out, err = process.communicate()
    if process.returncode:
        sys.exit(f"{tree}: {out[-2000:]}{err[-6000:]}")
    return json.loads(out.strip().splitlines()[-1])


# ---------------------------------------------------------------------------------------------- in one tree


def worker() -> None:
    import torch

    options = options_of()
    device = torch.device(options.device)
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        repair_interpreter()
    result = {}
    for label, (layout, weights) in layouts(device, options.tiny).items():
        if options.layouts and label not in options.layouts.split(","):
            continue
        result |= fold_alone(label, layout, weights, device, options.warm)
    if not options.no_steps:
        result |= steps(device, options.tiny, options.warm)
    print(json.dumps(result))


def repair_interpreter() -> None:
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


class Net:
    """Sites and lanes of a residual network."""

    def __init__(self, data: int) -> None:
        self.sites, self.links, self.entering, self.rows, self.computed = [], [], [], 0, 0
        self.data = [("data", n) for n in range(data)]

    def conv(self, lanes, outputs, kernel, groups=1):
        self.sites.append((outputs, len(lanes) // groups, kernel, groups))
        self.entering.append(lanes)
        self.rows += outputs
        return [("source", n) for n in range(self.rows - outputs, self.rows)]

    def apply(self, function, *arguments):
        self.links.append((function, arguments))
        self.computed += len(arguments[0])
        return [("computed", n) for n in range(self.computed - len(arguments[0]), self.computed)]

    def layout(self):
        import torch

        from varprop.norm.fold.layout import Channels, Layout, Rows, Step

        base = {"source": 0, "data": self.rows, "computed": self.rows + len(self.data)}

        def index(lanes):
            return torch.tensor([base[kind] + n for kind, n in lanes])

        steps, start = [], base["computed"]
        for function, arguments in self.links:
            steps.append(Step(function, tuple(index(lanes) for lanes in arguments), start, len(arguments[0])))
            start += len(arguments[0])
        zeros = torch.zeros(len(self.data), dtype=torch.float64)
        rows, row, channel, place = [], 0, 0, 0
        for outputs, channels, kernel, groups in self.sites:
            taps = torch.ones(kernel * kernel, 1, dtype=torch.float64)
            if kernel > 1:
                taps = torch.cat([0.9 * taps, 0.1 * torch.randn(kernel * kernel, 8, dtype=torch.float64)], 1)
            rows.append(Rows(outputs, groups, channels, taps, row, channel, place))
            row, channel, place = row + outputs, channel + groups * channels, place + rows[-1].weights
        entering = torch.cat([index(lanes) for lanes in self.entering])
        return Layout(Channels(self.rows, zeros, zeros + 1.0, 0, tuple(steps), entering), tuple(rows))


def functions():
    from varprop.norm.fold.layout import Function

    return Function("relu", None, ("two_slopes", 1.0, 0.0)), Function("add", None, ("add", 1.0), 2)


def resnet50(width, blocks):
    relu, add = functions()
    net = Net(3)
    x = net.apply(relu, net.conv(net.data, width, 7))
    for stage, count in enumerate(blocks):
        inner = width << stage
        for block in range(count):
            y = net.apply(relu, net.conv(x, inner, 1))
            y = net.apply(relu, net.conv(y, inner, 3))
            y = net.conv(y, 4 * inner, 1)
            short = net.conv(x, 4 * inner, 1) if block == 0 else x
            x = net.apply(relu, net.apply(add, y, short))
    net.conv(x, 1000 if width == 64 else 10, 1)
    return net.layout()


def chain(widths, kernels, data=3, groups=None):
    relu, _ = functions()
    net = Net(data)
    x = net.data
    for width, kernel, group in zip(widths, kernels, groups or [1] * len(widths), strict=True):
        x = net.apply(relu, net.conv(x, width, kernel, group))
    return net.layout()


def layouts(device, tiny):
    import torch

    torch.manual_seed(0)
    resnet = resnet50(4, (1, 1, 1, 1)) if tiny else resnet50(64, (3, 4, 6, 3))
    w = 4 if tiny else 96
    cifar = chain([w, w, w, 2 * w, 2 * w, 2 * w, 2 * w, 2 * w, 10], [3, 3, 3, 3, 3, 3, 3, 1, 1])
    d, n = (8, 1) if tiny else (256, 12)
    depthwise = chain([d] * (3 * n), [7, 1, 3] * n, data=d, groups=[d, 1, d] * n)
    long = chain([8 if tiny else 4096, 10], [1, 1], data=20 if tiny else 25088)
    found = {"resnet50_last": (resnet, True), "resnet50_plain": (resnet, False), "cifar_last": (cifar, True)}
    found |= {"depthwise": (depthwise, False), "long_rows": (long, False), "resnet50_centred": (centred(resnet), True)}
    return {name: (layout, weights_of(layout, last, device)) for name, (layout, last) in found.items()}


def centred(layout):
    """The same in the deep form."""
    return replace(layout, rows=tuple(replace(rows, centred=True) for rows in layout.rows))


def weights_of(layout, last, device):
    import torch

    weights = []
    for rows in layout.rows:
        side = round(rows.tap_count**0.5)
        weight = torch.randn(rows.outputs, rows.channels, side, side, device=device)
        weights.append(weight.contiguous(memory_format=torch.channels_last) if last else weight)
    return weights


def fold_alone(label, layout, weights, device, warm):
    import torch

    from varprop.norm.backends import triton as kernels
    from varprop.norm.fold.dispatch import Backend, layouts_with

    begun = time.perf_counter()
    moments, rows = kernels.TritonMoments(layout.channels, device), kernels.TritonRows(layout, device)
    rows.tables(weights)
    sizes = 2 * [of_layer.outputs for of_layer in layout.rows]
    saved = len(kernels.moments_saved(layout))
    backend = Backend(moments, rows, saved, torch.float32, layouts_with(weights, sizes))
    result = {"tables_s": time.perf_counter() - begun} if label == "resnet50_last" else {}
    shifts, scales = torch.randn(layout.row_count, device=device), torch.rand(layout.row_count, device=device) + 0.5
    parameters = [*weights, *torch.cat([shifts, scales]).split(sizes)]
    dtype = torch.bfloat16
    _, _, kept = backend.forward(parameters, None, dtype, True)
    grads = (
        torch.randn(layout.weight_count, device=device).to(dtype),
        torch.randn(layout.row_count, device=device).to(dtype),
    )
    passes = {
        "forward": lambda: backend.forward(parameters, None, dtype, True),
        "backward": lambda: backend.backward(weights, kept, *grads),
    }
    for name, function in passes.items():
        function()
        if device.type == "cuda" and not warm:
            result[f"{label}_{name}_us"], result[f"{label}_{name}_launches"] = graph_us(function), launches_of(function)
        elif not warm:
            result[f"{label}_{name}_us"] = clock_us(function, 1)
    return result


def steps(device, tiny, warm):
    import torch

    from varprop_lab.bench import cases as bench_cases
    from varprop_lab.bench import run

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case = bench_cases.cases(device, tiny)["cifar"]
    network = run.network(case, "analytic", *case.data(device))
    eager, _ = run.make_step(network, "eager", "inductor")
    result = {"cifar_eager_us": step_us(eager, device, 2 if tiny or warm else 40)}
    run.drop_traces(network)
    if device.type == "cuda":
        captured, _ = run.make_step(network, "captured", "inductor")
        result["cifar_captured_us"] = step_us(captured, device, 2 if warm else 100)
    return result


def graph_us(function, repeats=40):
    """Median of the time of a replay, ten at a time, by events."""
    import torch

    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(100.0 * start.elapsed_time(end))
    return statistics.median(times[5:])


def launches_of(function):
    """Kernels of one call."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def clock_us(function, count):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def step_us(function, device, count):
    """Median over five turns of the mean time of a step, from an idle device until all is done."""
    import torch

    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times = []
    for _ in range(5):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            function()
        wait()
        times.append(1e6 * (time.perf_counter() - start) / count)
    return statistics.median(times)


if __name__ == "__main__":
    worker() if os.environ.get("AB_WORKER") else main()
