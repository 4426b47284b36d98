"""The moment table of a small network, computed from its weights, beside a Monte Carlo check."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp


class Net(nn.Module):
    """A small convolutional network with the paper's activation, max(0, x) + 0.03 x, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 5, stride=2)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.pool = nn.MaxPool2d(2)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.conv2(self.activation(self.conv1(x)))))
        x = self.activation(self.conv3(x)).mean((2, 3))
        return self.head(x).log_softmax(-1)

    @staticmethod
    def activation(x: Tensor) -> Tensor:
        return F.relu(x) + 0.03 * x


def measured(model: nn.Module, mean: Tensor, std: Tensor, count: int) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of every layer over Gaussian images, averaged over its units."""
    kept: dict[str, Tensor] = {}
    for path, module in model.named_children():
        module.register_forward_hook(lambda _m, _i, out, path=path: kept.__setitem__(path, out))
    model(mean + std * torch.randn(count, 3, 32, 32))
    flat = {path: out.transpose(0, 1).flatten(1) for path, out in kept.items()}
    return {path: (out.mean(1).mean().item(), out.std(1).mean().item()) for path, out in flat.items()}


@torch.no_grad()
def main() -> None:
    """Print both tables."""
    torch.manual_seed(0)
    model = Net().eval()
    mean = torch.tensor([0.49, 0.48, 0.45]).view(1, 3, 1, 1)
    std = torch.tensor([0.25, 0.24, 0.26]).view(1, 3, 1, 1)
    program = vp.capture(model, torch.zeros(1, 3, 32, 32))
    start = time.perf_counter()
    result = vp.propagate(program, vp.Moments(mean, std.square()))
    took = time.perf_counter() - start
    print(result.table())
    print(f"\nComputed from the weights and two numbers per colour in {1e3 * took:.0f} ms.")
    print("The same from 4096 random images:\n")
    print(f"{'layer':<8} {'mean':>9} {'measured':>9} {'std':>9} {'measured':>9}")
    for path, (seen_mean, seen_std) in measured(model, mean, std, 4096).items():
        own = result[path]
        print(f"{path:<8} {own.mean.mean():9.4f} {seen_mean:9.4f} {own.std.mean():9.4f} {seen_std:9.4f}")


if __name__ == "__main__":
    main()
