"""Train a ResNet on CIFAR-10 with any of several normalizations, everything else equal.

    python examples/train_cifar.py --norm analytic --data DIR                # judged on 5000 of the training images
    python examples/train_cifar.py --norm analytic --data DIR --held-out 0   # all training images, then the test images

SGD with Nesterov momentum, one-cycle rate, weight decay on matrices, random crops and flips; bfloat16 on a GPU.
The same seed gives every method the same images in the same order. Choose settings on the held-out images; with
`--held-out 0` the test images are looked at once, at the end. A checkpoint is written after every epoch (`--checkpoint
FILE`) and gone on from if it is there. `--compile` and `--graph` (CUDA graphs) make it faster. The last line is the
result as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from normalizations import (
    Affine2d,
    BatchRenorm2d,
    EvoNormS0,
    FilterResponseNorm2d,
    StandardizedConv2d,
    ThresholdedUnit,
    fixup,
    normalizer_free,
    renorm_limits,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import varprop as vp
from varprop_lab.datasets import load
from varprop_lab.training import captured_step

BLOCKS = {  # in every stage; two layers a block, one before and one behind them
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
    "resnet102": (3, 8, 36, 3),
    "plain50": (3, 4, 14, 3),
    "tiny": (1, 1),
}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "analytic": nn.BatchNorm2d,  # whose place it takes
    "renorm": BatchRenorm2d,
    "group": lambda channels: nn.GroupNorm(min(32, channels // 2), channels),
    "group16": lambda channels: nn.GroupNorm(max(1, channels // 16), channels),  # 16 channels in each
    "group-ws": lambda channels: nn.GroupNorm(min(32, channels // 2), channels),  # and weight standardization
    "group16-ws": lambda channels: nn.GroupNorm(max(1, channels // 16), channels),
    "layer": lambda channels: nn.GroupNorm(1, channels),
    "weight": lambda channels: nn.Identity(),  # is inside the convolutions
    "none": lambda channels: nn.Identity(),
    "frn": FilterResponseNorm2d,
    "evonorm": Affine2d,  # it normalizes where it activates
}
ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {"frn": ThresholdedUnit, "evonorm": EvoNormS0}  # else ReLU
ARCHITECTURES = {"nf": normalizer_free, "fixup": fixup}  # with blocks of their own
CLIP = {"analytic": 2.0, "weight": 2.0, "none": 2.0}  # of the gradient's norm with batches of 256
AUGMENTED_TOGETHER = 4096  # images


class Block(nn.Module):
    """Two convolutions, each with its normalization, and a skip if there are any."""

    def __init__(self, before: int, width: int, stride: int, layer: Any, active: Any, skips: bool) -> None:
        super().__init__()
        self.branch = nn.Sequential(*layer(before, width, 3, stride), active(width), *layer(width, width, 3, 1))
        moved = stride != 1 or before != width
        self.shortcut = nn.Sequential(*layer(before, width, 1, stride)) if moved and skips else nn.Identity()
        self.skips = skips
        self.active = active(width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.active(self.branch(x) + self.shortcut(x) if self.skips else self.branch(x))
        return result


def resnet(name: str, norm: str, width: int, classes: int = 10) -> nn.Sequential:
    """The form for images of 32 x 32: a stem of 3 x 3 without pooling."""
    if norm in ARCHITECTURES:
        return ARCHITECTURES[norm](BLOCKS[name], width, classes)

    def layer(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
        kind = StandardizedConv2d if norm.endswith("-ws") else nn.Conv2d
        conv = kind(before, after, size, stride, size // 2, bias=norm in ("weight", "none"))
        return [weight_norm(conv) if norm == "weight" else conv, NORMS[norm](after)]

    def active(channels: int) -> nn.Module:
        return ACTIVATIONS[norm](channels) if norm in ACTIVATIONS else nn.ReLU()

    layers: list[nn.Module] = [*layer(3, width, 3, 1), active(width)]
    before = width
    for stage, count in enumerate(BLOCKS[name]):
        for n in range(count):
            stride = 2 if stage and not n else 1
            layers.append(Block(before, width << stage, stride, layer, active, skips=not name.startswith("plain")))
            before = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def make_model(options: argparse.Namespace, moments: vp.Moments) -> nn.Module:
    torch.manual_seed(options.seed)
    classes = options.classes[1] - options.classes[0] + 1 if options.classes else 10
    model = resnet(options.model, options.norm, options.width, classes)
    return vp.normalize(model, moments, form=options.form) if options.norm == "analytic" else model


def decayed(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices and kernels only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def augmented(images: Tensor, generator: torch.Generator, cutout: int = 0) -> Tensor:
    """Flipped at random, cropped at random after four reflected pixels on each side, a square of so many pixels cut."""
    count, _, height, width = images.shape
    draws = [torch.randint(9, (count,), generator=generator) for _ in range(2)] + [
        torch.randint(2, (count,), generator=generator)
    ]
    down, right, flip = (draw.to(images.device) for draw in draws)
    padded = F.pad(images, (4, 4, 4, 4), mode="reflect")
    rows = down[:, None] + torch.arange(height, device=images.device)
    steps = torch.arange(width, device=images.device)
    columns = right[:, None] + torch.where(flip[:, None] > 0, width - 1 - steps, steps)
    first = torch.arange(count, device=images.device)[:, None, None]
    result = padded.permute(0, 2, 3, 1)[first, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if not cutout:
        return result
    inside = []  # rows and columns of a square around any pixel, as far as it lies in the image
    for size in (height, width):
        centre = torch.randint(size, (count, 1), generator=generator).to(images.device)
        distance = torch.arange(size, device=images.device) - centre
        inside.append((distance >= -(cutout // 2)) & (distance < cutout - cutout // 2))
    return result.masked_fill((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)


def epoch_of(
    images: Tensor, labels: Tensor, size: int, seed: int, epoch: int, cutout: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """All images once, many at a time, in an order that seed and epoch decide; without those that fill no batch."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(len(images), generator=generator).to(images.device)
    for chosen in order[: len(order) // size * size].split(size * max(1, AUGMENTED_TOGETHER // size)):
        many = augmented(images[chosen], generator, cutout).contiguous(memory_format=torch.channels_last)
        yield many, labels[chosen]


def batches(
    images: Tensor, labels: Tensor, size: int, seed: int, epoch: int, cutout: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """The images of an epoch in batches."""
    for many, their in epoch_of(images, labels, size, seed, epoch, cutout):
        yield from zip(many.split(size), their.split(size), strict=True)


class Data(NamedTuple):
    """Standardized images and labels: to train on, and to judge by."""

    train: tuple[Tensor, Tensor]
    judged: tuple[Tensor, Tensor]


def of_classes(images: Tensor, labels: Tensor, classes: list[int] | None) -> tuple[Tensor, Tensor]:
    """Those from the first to the last class only, which are numbered from 0."""
    if classes is None:
        return images, labels
    kept = (labels >= classes[0]) & (labels <= classes[1])
    return images[kept], labels[kept] - classes[0]


def load_data(options: argparse.Namespace, device: torch.device) -> Data:
    data = load("cifar10", options.data, device)
    train_x, test_x = ((x.float() / 255 if x.dtype == torch.uint8 else x) for x in (data.train_x, data.test_x))
    (train_x, train_y), (judged_x, judged_y) = (
        of_classes(*both, options.classes) for both in ((train_x, data.train_y), (test_x, data.test_y))
    )
    if options.held_out:
        judged_x, judged_y = train_x[-options.held_out :], train_y[-options.held_out :]
        train_x, train_y = train_x[: -options.held_out], train_y[: -options.held_out]
    if options.images:
        train_x, train_y = train_x[: options.images], train_y[: options.images]
    mean, std = train_x.mean((0, 2, 3), keepdim=True), train_x.std((0, 2, 3), keepdim=True)
    return Data(((train_x - mean) / std, train_y), ((judged_x - mean) / std, judged_y))


def clip_for(norm: str, batch: int) -> float:
    """Noise falls with the root of the batch; a bound that does not would cut the steps of small ones."""
    return float(f"{CLIP.get(norm, 0.0) * (256 / batch) ** 0.5:.4g}")


class Run:
    """A training run: all that changes in it, and how to go on with it."""

    def __init__(self, options: argparse.Namespace, make: Any = make_model) -> None:
        self.options, self.device = options, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.half = self.device.type == "cuda" and not options.single
        self.clip = clip_for(options.norm, options.batch) if options.clip is None else options.clip
        self.data = load_data(options, self.device)
        self.steps = len(self.data.train[0]) // options.batch
        model = make(options, vp.input_moments(self.data.train[0].cpu()))
        self.model = model.to(self.device, memory_format=torch.channels_last)
        self.renorms = [layer for layer in self.model.modules() if isinstance(layer, BatchRenorm2d)]
        self.optimizer = self.make_optimizer()
        peaks, steps = [group["lr"] for group in self.optimizer.param_groups], self.steps * options.epochs
        self.rate = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, peaks, steps, pct_start=0.25, cycle_momentum=False
        )
        self.history: list[dict[str, float]] = []
        if options.checkpoint and options.checkpoint.exists():
            self.load(options.checkpoint)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.call = torch.compile(self.model) if options.compile else self.model
        self.gradients: Callable[[Tensor, Tensor], Tensor] = self._gradients

    def make_optimizer(self) -> torch.optim.Optimizer:
        """With the peaks of the rates."""
        groups = decayed(self.model, self.options.weight_decay)
        return torch.optim.SGD(groups, self.options.lr, momentum=0.9, nesterov=True)

    def train(self) -> dict[str, Any]:
        """All epochs that are left, and the result."""
        for epoch in range(len(self.history), self.options.epochs):
            start = time.perf_counter()
            loss = self.epoch(epoch)
            self.history.append({"epoch": epoch + 1, "loss": loss, "seconds": round(time.perf_counter() - start, 3)})
            if self.options.held_out:
                self.history[-1]["validation"] = self.accuracy()
            print("  ".join(f"{name} {value:.4g}" for name, value in self.history[-1].items()), flush=True)
            if self.options.checkpoint:
                self.save(self.options.checkpoint)
            if loss != loss:
                break  # nothing comes after NaN
        judged = "held out" if self.options.held_out else "test"
        return {**settings(self.options), "clip": self.clip, judged: self.accuracy(), **self.cost()}

    def cost(self) -> dict[str, Any]:
        """What the epochs took."""
        used = torch.cuda.max_memory_allocated() / 2**20 if self.device.type == "cuda" else None
        return {"steps an epoch": self.steps, "peak MiB": used and round(used), "history": self.history}

    def epoch(self, number: int) -> float:
        """Train on all images once; the mean loss."""
        total = torch.zeros((), device=self.device)
        for x, y in batches(*self.data.train, self.options.batch, self.options.seed, number, self.options.cutout):
            if self.options.graph and self.gradients == self._gradients:
                self.gradients = self._graphed(x, y)
            for layer in self.renorms:
                layer.limits.copy_(
                    torch.tensor(renorm_limits(self.rate.last_epoch / (self.steps * self.options.epochs)))
                )
            total += self.gradients(x, y)
            self.optimizer.step()
            self.rate.step()
        return float(total) / self.steps

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss; its gradients are in the parameters."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            loss = F.cross_entropy(self.call(x), y, label_smoothing=self.options.smoothing)
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return loss.detach()

    def _graphed(self, x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """The same as a CUDA graph, which saves the time of its launches; batch norm's buffers stay as they are."""
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        gradients = captured_step(self._gradients, x, y)
        for buffer, value in kept:
            buffer.copy_(value)
        return gradients

    @torch.no_grad()
    def accuracy(self) -> float:
        """On the images to judge by."""
        self.model.eval()
        right, (images, labels) = torch.zeros((), device=self.device), self.data.judged
        for x, y in zip(images.split(1000), labels.split(1000), strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                right += (self.model(x).argmax(1) == y).sum()
        self.model.train()
        return float(right) / len(images)

    def parts(self) -> dict[str, Any]:
        """What has a state."""
        return {"model": self.model, "optimizer": self.optimizer, "rate": self.rate}

    def save(self, path: Path) -> None:
        """Into a file that is either the old one or the new one, whatever happens."""
        states = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**states, "history": self.history}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Go on from a file."""
        saved = torch.load(path, map_location=self.device, weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])
        self.history = saved["history"]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a result is a result of."""
    names = (
        "model",
        "width",
        "norm",
        "form",
        "seed",
        "epochs",
        "batch",
        "lr",
        "weight_decay",
        "cutout",
        "smoothing",
        "images",
        "classes",
        "compile",
    )
    return {name: getattr(options, name) for name in names}


def parser(norms: Iterable[str] = (*NORMS, *ARCHITECTURES), models: Iterable[str] = BLOCKS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", choices=list(norms), default="analytic")
    parser.add_argument("--form", choices=["paper", "deep"], default="deep", help="of the analytic normalization")
    parser.add_argument("--model", choices=list(models), default="resnet18")
    parser.add_argument("--width", type=int, default=64, help="of the first stage")
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10 (default: where varprop looks for data)")
    parser.add_argument("--images", type=int, default=0, help="train on the first so many only")
    parser.add_argument("--classes", type=int, nargs=2, metavar=("FIRST", "LAST"), help="these classes only")
    parser.add_argument("--held-out", type=int, default=5000, help="training images to judge by; 0: the test images")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2, help="at the peak")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument(
        "--clip",
        type=float,
        help="norm of the gradient; 0 for none (default with analytic, weight and none: 2 sqrt(256 / batch))",
    )
    parser.add_argument("--cutout", type=int, default=0, help="side of a square that is cut out of every image")
    parser.add_argument("--smoothing", type=float, default=0.0, help="of the labels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="float32 throughout")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graph", action="store_true", help="replay a CUDA graph instead of launching every kernel")
    parser.add_argument("--checkpoint", type=Path)
    return parser


if __name__ == "__main__":
    print(json.dumps(Run(parser().parse_args()).train()))
