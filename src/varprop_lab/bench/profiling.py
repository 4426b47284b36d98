"""Memory and kernels of a step on a GPU; on a CPU they are not counted."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


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
