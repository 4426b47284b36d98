"""How true and how expensive `vp.predict` is on trained networks, beside the diagonal rules and beside draws.

    python -m benchmarks.error_bars run RECORDS [--data DIR] [--device cuda] [--cases "a|b"] [--draws N] [--tiny]
    python -m benchmarks.error_bars cost RECORDS [--device cuda] [--compiled]  # in forward passes, for 1 to 100 outputs
    python -m benchmarks.error_bars quality RECORDS [--data DIR]    # accuracy, NLL, ECE, ... beside MC dropout
    python -m benchmarks.error_bars show RECORDS       # the tables, as Markdown
    python -m benchmarks.error_bars pictures FOLDER [--data DIR]    # of docs/predict.md

Every case of `run` trains a network, predicts some test samples, and compares with 4,000 real draws: predicted over
true std over samples and outputs. RECORDS is a file of JSON lines, one a case; cases that it has are not made again.
Parts of names given by `--cases` choose cases, and their order; after `--max-seconds` no further case is begun.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.predict import cuda_replay
from varprop.text_table import Table
from varprop_lab.datasets import load
from varprop_lab.environment import git_state, hardware, versions

RESOLVED = 4000  # draws of the truth: no smaller error of a standard deviation can be told
AT_ONCE = 2048  # samples in a batch of draws on CUDA


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


def resnet18(width: int, p: float, outputs: int = 10) -> nn.Module:
    widths = [width, 2 * width, 4 * width, 8 * width]
    blocks = [
        Block(before if not index else after, after, 2 if not index and after > width else 1, p)
        for before, after in zip([width, *widths], widths, strict=False)
        for index in range(2)
    ]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, outputs))


def mlp(depth: int, p: float, inputs: int = 784, outputs: int = 10, width: int = 256) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for index in range(depth):
        layers += [nn.Linear(width if index else inputs, width), nn.ReLU(), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def cnn(outputs: int = 10) -> nn.Module:
    """Two convolutions with maxima over windows, for digits."""
    first = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(800, outputs))


class Transformer(nn.Module):
    """A small ViT on patches of 4 x 4 pixels."""

    def __init__(self, width: int = 128, depth: int = 4, p: float = 0.1, outputs: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.attention = nn.ModuleList(Attention(width, p) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

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

    def __init__(self, p: float = 0.3, outputs: int = 10) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(28, 128, batch_first=True), nn.LSTM(128, 128, batch_first=True)
        self.dropout, self.head = nn.Dropout(p), nn.Linear(128, outputs)

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
    draws: tuple[int, ...] = ()  # with how many real draws to predict as well
    samples: int = 128


CASES = {
    "MLP 3 x 256, dropout .5": Case(lambda: mlp(3, 0.5), "mnist"),
    "MLP 5 x 256, dropout .2": Case(lambda: mlp(5, 0.2), "mnist"),
    "ResNet-18, dropout .1": Case(lambda: resnet18(64, 0.1), "cifar10", 6),
    "ResNet-18, width 32, dropout .3": Case(lambda: resnet18(32, 0.3), "cifar10", 6),
    "ViT, dropout .1": Case(Transformer, "cifar10", 6),
    "LSTM, dropout .3": Case(Recurrent, "mnist", 0.3, samples=32),
    "U-Net, dropout .2, ten pixels": Case(UNet, "denoising", 1, outputs=list(range(300, 310))),
    "regression, dropout .1": Case(lambda: mlp(3, 0.1, 10, 1, 64), "diabetes", 60),
    "MLP 3 x 256, Laplace": Case(lambda: mlp(3, 0.0), "mnist", laplace=True),
    "ResNet-18, width 32, Laplace": Case(
        lambda: resnet18(32, 0.0), "cifar10", 2.05, laplace=True, draws=(16, 64), samples=16
    ),
    "MLP 3 x 256, input noise .1": Case(lambda: mlp(3, 0.0), "mnist", input_noise=0.1),
    "MLP 3 x 256, input noise 1": Case(lambda: mlp(3, 0.0), "mnist", input_noise=1.0),
    "ResNet-18, input noise .1": Case(lambda: resnet18(64, 0.0), "cifar10", 6, input_noise=0.1, draws=(16, 64)),
    "ResNet-18, input noise .3": Case(lambda: resnet18(64, 0.0), "cifar10", 6, input_noise=0.3, draws=(16, 64)),
    "ResNet-18, width 8, Laplace": Case(
        lambda: resnet18(8, 0.0), "cifar10", 2.05, laplace=True, draws=(16, 64), samples=16
    ),
    "ResNet-18, width 8, input noise .1": Case(
        lambda: resnet18(8, 0.0), "cifar10", 2.05, input_noise=0.1, draws=(16, 64), samples=16
    ),
    "ResNet-18, width 8, input noise .3": Case(
        lambda: resnet18(8, 0.0), "cifar10", 2.05, input_noise=0.3, draws=(16, 64), samples=16
    ),
    "CNN, input noise .1": Case(cnn, "mnist", 1, input_noise=0.1, draws=(16, 64), samples=32),
    "CNN, input noise .3": Case(cnn, "mnist", 1, input_noise=0.3, draws=(16, 64), samples=32),
    "CNN, input noise 1": Case(cnn, "mnist", 1, input_noise=1.0, draws=(16, 64), samples=32),
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


def train(model: nn.Module, task: Task, epochs: float, tiny: bool = False) -> None:
    """AdamW with a one-cycle rate, on CUDA in bfloat16 with channels last."""
    batch, steps = (16, 2) if tiny else (256, max(1, int(epochs * len(task.train) / 256)))
    if task.train.is_cuda:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05, fused=task.train.is_cuda or None)
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
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


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
    parameters, outputs = dict(model.named_parameters()), []
    together = max(1, AT_ONCE // len(x)) if x.is_cuda and not variances else 1
    for first in range(0, count, together):
        times = min(together, count - first)
        drawn = {name: parameters[name] + var.sqrt() * torch.randn_like(var) for name, var in variances.items()}
        noisy = x.repeat(times, *[1] * (x.ndim - 1)) if times > 1 else x
        noisy = noisy + noise * torch.randn_like(noisy) if noise else noisy
        out = torch.func.functional_call(model, drawn, (noisy,)) if drawn else model(noisy)
        out = out.flatten(1).unflatten(0, (times, len(x)))
        outputs.append(out if case.outputs is None else out[..., case.outputs])
    return torch.cat(outputs)


def quantiles(ratio: Tensor) -> list[float]:
    """The median, the 10 % and the 90 % quantile."""
    return ratio.flatten().float().quantile(torch.tensor([0.5, 0.1, 0.9], device=ratio.device)).tolist()


def timed(
    function: Callable[[], Any], repeat: int = 3, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    """Seconds of the fastest of some runs, and the result of the last."""
    best = math.inf
    for _ in range(repeat):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = clock()
        result = function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return best, result


TRAINED: dict[tuple[str, ...], tuple[nn.Module, Task]] = {}  # cases that differ in their noise alone share a network


def trained(case: Case, root: str | None, device: str, tiny: bool) -> tuple[nn.Module, Task]:
    """The network of a case after training, and its data."""
    torch.manual_seed(0)
    model = case.model().to(device)
    key = str(model), case.data, str(case.epochs)
    if key not in TRAINED:
        task = task_of(case.data, root, device, tiny)
        train(model, task, case.epochs, tiny)
        TRAINED[key] = model, task
    return TRAINED[key]


@torch.no_grad()
def published(model: nn.Module, x: Tensor, variances: dict[str, Tensor], noise: float, smooth: bool) -> Tensor | None:
    """Variances of the outputs by diagonal formulas of others; None for models that are no chain of simple layers.

    Assumed density filtering (`smooth`; Gast and Roth, 2018) matches mean and variance of a rectified Gaussian. SUQ (Li
    et al., 2024) takes activations as lines at the mean; dropout, of which it does not speak, adds its own variance.
    """
    if not isinstance(model, nn.Sequential):
        return None
    mean, var = x, torch.full_like(x, noise**2)
    for name, layer in model.named_children():
        if isinstance(layer, nn.Flatten):
            mean, var = mean.flatten(1), var.flatten(1)
        elif isinstance(layer, nn.Linear):
            spread = variances.get(f"{name}.weight")
            through = F.linear(var, layer.weight.square())
            var = through if spread is None else through + F.linear(mean.square() + var, spread)
            mean = layer(mean)
        elif isinstance(layer, nn.Dropout):
            var = (var + layer.p * mean.square()) / (1 - layer.p)
        elif isinstance(layer, nn.ReLU) and smooth:
            std = var.sqrt().clamp_min(1e-20)
            normal = torch.distributions.Normal(0.0, 1.0)
            above, density = normal.cdf(mean / std), normal.log_prob(mean / std).exp()
            after = mean * above + std * density
            second = (mean.square() + var) * above + mean * std * density
            mean, var = after, (second - after.square()).clamp_min(0)
        elif isinstance(layer, nn.ReLU):
            mean, var = mean.relu(), var * (mean > 0)
        else:
            return None
    return var


def curvature(found: vp.Prediction) -> tuple[Tensor, Tensor]:
    """For every sample, the share of the variance that activations add, and that which independent units explain."""
    total = sum(share.variance.sum(1) for share in found.shares)
    linear = ("input", "parameter", "dropout", "dropout of what varies", "draw", "product")
    curved = sum(share.variance.sum(1) for share in found.shares if share.kind not in linear)
    return torch.as_tensor(curved / total), torch.as_tensor(found.diagonal_var.sum(1) / total)


def measure(name: str, case: Case, root: str | None, device: str, tiny: bool, truth_draws: int) -> dict[str, Any]:
    """One record."""
    model, task = trained(case, root, device, tiny)
    samples, truth_draws = (4, 40) if tiny else (case.samples, truth_draws)
    x = task.test[:samples].contiguous()
    variances = laplace_variances(model, task, 100 if tiny else 2000) if case.laplace else {}
    noise = case.input_noise or 0.0
    settings: dict[str, Any] = {"outputs": case.outputs}
    if variances:
        settings["parameter_var"] = variances
    if noise:
        settings["input_var"] = noise**2
    truth = draws_of(model, x, case, variances, noise, truth_draws)
    std, fresh = truth.std(0), draws_of(model, x, case, variances, noise, max(32, *case.draws, 0))
    program = captured(model, x)
    seconds, found = timed(lambda: vp.predict(program, x, **settings), cuda_replay.PATIENCE)
    forward, _ = timed(lambda: draws_of(model, x, case, {}, 0.0, 1), 10)
    ratio = found.std / std
    error = ((ratio - 1).square().mean() - 0.5 / truth_draws).clamp_min(1e-6)  # the truth's own error taken out
    by_sample = found.var.sum(1).sqrt() / truth.var(0).sum(1).sqrt()
    curved, explained = curvature(found)
    by_others = {
        key: None if (var := published(model, x, variances, noise, smooth)) is None else quantiles(var.sqrt() / std)
        for key, smooth in (("ADF", True), ("SUQ", False))
    }
    return {
        "case": name, "adjoint": quantiles(ratio), "diagonal": quantiles(found.diagonal_var.sqrt() / std),
        **by_others, "draws 4": quantiles(fresh[:4].std(0) / std), "draws 32": quantiles(fresh[:32].std(0) / std),
        "mean off": float(((found.mean - truth.mean(0)) / std).abs().median()),
        "within 10 %": float(((ratio - 1).abs() < 0.1).float().mean()),
        "worth draws": float(0.5 / error), "reliable": float(found.reliable.float().mean()),
        "off": float(((by_sample - 1).abs() > 0.1).float().mean()),
        "samples": [[float(f"{v:.3g}") for v in row] for row in zip(curved, explained, by_sample, strict=True)],
        "mended": {n: mended(vp.predict(program, x, draws=n, **settings), fresh[:n], std) for n in case.draws},
        "outputs": found.mean.shape[1], "seconds": seconds, "forward seconds": forward, "truth": truth_draws,
        "linearized": sorted(set(found.linearized.values())),
        "accuracy": None if tiny else accuracy(model, task), **about(device),
    }  # fmt: skip


def about(device: str) -> dict[str, Any]:
    """The device, versions and sources of a record."""
    machine = hardware(torch.device(device))
    name = machine.get("gpu") if device != "cpu" else "cpu"
    return {"device": name, "versions": versions(), "git": git_state()}


def mended(found: vp.Prediction, draws: Tensor, std: Tensor) -> dict[str, Any]:
    """A prediction with draws, beside as many independent draws alone."""
    alone = draws.std(0)
    return {
        "alone": quantiles(alone / std), "combined": quantiles(found.std / std),
        "bias alone": float((alone / std).square().mean()), "bias": float((found.std / std).square().mean()),
    }  # fmt: skip


def captured(model: nn.Module, x: Tensor) -> vp.Program:
    """The model with dropout at work and everything else in evaluation mode."""
    model.eval()
    for module in model.modules():
        module.train(isinstance(module, nn.Dropout) and module.p > 0)
    return vp.capture(model, x)


def cost_networks(tiny: bool, device: str) -> dict[str, tuple[nn.Module, Tensor, dict[str, Any]]]:
    """Networks with 100 outputs, their inputs and what is random; on CUDA also of the sizes that people run there."""
    batch = 4 if tiny else 64
    images, digits = torch.randn(batch, 3, 32, 32), torch.randn(batch, 1, 28, 28)
    weights = mlp(3, 0.0, outputs=100)
    networks: dict[str, tuple[nn.Module, Tensor, dict[str, Any]]] = {
        "MLP 3 x 256, dropout .5": (mlp(3, 0.5, outputs=100), digits, {}),
        "MLP 3 x 256, input noise .1": (mlp(3, 0.0, outputs=100), digits, {"input_var": 0.01}),
        "MLP 3 x 256, weights": (
            weights, digits, {"parameter_var": {n: 1e-4 for n, p in weights.named_parameters() if p.ndim > 1}}
        ),
        "CNN, input noise .1": (cnn(100), digits[: max(1, batch // 8)], {"input_var": 0.01}),
        "LSTM, dropout .3": (Recurrent(outputs=100), digits, {}),
        "ResNet-18, width 16, dropout .1": (resnet18(16, 0.1, 100), images[: max(1, batch // 8)], {}),
    }  # fmt: skip
    if device != "cpu":
        networks |= {
            "ResNet-18, dropout .1": (resnet18(64, 0.1, 100), images, {}),
            "ViT, dropout .1": (Transformer(outputs=100), images, {}),
        }
    return networks


def in_order(names: Iterable[str], pieces: list[str]) -> list[str]:
    """The names that contain one of some pieces, in the order of the pieces."""
    first = {name: next((i for i, piece in enumerate(pieces) if piece in name), None) for name in names}
    return sorted((name for name, i in first.items() if i is not None), key=lambda name: first[name] or 0)


def cost(
    tiny: bool, wanted: list[str], device: str, compiled: bool, recorded: Callable[[str, int], bool]
) -> Iterator[dict[str, Any]]:
    """Time and peak memory of a prediction beside one forward pass, in turns, for 1, 10 and 100 outputs.

    On a CPU by the time of one thread, which what else the machine does changes less. On CUDA predictions are also
    timed without being recorded as graphs, and compared with those.
    """
    torch.manual_seed(0)
    clock = time.process_time if device == "cpu" else time.perf_counter
    torch.set_num_threads(1)
    networks = cost_networks(tiny, device)
    for name in in_order(networks, wanted):
        model, x, settings = networks[name]
        model, x = model.to(device), x.to(device)
        settings = {
            key: {n: torch.full_like(model.get_parameter(n), v) for n, v in value.items()}
            if isinstance(value, dict)
            else value
            for key, value in settings.items()
        }
        program = captured(model, x)
        for outputs in (1, 10, 100):
            if recorded(name, outputs):
                continue
            chosen = list(range(outputs))

            def forward(model: nn.Module = model, x: Tensor = x) -> Tensor:
                with torch.no_grad():
                    return model(x)

            def prediction(
                program: Any = program, x: Tensor = x, chosen: Any = chosen, settings: Any = settings
            ) -> vp.Prediction:
                return vp.predict(program, x, outputs=chosen, compile=compiled, **settings)

            start = time.perf_counter()
            first = prediction()
            first_seconds = time.perf_counter() - start
            for _ in range(cuda_replay.PATIENCE if device != "cpu" else 0):
                prediction()
            times = (3, 1, 2 if tiny else 5) if device == "cpu" else (20, 5, 2 if tiny else 7)
            turns = [
                (timed(forward, times[0], clock)[0], timed(prediction, times[1], clock)[0]) for _ in range(times[2])
            ]
            ratios = torch.tensor([predicted / plain for plain, predicted in turns])
            plain, predicted = min(t for t, _ in turns), min(t for _, t in turns)
            record = {
                "kind": "cost", "case": name, "outputs": outputs, "samples": len(x), "forward seconds": plain,
                "seconds": predicted, "passes": float(ratios.median()),
                "forward MiB": peak_mebibytes(forward), "MiB": peak_mebibytes(prediction),
                "threads": torch.get_num_threads(), **about(device),
            }  # fmt: skip
            if compiled:
                plain_covariance = vp.predict(program, x, outputs=chosen, **settings).covariance
                off = (first.covariance - plain_covariance).abs().max() / plain_covariance.abs().max()
                record |= {"compiled": True, "first seconds": first_seconds, "off by compiling": float(off)}
            if device != "cpu":
                record |= beside_launches(program, prediction, first, plain, forward)
            print(name, outputs, {k: round(v, 4) for k, v in record.items() if isinstance(v, float)}, flush=True)
            yield record


def beside_launches(
    program: vp.Program,
    prediction: Callable[[], vp.Prediction],
    first: vp.Prediction,
    plain: float,
    forward: Callable[[], Tensor],
) -> dict[str, Any]:
    """True if a prediction was recorded as a CUDA graph, how far it is from the first one, its time without that.

    And the time of a forward pass that is replayed like it: one launched operation by operation waits for the CPU.
    """
    recordings = program.facts[cuda_replay.PredictionGraphs].recordings
    replayed = prediction()
    off = (replayed.covariance - first.covariance).abs().max() / first.covariance.abs().max()
    graph = recordings.get(list(recordings)[-1]) is not None if recordings else False
    kept = dict(recordings)
    recordings.update(dict.fromkeys(recordings))  # None: not to be recorded
    launched = timed(prediction, 5)[0]
    recordings.update(kept)
    passed = torch.cuda.CUDAGraph()
    with torch.cuda.graph(passed):
        forward()
    times = {"passes without graph": launched / plain, "replayed forward seconds": timed(passed.replay, 20)[0]}
    return {"graph": graph, "off": float(off), **times}


def peak_mebibytes(function: Callable[[], Any]) -> float | None:
    """By how much the memory of the process or the GPU grows at most while a function runs; None if nobody tells."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        function()
        return (_status("VmHWM") - before) / 1024
    except (AttributeError, OSError):
        return None


def _status(key: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


DRAW_COUNTS = (4, 16, 64)
SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "rotated by 45°": lambda x: rotated(x, 45.0),
    "noisy": lambda x: x + torch.randn_like(x),
    "shuffled blocks": lambda x: shuffled(x, x.shape[-1] // 4),
}


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned about their centre."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[[c, -s, 0.0], [s, c, 0.0]]], device=x.device).expand(len(x), -1, -1)
    lowest = x.amin()
    return (
        F.grid_sample(x - lowest, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False) + lowest
    )


def shuffled(x: Tensor, size: int) -> Tensor:
    """Images whose blocks change places: strokes as before, and no digit."""
    blocks = F.unfold(x, size, stride=size)
    return F.fold(blocks[..., torch.randperm(blocks.shape[-1])], list(x.shape[2:]), size, stride=size)


def scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy, NLL, expected calibration error over 15 bins, and area under the risk-coverage curve."""
    confidence, choice = probabilities.max(1)
    right = (choice == y).float()
    bins = (confidence * 15).long().clamp_max(14)
    gaps = [(right[bins == b].sum() - confidence[bins == b].sum()).abs() for b in range(15)]
    risk = (1 - right)[confidence.argsort(descending=True)].cumsum(0) / torch.arange(1, len(y) + 1, device=y.device)
    nll = -probabilities.gather(1, y.unsqueeze(1)).clamp_min(1e-12).log().mean()
    values = {"accuracy": right.mean(), "NLL": nll, "ECE": torch.stack(gaps).sum() / len(y), "AURC": risk.mean()}
    return {key: float(value) for key, value in values.items()}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a sample from outside scores higher than one from inside."""
    both = torch.cat([inside, outside])
    ranks = both.argsort().argsort().double() + 1
    high = ranks[len(inside) :].sum() - len(outside) * (len(outside) + 1) / 2
    return float(high / (len(inside) * len(outside)))


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.clamp_min(1e-12).log()).sum(1)


QUALITY = {"MNIST": "MLP 3 x 256, dropout .5", "CIFAR-10": "ResNet-18, width 32, dropout .3"}


def quality(data: str, root: str | None, device: str, tiny: bool, seed: int) -> list[dict[str, Any]]:
    """A classifier under shifts: deterministic, by MC dropout and by `vp.predict`."""
    records: list[dict[str, Any]] = []
    case = CASES[QUALITY[data]]
    torch.manual_seed(seed)
    task = task_of(case.data, root, device, tiny)
    model = case.model().to(device)
    train(model, task, case.epochs, tiny)
    count = 16 if tiny else 2000
    x, y = task.test[:count], task.test_targets[:count]
    program = captured(model, x[: 8 if tiny else 250])
    clean: dict[str, Tensor] = {}
    for shift, change in SHIFTS.items():
        shifted = change(x)
        predictive: dict[str, Tensor] = {}
        with torch.no_grad():
            predictive["deterministic"] = model.eval()(shifted).softmax(1)
            draws = draws_of(model, shifted, case, {}, 0.0, max(DRAW_COUNTS)).softmax(2)
            for draw_count in DRAW_COUNTS:
                predictive[f"{draw_count} draws"] = draws[:draw_count].mean(0)
            predictive["vp.predict"] = vp.predict(program, shifted).probabilities()
        clean = predictive if shift == "none" else clean
        for method, p in predictive.items():
            auc = {} if shift == "none" else {"AUROC": auroc(entropy(clean[method]), entropy(p))}
            marks = scores(p, y) if shift != "shuffled blocks" else {}
            records.append(
                {"kind": "quality", "case": f"{data}, {shift}", "seed": seed, "method": method, **marks, **auc,
                 **about(device)}
            )  # fmt: skip
    return records


def regression_quality(seed: int) -> list[dict[str, Any]]:
    """Coverage of 90 % intervals on diabetes; for each method the targets' noise is fitted to held-out samples."""
    torch.manual_seed(seed)
    task, case = task_of("diabetes", None, "cpu", False), CASES["regression, dropout .1"]
    x, y = torch.cat([task.train, task.test]), torch.cat([task.targets, task.test_targets]).squeeze(1)
    order = torch.randperm(len(x))
    fit, held, test = order[:265], order[265:353], order[353:]
    model = case.model()
    train(model, Task(x[fit], y[fit].unsqueeze(1), x[held], y[held].unsqueeze(1), F.mse_loss), case.epochs)
    draws = draws_of(model, x, case, {}, 0.0, max(DRAW_COUNTS)).squeeze(2)
    with torch.no_grad():
        plain = model.eval()(x).squeeze(1)
    predicted = vp.predict(model, x)
    moments = {"deterministic": (plain, torch.zeros_like(plain))}
    moments |= {f"{n} draws": (draws[:n].mean(0), draws[:n].var(0)) for n in DRAW_COUNTS}
    moments["vp.predict"] = (predicted.mean.squeeze(1), predicted.var.squeeze(1))
    records = []
    for method, (mean, var) in moments.items():
        noise = ((y - mean).square() - var)[held].mean().clamp_min(1e-3)
        total, off = (var + noise)[test], (y - mean)[test]
        nll = 0.5 * (off.square() / total + total.log() + math.log(2 * math.pi)).mean()
        inside = (off.abs() < 1.6449 * total.sqrt()).float().mean()
        records.append(
            {"kind": "quality", "case": "diabetes", "seed": seed, "method": method, "NLL": float(nll),
             "coverage": float(inside), **about("cpu")}
        )  # fmt: skip
    return records


@torch.no_grad()
def accuracy(model: nn.Module, task: Task) -> float | None:
    """On the test samples, in evaluation mode; None where there are no classes."""
    if task.loss is not F.cross_entropy:
        return None
    model.eval()
    parts = zip(task.test.split(500), task.test_targets.split(500), strict=True)
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in parts) / len(task.test)


def show(records: list[dict[str, Any]]) -> str:
    """How true, what draws add, what it costs, and how good it is where it is used."""
    kinds: dict[str, list[dict[str, Any]]] = {"truth": [], "cost": [], "quality": []}
    names = [*CASES]
    for record in sorted(records, key=lambda r: names.index(r["case"]) if r["case"] in names else len(names)):
        kinds[record.get("kind", "truth")].append(record)
    tables = [*truth_tables(kinds["truth"]), cost_table(kinds["cost"]), *quality_tables(kinds["quality"])]
    return "\n\n".join(table.markdown() for table in tables if table.rows)


def cell(values: list[float] | None) -> str:
    """The median with the 10 % and 90 % quantiles."""
    return "" if values is None else "{:.2f} ({:.2f}, {:.2f})".format(*values)


def worth(record: dict[str, Any]) -> str:
    """How many draws have the same error, as far as the draws of the truth can tell."""
    most = record.get("truth", RESOLVED)
    return f"{record['worth draws']:.0f}" if record["worth draws"] < most else f"> {most}"


MENDED = ("alone", "combined")


def truth_tables(records: list[dict[str, Any]]) -> list[Table]:
    columns = {"diagonal rules": "diagonal", "SUQ": "SUQ", "vp.predict": "adjoint"}
    truth = Table(
        "",
        ["network, noise", *columns, "mean off, std", "worth draws"],
        [
            [r["case"], *(cell(r.get(key)) for key in columns.values()), f"{r['mean off']:.2f}", worth(r)]
            for r in records
        ],
        left=["network, noise"],
    )  # fmt: skip
    with_draws = Table(
        "",
        ["network, noise", "16 draws alone", "with draws=16", "64 draws alone", "with draws=64"],
        [
            [r["case"], *(cell(m[key]) for m in r["mended"].values() for key in MENDED)]
            for r in records if r.get("mended")
        ],
        left=["network, noise"],
    )  # fmt: skip
    return [truth, with_draws]


def cost_table(records: list[dict[str, Any]]) -> Table:
    """Forward passes and memory for 1, 10 and 100 outputs, on every device."""
    groups: dict[tuple[str, str], dict[tuple[int, bool], dict[str, Any]]] = {}
    for r in records:
        groups.setdefault((r["device"], r["case"]), {})[r["outputs"], r.get("compiled", False)] = r
    rows = []
    for (device, case), found in sorted(groups.items(), key=lambda item: item[0][0] != "cpu"):

        def passes(key: str, compiled: bool, found: Any = found) -> str:
            values = [found.get((k, compiled), {}).get(key) for k in (1, 10, 100)]
            return "" if values == [None] * 3 else " / ".join("" if v is None else f"{v:.1f}" for v in values)

        memory = [
            f"{max(0.0, r['MiB'] or 0.0):.0f}"
            for (_, compiled), r in sorted(found.items(), key=lambda item: item[0])
            if not compiled
        ]
        kinds = passes("passes", True), passes("passes", False), passes("passes without graph", False)
        rows.append([case, device, str(next(iter(found.values()))["samples"]), *kinds, " / ".join(memory)])
    titles = ["network, noise", "device", "samples", "compiled", "as it is", "without graphs", "MiB"]
    return Table("", titles, rows, left=titles[:2])


METRICS = {"NLL": "NLL", "accuracy": "accuracy", "ECE": "calibration error", "AURC": "AURC", "AUROC": "AUROC"}


def quality_tables(records: list[dict[str, Any]]) -> list[Table]:
    """Means over seeds: calibration under shifts, how well these are told from test images, and coverage."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        groups.setdefault(record["case"], {}).setdefault(record["method"], []).append(record)
    methods = ["deterministic", "4 draws", "16 draws", "64 draws", "vp.predict"]

    def table(key: str, title: str, cases: Iterable[str]) -> Table:
        lines = []
        for case in cases:
            values = {method: [r[key] for r in found if key in r] for method, found in groups[case].items()}
            if all(map(values.get, methods)):
                lines.append([case, *(f"{sum(values[m]) / len(values[m]):.3f}" for m in methods)])
        return Table("", [f"data, {title}", *methods], lines, left=[f"data, {title}"])

    images = [case for case in groups if case != "diabetes"]
    of_images = [table(key, title, images) for key, title in METRICS.items()]
    return [*of_images, table("coverage", "coverage of 90 % intervals", {"diabetes"} & groups.keys())]


def page(records: list[dict[str, Any]]) -> str:
    """All tables."""
    about = (
        "[Error bars](../predict.md) explains the columns. The classifiers are the MLP with dropout .5 on MNIST "
        "(three seeds) and the ResNet-18 of width 32 with dropout .3 on CIFAR-10 (two seeds). AURC is the area under "
        "the curve of the error over the share of images kept, most certain first. AUROC measures how well shifted "
        "images are told from test images. Diabetes has ten splits."
    )
    command = "`python -m benchmarks.error_bars show docs/results/error_bars.jsonl` writes this page."
    return "\n\n".join(["# All tables of error bars", command, about, show(records).strip()]) + "\n"


def pictures(folder: Path, root: str | None, tiny: bool) -> None:
    """Digits with their logits and error bars, and where the variance of the largest logit comes from."""
    from matplotlib import pyplot

    model, task = trained(Case(lambda: mlp(3, 0.5), "mnist", 1), root, "cpu", tiny)
    torch.manual_seed(0)
    digit = task.test[(task.test_targets == 4).nonzero()[:1, 0]]
    images = {"as it is": digit, "rotated by 45°": rotated(digit, 45.0), "noisy": digit + torch.randn_like(digit)}
    x = torch.cat(list(images.values()))
    found = vp.predict(captured(model, x), x)
    low, high = found.interval(0.9)
    figure, axes = pyplot.subplots(2, len(x), figsize=(9, 5), layout="constrained", height_ratios=[1, 1.2])
    figure.suptitle("logits with 90 % intervals under dropout, and expected probability of the largest")
    for index, (title, column) in enumerate(zip(images, axes.T, strict=True)):
        column[0].imshow(x[index, 0], cmap="gray_r")
        column[0].set_title(title)
        column[0].set_axis_off()
        spread = torch.stack([found.mean[index] - low[index], high[index] - found.mean[index]])
        column[1].errorbar(range(10), found.mean[index], spread, fmt="o", capsize=3)
        probability, best = found.probabilities()[index].max(0)
        column[1].set_xticks(range(10))
        column[1].set_xlabel(f"class; {int(best)} with {float(probability):.2f}")
        column[1].axhline(0, color="0.8", linewidth=0.8)
    axes[1, 0].set_ylabel("logit")
    figure.savefig(folder / "predict-digits.png", dpi=110)
    noisy = vp.predict(captured(model, x), x, input_var=0.1)
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), layout="constrained", width_ratios=[1, 1.2, 1.6])
    axes[0].imshow(digit[0, 0], cmap="gray_r")
    axes[0].set_title("input")
    best = int(noisy.mean[0].argmax())
    shown = axes[1].imshow(noisy.input_variance[0, best, 0], cmap="magma_r")
    axes[1].set_title(f"variance of logit {best} by pixel")
    figure.colorbar(shown, ax=axes[1])
    for axis in axes[:2]:
        axis.set_axis_off()
    noisy.plot(axes[2])
    axes[2].set_title("by source, all logits")
    figure.savefig(folder / "predict-sources.png", dpi=110)


def identity(record: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a record from others."""
    device = record["device"] if record.get("kind") == "cost" else None
    return device, *(record.get(key) for key in ("kind", "case", "seed", "method", "outputs", "compiled"))


def main() -> None:
    """Run cases, or show what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "cost", "quality", "show", "pictures"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", default="")
    parser.add_argument("--draws", type=int, default=RESOLVED, help="of the truth")
    parser.add_argument("--seeds", default="0,1,2", help="of the networks of `quality`")
    parser.add_argument("--max-seconds", type=float, default=math.inf)
    parser.add_argument("--compiled", action="store_true", help="`cost` of predictions with compile=True")
    parser.add_argument("--tiny", action="store_true", help="a trial on scikit-learn's digits")
    options = parser.parse_args()
    if options.action == "pictures":
        pictures(options.records, options.data, options.tiny)
        return
    lines = options.records.read_text().splitlines() if options.records.exists() else []
    records = [json.loads(line) for line in lines]
    if options.action == "show":
        print(show(records))
        options.records.with_suffix(".md").write_text(page(records))
        return
    start, pieces = time.monotonic(), options.cases.split("|")
    done = {identity(record) for record in records}

    def in_time() -> bool:
        return time.monotonic() - start < options.max_seconds

    def write(*new: dict[str, Any]) -> None:
        with options.records.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in new)

    if options.action == "cost":
        known = {"kind": "cost", "device": about(options.device)["device"], "compiled": options.compiled or None}

        def recorded(case: str, outputs: int) -> bool:
            return identity({**known, "case": case, "outputs": outputs}) in done

        for record in cost(options.tiny, pieces, options.device, options.compiled, recorded):
            write(record)
            if not in_time():
                break
    elif options.action == "quality":
        for seed in map(int, options.seeds.split(",")):
            for data in QUALITY:
                first = (None, "quality", f"{data}, none", seed, "vp.predict", None, None)
                if in_time() and first not in done and any(piece in data for piece in pieces):
                    write(*quality(data, options.data, options.device, options.tiny, seed))
        if options.cases in ("", "diabetes"):  # small: ten splits
            write(*(r for seed in range(10) for r in regression_quality(seed) if identity(r) not in done))
    else:
        have = {r["case"] for r in records}
        for name in in_order(CASES, pieces):
            if name not in have and in_time():
                record = measure(name, CASES[name], options.data, options.device, options.tiny, options.draws)
                print(name, record["adjoint"], f"{time.monotonic() - start:.0f} s", flush=True)
                write(record)


if __name__ == "__main__":
    main()
