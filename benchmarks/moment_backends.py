"""What one activation without a kernel costs: steps of ResNet-50, and the moment and row passes by themselves.

    python -m benchmarks.moment_backends [--compile] [--json FILE] [--tiny --device cpu]

Networks: `relu` is ResNet-50 as it is; `softsign` has one Softsign in the place of the ReLU inside its last block, and
`squared` one squared ReLU. No kernel computes these two. Backends: `kernels` (moments and rows by kernels; a function
without a kernel is evaluated by torch between two launches), `torch moments` (all moments by torch, rows by kernels),
and `torch` (both by torch, as for any such network before moments and rows were chosen separately).

A step is the forward, backward and update of a batch in bfloat16 and channels_last: `eager`, `captured` as a CUDA
graph, and with --compile `compiled` by Inductor and captured; in milliseconds. The passes alone are timed as a CUDA
graph (`device`) and launched one by one (`launched`), in microseconds; `launches` counts their kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varprop.norm.fold import dispatch
from varprop.norm.layers import normalized_layers
from varprop_lab.bench import cases
from varprop_lab.training import captured

from .compare_kernels import graph_us, launches_of, step_us

BACKENDS = {"kernels": None, "torch moments": (False, True), "torch": (False, False)}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "relu": None,
    "softsign": F.softsign,
    "squared": lambda x: F.relu(x).square(),
}


@contextlib.contextmanager
def folded_by(backend: str) -> Iterator[None]:
    """Within it, new networks are folded by a backend."""
    choice = BACKENDS[backend]
    with contextlib.ExitStack() as stack:
        if choice is not None:
            stack.enter_context(mock.patch.object(dispatch, "_takes_kernels", lambda *_: choice))
        yield


def network(activation: str, device: torch.device, tiny: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """ResNet-50, normalized, with an activation inside its last block; and a batch."""
    case = cases.cases(device, tiny)["resnet50"]
    function = ACTIVATIONS[activation]

    def build(recipe: Any) -> nn.Module:
        model = case.build(recipe)
        block: Any = model.blocks[-1]  # type: ignore[index,union-attr]
        if function is not None:
            block.forward = lambda x: F.relu(block.expand(function(block.middle(F.relu(block.reduce(x))))) + x)
        return model

    return dataclasses.replace(case, build=build).network("analytic", device), *case.data(device)


def step_of(model: nn.Module, images: Tensor, labels: Tensor, compiled: bool) -> Callable[[], Tensor]:
    """A training step that learns nothing, so that its time does not depend on how training goes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9, foreach=True)

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    evaluated = torch.compile(loss_of, fullgraph=True, dynamic=False) if compiled else loss_of

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = evaluated(images, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def times_of_steps(model: nn.Module, images: Tensor, labels: Tensor, compiled: bool, count: int) -> dict[str, float]:
    """Milliseconds of a step in every mode."""
    device, times = images.device, {}
    step = step_of(model, images, labels, compiled)
    for _ in range(8):
        step()
    if not compiled:
        times["eager"] = step_us(step, device, count) / 1000
    if device.type == "cuda":
        model.zero_grad(set_to_none=True)
        replay = captured(step)
        times["compiled" if compiled else "captured"] = step_us(replay, device, count) / 1000
    return times


def times_of_passes(model: nn.Module, device: torch.device) -> dict[str, dict[str, float]]:
    """Microseconds and launches of both passes, forward and backward, of the backend that folds a model."""
    layer = next(iter(normalized_layers(model).values()))
    executor = layer.networks[True][0].executor
    weights = [layer.weight.detach() for layer in layer.networks[True][0].layers]
    backend, layout = executor.backend(weights), executor.layout
    shift_scale = torch.stack([torch.randn(layout.row_count), torch.rand(layout.row_count) + 0.5]).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    grad_weight = torch.randn(layout.weight_count, device=device).to(dtype)
    grad_bias = torch.randn(layout.row_count, device=device).to(dtype)
    with torch.no_grad():
        entering, moments_saved = backend.moments.forward(shift_scale, None, True)
        _, _, rows_saved = backend.rows.forward(weights, shift_scale, entering, dtype)
        rows_backward = functools.partial(backend.rows.backward, weights, shift_scale, rows_saved, entering)
        _, by_scale, by_entering = rows_backward(grad_weight, grad_bias)
        direct = grad_bias, by_scale
        passes = {
            "moments forward": lambda: backend.moments.forward(shift_scale, None, True),
            "moments backward": lambda: backend.moments.backward(shift_scale, moments_saved, by_entering, direct),
            "rows forward": lambda: backend.rows.forward(weights, shift_scale, entering, dtype),
            "rows backward": lambda: rows_backward(grad_weight, grad_bias),
        }
        return {name: time_of_pass(work, device) for name, work in passes.items()}


def time_of_pass(work: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Microseconds, launched one by one from an idle device until all is done; on a GPU also as a graph."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times = []
    for _ in range(20):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(1e6 * (time.perf_counter() - start))
    found = {"launched": statistics.median(times[5:])}
    if device.type == "cuda":
        found |= {"device": graph_us(work), "launches": launches_of(work)}
    return found


def main() -> None:
    """Print a line for every network and backend, as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also compile the networks with kernels: minutes")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--tiny", action="store_true", help="a small network, to try the script")
    parser.add_argument("--device", default="cuda", type=torch.device)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    cells = [(name, "kernels") for name in ACTIVATIONS]
    cells[2:2] = [("softsign", "torch moments"), ("softsign", "torch")] if options.device.type == "cuda" else []
    results: dict[str, Any] = {}
    count = 2 if options.tiny else 20
    for compiled in (False, True) if options.compile else (False,):
        for name, backend in cells:
            if compiled and backend == "torch":
                continue
            with folded_by(backend):
                torch.manual_seed(0)
                torch.compiler.reset()
                model, images, labels = network(name, options.device, options.tiny)
                found = results.setdefault(f"{name}, {backend}", {})
                found |= {"steps": found.get("steps", {}) | times_of_steps(model, images, labels, compiled, count)}
                if not compiled:
                    found["passes"] = times_of_passes(model, options.device)
            print(f"{name}, {backend}{', compiled' if compiled else ''}: {json.dumps(found)}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
