"""What else keeps a convolutional network trainable, each as published: normalizations, starts, bounds of gradients.

Batch renormalization, weight standardization (plain and scaled), filter response normalization, EvoNorm-S0, blocks of
normalizer-free networks and of Fixup, the data-dependent start of weight normalization, adaptive gradient clipping.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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


class ScaledStandardizedConv2d(nn.Conv2d):
    """Scaled weight standardization (Brock et al. 2021): ``gain * gamma * (W - mean) / sqrt(N * var)``.

    N is the number of weights of an output, `gamma` what keeps the variance through the activation before it:
    ``sqrt(2 / (1 - 1 / pi))`` for ReLU, 1 where there is none.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, gamma: float) -> None:
        super().__init__(inputs, outputs, size, stride, size // 2)
        self.gain, self.gamma = nn.Parameter(torch.ones(outputs)), gamma
        nn.init.normal_(self.weight, std=(inputs * size**2) ** -0.5)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with its standardized, scaled weight."""
        var, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, unbiased=False)
        count = self.weight[0].numel()
        scale = self.gamma * self.gain[:, None, None, None] * torch.rsqrt((var * count).clamp(min=1e-4))
        output: Tensor = self._conv_forward(input, (self.weight - mean) * scale, self.bias)
        return output


RELU_GAMMA = math.sqrt(2 / (1 - 1 / math.pi))


class NormalizerFreeBlock(nn.Module):
    """``x + alpha * skip * branch(x / beta)`` (Brock et al. 2021), beta the deviation that x has by then.

    `skip` is SkipInit's scalar, which starts at zero. A block that changes the shape takes its shortcut from the scaled
    and activated input, after which the variance is one again.
    """

    def __init__(self, before: int, width: int, stride: int, beta: float, alpha: float = 0.2) -> None:
        super().__init__()
        self.moved = stride != 1 or before != width
        self.first = ScaledStandardizedConv2d(before, width, 3, stride, RELU_GAMMA)
        self.second = ScaledStandardizedConv2d(width, width, 3, 1, RELU_GAMMA)
        self.shortcut = ScaledStandardizedConv2d(before, width, 1, stride, RELU_GAMMA) if self.moved else nn.Identity()
        self.skip, self.alpha, self.beta = nn.Parameter(torch.zeros(1)), alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        """The sum of shortcut and branch."""
        active = torch.relu(x / self.beta)
        shortcut = self.shortcut(active if self.moved else x)
        result: Tensor = shortcut + self.second(torch.relu(self.first(active))) * (self.skip * self.alpha).to(x.dtype)
        return result


def normalizer_free(blocks: Sequence[int], width: int, classes: int, alpha: float = 0.2) -> nn.Sequential:
    """A normalizer-free ResNet of basic blocks for images of 32 x 32."""
    layers: list[nn.Module] = [ScaledStandardizedConv2d(3, width, 3, 1, 1.0)]
    before, variance = width, 1.0
    for stage, count in enumerate(blocks):
        for n in range(count):
            after = width << stage
            block = NormalizerFreeBlock(before, after, 2 if stage and not n else 1, variance**0.5, alpha)
            variance = (1.0 if block.moved else variance) + alpha**2
            layers.append(block)
            before = after
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


class Scalar(nn.Module):
    """``x + value`` or ``x * value``; learns a tenth as fast as other parameters, as Fixup's scalars do.

    The parameter is kept as ``value * sqrt(10)``: the step of its value is a tenth of SGD's.
    """

    SLOWER = 10**-0.5

    def __init__(self, multiplies: bool = False) -> None:
        super().__init__()
        self.multiplies = multiplies
        self.value = nn.Parameter(torch.full((1,), float(multiplies) / self.SLOWER))

    def forward(self, x: Tensor) -> Tensor:
        """The sum or the product."""
        value = (self.value * self.SLOWER).to(x.dtype)
        return x * value if self.multiplies else x + value


class FixupBlock(nn.Module):
    """A basic block of Fixup (Zhang et al. 2019): scalar biases before convolutions and activations, one multiplier.

    The first convolution starts with He's deviation times ``blocks ** -0.5``, the second at zero.
    """

    def __init__(self, before: int, width: int, stride: int, blocks: int) -> None:
        super().__init__()
        convs = [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.Conv2d(width, width, 3, 1, 1, bias=False)]
        nn.init.kaiming_normal_(convs[0].weight, mode="fan_out", nonlinearity="relu")
        with torch.no_grad():
            convs[0].weight *= blocks**-0.5
        nn.init.zeros_(convs[1].weight)
        self.first = Scalar()
        inner = [convs[0], Scalar(), nn.ReLU(), Scalar(), convs[1], Scalar(multiplies=True), Scalar()]
        self.branch = nn.Sequential(*inner)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False)
            nn.init.kaiming_normal_(self.shortcut.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The activated sum of shortcut and branch."""
        shifted = self.first(x)
        skipped = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(shifted)
        return torch.relu(skipped + self.branch(shifted))


def fixup(blocks: Sequence[int], width: int, classes: int) -> nn.Sequential:
    """A ResNet of Fixup's blocks for images of 32 x 32; the last layer starts at zero."""
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    layers: list[nn.Module] = [stem, Scalar(), nn.ReLU()]
    before = width
    for stage, count in enumerate(blocks):
        for n in range(count):
            layers.append(FixupBlock(before, width << stage, 2 if stage and not n else 1, sum(blocks)))
            before = width << stage
    last = nn.Linear(before, classes)
    nn.init.zeros_(last.weight), nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), Scalar(), last)


class FilterResponseNorm2d(nn.Module):
    """Filter response normalization (Singh, Krishnan 2020): ``x / sqrt(mean(x ** 2) + eps) * weight + bias``.

    The mean is over the positions of a channel of one image. `ThresholdedUnit` is the activation that goes with it.
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Computed in float32 for halves."""
        scale = torch.rsqrt(x.to(self.weight.dtype).square().mean((2, 3), keepdim=True) + self.eps)
        return (x * scale * self.weight[:, None, None] + self.bias[:, None, None]).to(x.dtype)


class ThresholdedUnit(nn.Module):
    """``max(x, threshold)`` with a learned threshold for every channel, zero at first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """The larger of input and threshold."""
        return torch.maximum(x, self.threshold[:, None, None].to(x.dtype))


class EvoNormS0(nn.Module):
    """EvoNorm-S0 (Liu et al. 2020), normalization and activation: ``x * sigmoid(v * x) / std * weight + bias``.

    The standard deviation is that of a group of channels of one image.
    """

    def __init__(self, channels: int, groups: int = 32, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.v = nn.Parameter(torch.ones(channels))
        self.groups, self.eps = min(groups, channels), eps

    def forward(self, x: Tensor) -> Tensor:
        """Computed in float32 for halves."""
        wide = x.to(self.weight.dtype)
        grouped = wide.unflatten(1, (self.groups, -1))
        scale = torch.rsqrt(grouped.var((2, 3, 4), keepdim=True, unbiased=False) + self.eps)
        scale = scale.expand(-1, -1, grouped.shape[2], -1, -1).flatten(1, 2)
        weight, bias, v = (vector[:, None, None] for vector in (self.weight, self.bias, self.v))
        return (wide * torch.sigmoid(v * wide) * scale * weight + bias).to(x.dtype)


class Affine2d(nn.Module):
    """``x * weight + bias`` by channel: what EvoNorm puts where batch norm has no activation behind it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Scaled and shifted."""
        return x * self.weight[:, None, None].to(x.dtype) + self.bias[:, None, None].to(x.dtype)


@torch.no_grad()
def start_weight_norm_(model: nn.Module, x: Tensor) -> None:
    """Give every layer of weight norm outputs of mean 0 and deviation 1 on this batch (Salimans, Kingma 2016).

    Layer by layer in the order in which they are called: ``g / std`` and ``-mean / std``, biases zero before. A layer
    without weight norm, such as the last, is left alone.
    """

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        bias, lengths = layer.get_parameter("bias"), layer.get_parameter("parametrizations.weight.original0")
        output = output - bias[:, None, None]
        std, mean = torch.std_mean(output, (0, 2, 3), unbiased=False)
        std = std.clamp(min=1e-5)
        lengths.div_(std.view_as(lengths))
        bias.copy_(-mean / std)
        return (output - mean[:, None, None]) / std[:, None, None]

    layers = [module for module in model.modules() if hasattr(module, "parametrizations")]
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()


def unit_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms of the rows of every matrix or kernel, of a vector as a whole, to be multiplied with them."""
    vectors = [tensor for tensor in tensors if tensor.ndim <= 1]
    norms = iter(torch._foreach_norm(vectors) if vectors else ())
    return [
        torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)
        if tensor.ndim > 1
        else next(norms)
        for tensor in tensors
    ]


def clip_adaptively_(parameters: list[Tensor], gradients: list[Tensor], bound: Tensor | float) -> None:
    """Adaptive gradient clipping (Brock et al. 2021): no unit's gradient is longer than `bound` times the unit."""
    longest = torch._foreach_mul(torch._foreach_clamp_min(unit_norms(parameters), 1e-3), bound)
    factors = torch._foreach_div(longest, torch._foreach_clamp_min(unit_norms(gradients), 1e-6))
    torch._foreach_mul_(gradients, torch._foreach_clamp_max(factors, 1.0))
