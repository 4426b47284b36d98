"""Empirical statistics of modules, the yardstick of every analytic one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import varprop as vp


def gaussian(moments: vp.Moments, shape: tuple[int, ...], count: int) -> Tensor:
    """Draws with the given moments, broadcast to `shape` without its batch axis."""
    size = (count, *shape[1:])
    return moments.mean + moments.std * torch.randn(size, dtype=moments.dtype)


def module_statistics(
    model: nn.Module, draw: Callable[[int], Any], count: int, batch: int = 256, pool: tuple[int, ...] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and std of every module's output over `count` draws, and over the axes `pool` too."""
    sums: dict[str, list[Tensor]] = {}
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_hook(_recorder(sums, path, pool)))
    with torch.no_grad():
        for _ in range(0, count, min(batch, count)):
            inputs = draw(min(batch, count))
            model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    for hook in hooks:
        hook.remove()
    return {path: _finish(*total) for path, total in sums.items()}


def _recorder(sums: dict[str, list[Tensor]], path: str, pool: tuple[int, ...]) -> Callable[..., None]:
    def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        values = output.double()
        axes = [0, *(axis for axis in pool if axis < values.ndim)]
        number = torch.tensor(float(values.numel()) / max(1, values.mean(axes).numel()))
        parts = [number, values.sum(axes), values.square().sum(axes)]
        sums[path] = [a + b for a, b in zip(sums[path], parts, strict=True)] if path in sums else parts

    return record


def _finish(number: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    mean = total / number
    return mean, (squares / number - mean.square()).clamp_min(0).sqrt()
