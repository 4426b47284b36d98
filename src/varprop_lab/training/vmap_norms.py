"""Batch norm and weight norm in ordinary operations, which vmap turns into one operation for many networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def with_plain_norms_(model: nn.Module, batch_norm: bool) -> nn.Module:
    """Let normalizations compute in ordinary operations, in place; parameters, buffers and function stay.

    torch's own weight norm would run network by network. Its batch norm is cuDNN's on a GPU, which is made for one
    network; on a CPU it is faster than ordinary operations, and stays unless `batch_norm` is given.
    """
    for module in model.modules():
        if isinstance(module, parametrize.ParametrizationList):
            for index, part in enumerate(module):
                if type(part).__name__ == "_WeightNorm":
                    module[index] = _PlainWeightNorm(int(part.dim))  # type: ignore[arg-type]
        if batch_norm and type(module) in _BATCH_NORMS and module.momentum is not None and module.track_running_stats:
            module.__class__ = _PlainBatchNorm
    return model


class _PlainBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm over all axes but the second."""

    def forward(self, input: Tensor) -> Tensor:
        axes = [axis for axis in range(input.ndim) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.ndim)]
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None and self.momentum is not None
        if self.training:
            var, mean = torch.var_mean(input, axes, correction=0)
            count = input.numel() // input.shape[1]
            self._remember(mean.detach(), var.detach() * (count / max(count - 1, 1)), self.momentum)
        normalized = (input - mean.view(shape)) * torch.rsqrt(var + self.eps).view(shape)
        return torch.addcmul(self.bias.view(shape), normalized, self.weight.view(shape)) if self.affine else normalized

    def _remember(self, mean: Tensor, var: Tensor, share: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        self.running_mean.copy_(self.running_mean.lerp(mean, share))  # vmap has no rule for lerp_
        self.running_var.copy_(self.running_var.lerp(var, share))


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _PlainWeightNorm(nn.Module):
    """w = g v / |v|."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        axes = [axis for axis in range(direction.ndim) if axis != self.dim % direction.ndim]
        return direction * (length / direction.square().sum(axes, keepdim=True).sqrt())
