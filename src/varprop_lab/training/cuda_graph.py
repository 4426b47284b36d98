"""CUDA graphs: work recorded once on the GPU and replayed, which saves the time of its many small launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_WARM_UP = 3


def captured(
    function: Callable[[], Result],
    stream: torch.cuda.Stream | None = None,
    before_capture: Callable[[], None] = lambda: None,
) -> Callable[[], Result]:
    """The function as a CUDA graph; it is run a few times first, so whatever it changes has to be set afterwards.

    It reads and changes tensors in place, and must not wait for the device. A replay returns what the function returned
    at capture, with the values of this replay.
    """
    side = torch.cuda.Stream() if stream is None else stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(side)
    before_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = function()

    def replay(_function: Any = function) -> Result:  # the graph works in memory that the function owns
        graph.replay()
        return result

    return replay


def captured_step(step: Callable[..., Result], *inputs: Tensor) -> Callable[..., Result]:
    """A step, for inputs of these shapes, as a CUDA graph; on other devices the step itself."""
    if inputs[0].device.type != "cuda":
        return step
    read = [tensor.clone() for tensor in inputs]
    replay = captured(lambda: step(*read))

    def replayed_step(*inputs: Tensor) -> Result:
        for here, new in zip(read, inputs, strict=True):
            here.copy_(new)
        return replay()

    return replayed_step


def in_parallel_streams(tasks: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """Results of tasks that do not depend on each other; on a GPU each in a stream of its own."""
    if device.type != "cuda":
        return [task() for task in tasks]
    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in tasks]
    results = []
    for task, stream in zip(tasks, streams, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            results.append(task())
    for stream in streams:
        main.wait_stream(stream)
    return results
