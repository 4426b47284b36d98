"""How true and how expensive `vp.predict` is on trained networks, beside the diagonal rules and beside draws.

    python -m benchmarks.error_bars run RECORDS [--data DIR] [--device cuda] [--cases a,b] [--tiny]
    python -m benchmarks.error_bars show RECORDS    # the tables, as Markdown

Every case trains a network, predicts some test samples, and compares with 4,000 real draws: predicted over true std
over samples and outputs. RECORDS is a file of JSON lines, one a case; cases that it has are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab.data.datasets import load
from varprop_lab.environment import versions

RESOLVED = 4000  # draws of the truth: no smaller error of a standard deviation can be told


class Block(nn.Module):
    """Two convolutions with batch norm, dropout between them, and a skip."""

    def __init__(self, inputs: int, outputs: int, stride: int, p: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.dropout = nn.Dropout(p)
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.dropout(F.relu(self.first(x)))) + self.skip(x))


def resnet18(width: int, p: float) -> nn.Module:
    widths = [width, 2 * width, 4 * width, 8 * width]
    blocks = [
        Block(before if not index else after, after, 2 if not index and after > width else 1, p)
        for before, after in zip([width, *widths], widths, strict=False)
        for index in range(2)
    ]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def mlp(depth: int, p: float, inputs: int = 784, outputs: int = 10, width: int = 256) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for index in range(depth):
        layers += [nn.Linear(width if index else inputs, width), nn.ReLU(), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Transformer(nn.Module):
    """A small ViT on patches of 4 x 4 pixels."""

    def __init__(self, width: int = 128, depth: int = 4, p: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.attention = nn.ModuleList(Attention(width, p) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.positions
        for block in self.attention:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Attention(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(p), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class Recurrent(nn.Module):
    """The rows of an image through two LSTMs with dropout between and behind them."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(28, 128, batch_first=True), nn.LSTM(128, 128, batch_first=True)
        self.dropout, self.head = nn.Dropout(p), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.dropout(self.first(x.squeeze(1))[0]))[0]
        return self.head(self.dropout(x[:, -1]))


class UNet(nn.Module):
    """Two levels, dropout at the lower one; removes noise from digits."""

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU())
        lower = [nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Dropout(p), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
        self.low = nn.Sequential(*lower)
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.out = nn.Sequential(nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        return self.out(torch.cat([high, self.up(self.low(high))], 1))


@dataclass(frozen=True)
class Case:
    """A network, its data, and what is random when it predicts."""

    model: Callable[[], nn.Module]
    data: str
    epochs: float = 3
    input_noise: float | None = None  # of a pixel's std
    laplace: bool = False
    outputs: Any = None
    draws: int = 0


CASES = {
    "MLP 3 x 256, dropout .5": Case(lambda: mlp(3, 0.5), "mnist"),
    "MLP 5 x 256, dropout .2": Case(lambda: mlp(5, 0.2), "mnist"),
    "ResNet-18, dropout .1": Case(lambda: resnet18(64, 0.1), "cifar10", 6),
    "ResNet-18, width 32, dropout .3": Case(lambda: resnet18(32, 0.3), "cifar10", 6),
    "ViT, dropout .1": Case(Transformer, "cifar10", 6),
    "LSTM, dropout .3": Case(Recurrent, "mnist"),
    "U-Net, dropout .2, ten pixels": Case(UNet, "denoising", 1, outputs=list(range(300, 310))),
    "regression, dropout .1": Case(lambda: mlp(3, 0.1, 10, 1, 64), "diabetes", 60),
    "MLP 3 x 256, Laplace": Case(lambda: mlp(3, 0.0), "mnist", laplace=True),
    "ResNet-18, width 32, Laplace": Case(lambda: resnet18(32, 0.0), "cifar10", 6, laplace=True),
    "MLP 3 x 256, input noise .1": Case(lambda: mlp(3, 0.0), "mnist", input_noise=0.1),
    "MLP 3 x 256, input noise 1": Case(lambda: mlp(3, 0.0), "mnist", input_noise=1.0),
    "ResNet-18, input noise .1": Case(lambda: resnet18(64, 0.0), "cifar10", 6, input_noise=0.1),
    "ResNet-18, input noise .1, 64 draws": Case(lambda: resnet18(64, 0.0), "cifar10", 6, input_noise=0.1, draws=64),
}


@dataclass
class Task:
    train: Tensor
    targets: Tensor
    test: Tensor
    test_targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def task_of(data: str, root: str | None, device: str, tiny: bool) -> Task:
    """Standardized data on the device."""
    if data == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = (torch.tensor(values, dtype=torch.float32, device=device) for values in load_diabetes(return_X_y=True))
        x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, y = x[order], y[order]
        return Task(x[:353], y[:353], x[353:], y[353:], F.mse_loss)
    name = "digits" if tiny else ("mnist" if data == "denoising" else data)
    images = load(name, root, device)
    train, test = (standardized(part, data) for part in (images.train_x, images.test_x))
    if data == "denoising":
        noisy = [part + torch.randn_like(part) for part in (train, test)]
        return Task(noisy[0], train, noisy[1], test, F.mse_loss)
    return Task(train, images.train_y, test, images.test_y, F.cross_entropy)


def standardized(images: Tensor, data: str) -> Tensor:
    """Images of float, one mean and std; those of digits blown up to what the network takes in a trial run."""
    x = images.float()
    x = (x - x.mean()) / x.std()
    if x.shape[-1] == 8:
        side, channels = (32, 3) if data == "cifar10" else (28, 1)
        x = F.interpolate(x.view(-1, 1, 8, 8), (side, side)).expand(-1, channels, -1, -1).contiguous()
    return x


def train(model: nn.Module, task: Task, epochs: float, batch: int = 256) -> None:
    """AdamW with a one-cycle rate."""
    steps = max(1, int(epochs * len(task.train) / batch))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        index = torch.randint(len(task.train), (batch,), device=task.train.device)
        with torch.autocast(task.train.device.type, torch.bfloat16, enabled=task.train.is_cuda):
            loss = task.loss(model(task.train[index]), task.targets[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def laplace_variances(model: nn.Module, task: Task, samples: int = 2000, prior: float = 100.0) -> dict[str, Tensor]:
    """Diagonal Laplace: 1 / (N E[g²] + prior) with gradients of sampled labels, one sample at a time."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if name.endswith("weight") and p.ndim > 1}
    rest = {name: p.detach() for name, p in model.named_parameters() if name not in parameters}
    buffers = dict(model.named_buffers())

    def loss(chosen: dict[str, Tensor], x: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, {**chosen, **rest, **buffers}, (x.unsqueeze(0),))
        label = torch.multinomial(logits.softmax(-1).detach(), 1).squeeze(1)
        return F.cross_entropy(logits, label)

    model.eval()
    squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
    gradient = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="different")
    for part in task.train[:samples].split(100):
        for name, value in gradient(parameters, part).items():
            squares[name] += value.detach().square().sum(0)
    scale = len(task.train) / min(samples, len(task.train))
    return {name: 1 / (scale * value + prior) for name, value in squares.items()}


@torch.no_grad()
def draws_of(model: nn.Module, x: Tensor, case: Case, variances: dict[str, Tensor], noise: float, count: int) -> Tensor:
    """Real draws, (count, samples, outputs)."""
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout))
    parameters, found = dict(model.named_parameters()), []
    for _ in range(count):
        drawn = {name: parameters[name] + var.sqrt() * torch.randn_like(var) for name, var in variances.items()}
        given = x + noise * torch.randn_like(x) if noise else x
        out = torch.func.functional_call(model, drawn, (given,)) if drawn else model(given)
        out = out.flatten(1)
        found.append(out if case.outputs is None else out[:, case.outputs])
    return torch.stack(found)


def quantiles(ratio: Tensor) -> list[float]:
    """The median, the 10 % and the 90 % quantile."""
    return ratio.flatten().float().quantile(torch.tensor([0.5, 0.1, 0.9], device=ratio.device)).tolist()


def timed(function: Callable[[], Any], repeat: int = 3) -> tuple[float, Any]:
    """Seconds of the fastest of some runs, and the result of the last."""
    best = math.inf
    for _ in range(repeat):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, result


def measure(name: str, case: Case, root: str | None, device: str, tiny: bool) -> dict[str, Any]:
    """One record."""
    torch.manual_seed(0)
    task = task_of(case.data, root, device, tiny)
    model = case.model().to(device)
    train(model, task, 0.2 if tiny else case.epochs)
    samples, truth_draws = (8, 100) if tiny else (128, RESOLVED)
    x = task.test[:samples].contiguous()
    variances = laplace_variances(model, task, 100 if tiny else 2000) if case.laplace else {}
    noise = case.input_noise or 0.0
    settings: dict[str, Any] = {"outputs": case.outputs}
    if variances:
        settings["parameter_var"] = variances
    if noise:
        settings["input_var"] = noise**2
    truth = draws_of(model, x, case, variances, noise, truth_draws)
    std, fresh = truth.std(0), draws_of(model, x, case, variances, noise, 32)
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout) and module.p > 0)
    program = vp.capture(model, x)
    seconds, found = timed(lambda: vp.predict(program, x, draws=case.draws, **settings))
    forward, _ = timed(lambda: draws_of(model, x, case, {}, 0.0, 1), 10)
    ratio = found.std / std
    error = ((ratio - 1).square().mean() - 0.5 / truth_draws).clamp_min(1e-6)  # the truth's own error taken out
    return {
        "case": name, "adjoint": quantiles(ratio), "diagonal": quantiles(found.diagonal_var.sqrt() / std),
        "draws 4": quantiles(fresh[:4].std(0) / std), "draws 32": quantiles(fresh.std(0) / std),
        "mean off": float(((found.mean - truth.mean(0)) / std).abs().median()),
        "within 10 %": float(((ratio - 1).abs() < 0.1).float().mean()),
        "worth draws": float(0.5 / error), "reliable": float(found.reliable.float().mean()),
        "outputs": found.mean.shape[1], "seconds": seconds, "forward seconds": forward,
        "linearized": sorted(set(found.linearized.values())), "draws": case.draws,
        "accuracy": accuracy(model, task), "device": device, "versions": versions(),
    }  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float | None:
    """On the test samples, in evaluation mode; None where there are no classes."""
    if task.loss is not F.cross_entropy:
        return None
    model.eval()
    parts = zip(task.test.split(500), task.test_targets.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(task.test)


def show(records: list[dict[str, Any]]) -> str:
    """Two tables: how true, and what it costs."""

    def cell(values: list[float]) -> str:
        median, low, high = values
        return f"{median:.2f} ({low:.2f}, {high:.2f})"

    truth = Table(
        "",
        ["network, noise", "diagonal rules", "vp.predict", "4 draws", "32 draws", "mean off, std", "reliable"],
        [
            [r["case"], *(cell(r[key]) for key in ("diagonal", "adjoint", "draws 4", "draws 32")),
             f"{r['mean off']:.2f}", f"{100 * r['reliable']:.0f} %"]
            for r in records
        ],
        left=["network, noise"],
    )  # fmt: skip
    cost = Table(
        "",
        ["network, noise", "outputs", "forward ms", "predict ms", "forward passes", "worth draws"],
        [
            [r["case"], str(r["outputs"]), f"{1e3 * r['forward seconds']:.2f}", f"{1e3 * r['seconds']:.1f}",
             f"{r['seconds'] / r['forward seconds']:.0f}",
             f"{r['worth draws']:.0f}" if r["worth draws"] < RESOLVED else f"> {RESOLVED}"]
            for r in records
        ],
        left=["network, noise"],
    )  # fmt: skip
    return truth.markdown() + "\n\n" + cost.markdown()


def main() -> None:
    """Run cases, or show what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "show"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default="")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--tiny", action="store_true", help="a trial on scikit-learn's digits")
    options = parser.parse_args()
    lines = options.records.read_text().splitlines() if options.records.exists() else []
    records = [json.loads(line) for line in lines]
    if options.action == "show":
        print(show(records))
        return
    start = time.monotonic()
    for name, case in CASES.items():
        if any(r["case"] == name for r in records) or not any(part in name for part in options.cases.split(",")):
            continue
        if time.monotonic() - start > options.max_seconds:
            break
        record = measure(name, case, options.data, options.device, options.tiny)
        print(name, record["adjoint"], f"{time.monotonic() - start:.0f} s", flush=True)
        with options.records.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
