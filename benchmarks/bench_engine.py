"""The engine's cost on ResNet-18, as ratios to one forward pass of one 224 x 224 image, measured in one run.

python -m benchmarks.bench_engine [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import varprop as vp
from varprop_lab.environment import provenance

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.models import ResNet


def side_by_side(functions: dict[str, Callable[[], Any]], repeats: int = 40) -> dict[str, float]:
    """Median wall times, the functions called in turn so that whatever else the machine does hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found[3:]) for name, found in times.items()}


@torch.no_grad()
def measure() -> dict[str, float]:
    """Times in seconds."""
    torch.manual_seed(0)
    model = ResNet(width=64, classes=1000).eval()
    image, channels = torch.randn(1, 3, 224, 224), torch.zeros(1, 3, 1, 1)
    start = time.perf_counter()
    program = vp.capture(model, image)
    capture = time.perf_counter() - start
    uniform = vp.Moments(channels, torch.ones_like(channels))
    times = side_by_side({"forward": lambda: model(image), "propagate": lambda: vp.propagate(program, uniform)})
    return {**times, "capture": capture}


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    where = parser.parse_args().json
    times = measure()
    print(f"ResNet-18, torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    for name, value in times.items():
        print(f"{name:<26} {1e3 * value:9.1f} ms   {value / times['forward']:6.2f} x forward")
    if where:
        where.write_text(json.dumps({**provenance(torch.device("cpu")), **times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
