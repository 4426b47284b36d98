"""Helpers of both passes: the current device, contiguous arguments, and tables that outlive CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Within it, kernels are launched on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def flat(x: Tensor) -> Tensor:
    """A contiguous tensor without history."""
    return x.detach().contiguous()


def allocated_to_stay(device: torch.device, work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread of its own, so that what it allocates stays.

    While torch.compile makes CUDA graphs (its mode "reduce-overhead"), all that their thread allocates belongs to them.
    """
    if device.type != "cuda":
        return work()

    def finished() -> T:
        result = work()
        torch.cuda.current_stream(device).synchronize()  # the stream of that thread is another one
        return result

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(finished).result()


def capturing() -> bool:
    """True if a CUDA graph is being captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raise if a CUDA graph is being captured, while tables would have to be built or renewed."""
    if capturing():
        raise RuntimeError(
            f"The tables of the kernels would have to be {what} while a CUDA graph is captured, which cannot copy from "
            "the host: run one step before the capture."
        )
