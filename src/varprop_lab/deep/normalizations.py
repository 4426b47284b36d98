"""Normalizations to compare with in convolutional networks: batch renormalization and weight standardization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

R_MAX, D_MAX = 3.0, 5.0  # of the published experiments
PLAIN_UNTIL, R_UNTIL, D_UNTIL = 0.025, 0.2, 0.125  # 5000, 40,000 and 25,000 of 200,000 steps


class BatchRenorm2d(nn.Module):
    """Batch renormalization (Ioffe 2017): ``((x - mean) / std * r + d) * weight + bias`` with the batch's mean and std.

    ``r = std / running_std`` and ``d = (mean - running_mean) / running_std`` are constants in the backward pass,
    bounded by `limits`; inference uses the running values. With limits of 1 and 0, the first ones, this is batch norm:
    raise them while training with `renorm_limits`.

    Args:
        channels: Channels of the input (N, C, H, W).
        momentum: Of the running mean and standard deviation, 0.01 as published.
        eps: Added to the variance.
    """

    def __init__(self, channels: int, momentum: float = 0.01, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.momentum, self.eps = momentum, eps
        self.running_mean: Tensor
        self.running_std: Tensor
        self.limits: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_std", torch.ones(channels))
        self.register_buffer("limits", torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        """Normalized by the batch and corrected in training, normalized by the running statistics else."""
        if not self.training:
            var = self.running_std.square() - self.eps  # torch takes no eps of zero; no running std is below its root
            return F.batch_norm(x, self.running_mean, var, self.weight, self.bias, training=False, eps=self.eps)
        r, d = self._correction(x.detach())
        # r and d are constants, so they join weight and bias of an ordinary batch norm
        return F.batch_norm(x, None, None, self.weight * r, self.weight * d + self.bias, training=True, eps=self.eps)

    @torch.no_grad()
    def _correction(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The bounded r and d; moves the running statistics."""
        mean, unbiased = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_std)
        F.batch_norm(x, mean, unbiased, training=True, momentum=1.0, eps=self.eps)  # in float32 for halves, too
        count = x.numel() // x.shape[1]
        std = (unbiased * ((count - 1) / count) + self.eps).sqrt()
        r_max, d_max = self.limits.unbind()
        r = (std / self.running_std).clamp(1 / r_max, r_max)
        d = ((mean - self.running_mean) / self.running_std).clamp(-d_max, d_max)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_std.lerp_(std, self.momentum)
        return r, d


def renorm_limits(done: float) -> tuple[float, float]:
    """The bounds of r and d after a fraction of the training: the published schedule as parts of 200,000 steps."""

    def between(end: float) -> float:
        return min(max((done - PLAIN_UNTIL) / (end - PLAIN_UNTIL), 0.0), 1.0)

    return 1.0 + (R_MAX - 1.0) * between(R_UNTIL), D_MAX * between(D_UNTIL)


class StandardizedConv2d(nn.Conv2d):
    """A convolution with weight standardization (Qiao et al. 2019): every filter has mean 0 and deviation 1."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with its standardized weight."""
        std, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        output: Tensor = self._conv_forward(input, (self.weight - mean) / (std + 1e-5), self.bias)
        return output
