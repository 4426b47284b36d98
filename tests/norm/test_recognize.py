"""Which kernel computes a function between layers: the one its rule names, or one that a trial finds."""

import torch
import torch.nn.functional as F
from torch import nn

import varprop as vp

KERNELS = {
    ("sigmoid",): torch.special.expit,
    ("gelu_tanh",): lambda x: F.gelu(x, approximate="tanh"),
    ("softplus", 2.0): lambda x: F.softplus(x, beta=2, threshold=30),
    None: lambda x: F.softplus(x, threshold=5),  # it is linear from 5 on, and the kernel is not
    ("elu", 0.5, 1.0, 1.0): lambda x: F.elu(x, 0.5),
    ("elu", 0.5, 1.0, 2.0): lambda x: F.celu(x, 0.5),
    ("clamp", 0.0, 6.0): F.relu6,
    ("clamp", -1.0, 2.0): lambda x: x.clamp(min=-1, max=2),
    ("two_slopes", 1.0, 0.0): lambda x: x.clamp(min=0),
    ("two_slopes", 1.5, 0.5): lambda x: F.relu(x) + 0.5 * x,
    ("affine", 2.0, 1.0): lambda x: 2 * x + 1,
    ("affine", 3.0, 0.0): lambda x: x * 3.0,  # not the kernels of sums and products of two values
    ("affine", 1.0, 2.0): lambda x: x + 2.0,
    ("affine", 1.0, 0.0): lambda x: F.dropout(x, 0.0, training=True),
    ("dropout", 0.25): lambda x: F.dropout(x, 0.25, training=True),
    ("add", -3.0): lambda x: torch.sub(x[:, :2], x[:, 2:], alpha=3),
    ("mul",): lambda x: x[:, :2] * x[:, 2:],
}


class Branches(nn.Module):
    """Every function between two layers of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(3, 4) for _ in KERNELS)
        self.last = nn.ModuleList(nn.LazyLinear(1) for _ in KERNELS)

    def forward(self, x):
        parts = zip(self.first, KERNELS.values(), self.last, strict=True)
        return torch.cat([last(function(first(x))) for first, function, last in parts], 1)


def test_every_function_has_its_kernel():
    torch.manual_seed(0)
    model = Branches()
    model(torch.zeros(1, 3))  # the last layers learn how many inputs they have
    normalized = vp.normalize(model, vp.Moments(torch.zeros(1, 3), torch.ones(1, 3)), form="paper")
    network, _ = normalized.first[0].networks[True]
    found = [step.function.kernel for step in network.layout.channels.steps]
    assert sorted(found, key=repr) == sorted(KERNELS, key=repr)
