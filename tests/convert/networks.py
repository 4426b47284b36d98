"""The architectures every conversion has to leave alone, small, in float64, with inputs of non-zero mean."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from tests.models import ResNet, UNet, trained_looking


class Residual(nn.Module):
    """A sum of a branch and a projection of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1, bias=False))
        self.projection = nn.Conv2d(3, 6, 1, bias=False)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x) + self.projection(x)).mean((2, 3)))


class Dense(nn.Module):
    """Every layer reads all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5 + 4 * i, 4) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, torch.tanh(layer(x))], 1)
        return x


class Reused(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(3):
            x = torch.relu(self.again(x)) + x
        return x


class Tied(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Language(nn.Module):
    """An embedding whose weight the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(indices))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))


def conv_net() -> nn.Module:
    front = [nn.Conv2d(3, 6, 3, stride=2), nn.LeakyReLU(0.03), nn.Conv2d(6, 8, 3, bias=False), nn.ReLU(inplace=True)]
    return nn.Sequential(*front, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4))


def with_own_batch_norm() -> nn.Module:
    first = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=1e-3), nn.ReLU()]
    second = [nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return trained_looking(nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)))


def grouped() -> nn.Module:
    depthwise, wide = nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 12, 3, groups=6, bias=False)
    up = nn.ConvTranspose2d(12, 6, 2, 2, groups=3)
    return nn.Sequential(nn.Conv2d(3, 6, 1), depthwise, nn.ReLU(), wide, nn.ReLU(), up, nn.Sigmoid())


def other_ranks() -> nn.Module:
    up = nn.ConvTranspose3d(4, 2, 2, bias=False)
    return nn.Sequential(nn.Conv1d(3, 8, 3), nn.Tanh(), nn.Unflatten(2, (1, 2, 3)), nn.Conv3d(8, 4, 1), nn.ReLU(), up)


def transposed_with_batch_norm() -> nn.Module:
    up, down = nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.Conv2d(3, 4, 3)
    return trained_looking(nn.Sequential(down, nn.ReLU(), up, nn.BatchNorm2d(6), nn.ReLU()))


def positions() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return 0.7 + 1.3 * torch.randn(shape, generator=generator, dtype=torch.float64)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, numbers(16, 5)),
    "conv": (conv_net, numbers(8, 3, 11, 11)),
    "residual": (Residual, numbers(8, 3, 6, 6)),
    "dense": (Dense, numbers(16, 5)),
    "reused": (Reused, numbers(16, 5)),
    "tied": (Tied, numbers(16, 5)),
    "language": (Language, torch.arange(40).reshape(5, 8) * 7 % 11),
    "grouped": (grouped, numbers(6, 3, 7, 7)),
    "other ranks": (other_ranks, numbers(6, 3, 8)),
    "positions": (positions, numbers(4, 7, 5)),
    "unet": (lambda: UNet(4), numbers(4, 3, 8, 8)),
    "own batch norm": (with_own_batch_norm, numbers(6, 3, 9, 9)),
    "transposed with batch norm": (transposed_with_batch_norm, numbers(6, 3, 7, 7)),
    "resnet": (lambda: trained_looking(ResNet(4, levels=2)), numbers(3, 3, 32, 32)),
}
PLAIN = [name for name in NETWORKS if name not in ("own batch norm", "transposed with batch norm", "resnet")]
CALLED_ONCE = [name for name in PLAIN if name != "reused"]


def network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    build, inputs = NETWORKS[name]
    return build().double().eval(), inputs.clone()


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-300))


def same_state(a: nn.Module, b: nn.Module, tolerance: float = 1e-12) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(
        close(ours[key].double(), theirs[key].double(), tolerance)
        or bool((ours[key] - theirs[key]).abs().max() < 1e-14)
        for key in ours
    )


def identical(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.modules.conv._ConvNd))}


def has_batch_norm(module: nn.Module) -> bool:
    """True of a layer in the form "batch": a module that holds the layer and the norm behind it."""
    return [name for name, _ in module.named_children()] == ["layer", "norm"]


def has_weight_norm(module: nn.Module) -> bool:
    """True of a layer in the form "weight": torch's weight normalization, and nothing else, makes its weight."""
    steps = module.parametrizations.weight if is_parametrized(module, "weight") else ()
    return [type(step).__name__ for step in steps] == ["_WeightNorm"]
