"""Times of functions that take turns, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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
    return statistics.median(value / other for value, other in zip(values, base, strict=True))
