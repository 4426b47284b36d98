"""A training step recorded once on the GPU and replayed: the time of its many small launches is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], None]
_WARM_UP = 3


def replayed(step: Step, images: Tensor, labels: Tensor) -> Step:
    """The step as a CUDA graph; on other devices the step itself.

    The step is run a few times on the way, so whatever it changes has to be set afterwards.

    Args:
        step: Reads images and labels and changes tensors in place; it must not wait for the device.
        images: Of the shape it will get.
        labels: Likewise.
    """
    if images.device.type != "cuda":
        return step
    inputs = images.clone(), labels.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*inputs)

    def replay(images: Tensor, labels: Tensor) -> None:
        inputs[0].copy_(images)
        inputs[1].copy_(labels)
        graph.replay()

    return replay


def side_by_side(tasks: Sequence[Callable[[], Any]], device: torch.device) -> list[Any]:
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
