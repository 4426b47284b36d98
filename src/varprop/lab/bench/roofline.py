"""The fold of all weights alone, against the time the memory needs for the bytes that cannot be avoided.

The fold is reached through the model: the layers know the object that folds them together.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from ..training.cuda_graph import captured
from .profiling import clean
from .record import FoldPiece, Roofline, first_line
from .step import BenchModel, autocast, capture_stream
from .timing import Function, interleaved, timed, wait

COPY = 2**30  # bytes, far beyond any cache
TINY_COPY = 2**22
GRAPH = (
    "mean over replays of a CUDA graph of the fold alone, nothing subtracted; the gradients of all layers are joined "
    "in one buffer before, which is measured apart; what one replay leaves in the L2 cache serves the next"
)
CLOCK = "wall time of the fold alone, called from Python, nothing subtracted"


def measure(network: BenchModel, rounds: int, seconds: float, tiny: bool = False) -> Roofline:
    """Measure the fold of a normalized network, and a copy beside it; arguments as for `interleaved`."""
    device, precision = network.device, network.case.compiled
    folding = folding_of(network)
    count = sum(layer.weight.numel() for layer in folding.layers)
    how, functions = without_launches(pieces(folding, precision, device), device)
    times = interleaved(functions, rounds, seconds, device)
    bandwidth = copy_bandwidth(device, TINY_COPY if tiny or device.type == "cpu" else COPY)
    folded = count * (2 if precision == "bf16" else 4)  # bytes
    least = {  # operations and bytes
        "forward": (6 * count, 4 * count + folded),  # of a weight: 2 for the mean, 3 for the variance, 1 to fold it
        "backward": (13 * count, 8 * count + folded),  # 2 for the row's rate, 6 for its gradient, 5 for the moments'
        "joining": (0, 2 * folded),
    }
    found = [FoldPiece(name, *least[name], statistics.median(values)) for name, values in times.items()]
    return Roofline(count, bandwidth, how, tuple(found))


def folding_of(network: BenchModel) -> Any:
    """What folds the layers of a network together in training."""
    networks = (getattr(module, "networks", None) for module in network.model.modules())
    return next(found for found in networks if found)[True][0]


def pieces(folding: Any, precision: str, device: torch.device) -> dict[str, Function]:
    """The fold, its derivative by all parameters for given derivatives by the folded ones, and the joining of these."""
    parameters = folding.parameters()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def forward() -> list[Tensor]:
        with autocast(precision, device):
            return list(folding.fold().parts)

    backward, joining = folding.executor.in_pieces(dtype, [parameter.detach() for parameter in parameters])
    return {"forward": forward, "backward": backward, "joining": joining}


def without_launches(functions: dict[str, Function], device: torch.device) -> tuple[str, dict[str, Function]]:
    """On a GPU the functions as CUDA graphs, where that can be done; and how they are measured then."""
    if device.type != "cuda":
        return CLOCK, functions

    def settle() -> None:
        wait(device)
        clean()

    try:
        stream = capture_stream(device)
        return GRAPH, {name: captured(function, stream, settle) for name, function in functions.items()}
    except RuntimeError as error:
        return f"{CLOCK} (no CUDA graph of it could be made: {first_line(error)})", functions


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes read and written a second when one large tensor is copied to another."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    for _ in range(3):
        target.copy_(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), 10, device) for _ in range(5))
    return 2 * size / seconds
