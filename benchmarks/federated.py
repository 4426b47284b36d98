"""Federated averaging of CIFAR-10 split by class, with batch norm, group norm, no norm and the analytic normalization.

    python -m benchmarks.federated run RECORDS --data DIR [--methods ...] [--max-seconds 300]
    python -m benchmarks.federated show RECORDS    # the table

Ten clients hold two classes each (or classes by a Dirichlet distribution of 0.1). In every round each trains the
server's network for an epoch of its own images, and the server averages what they send: parameters, and running
statistics where batch norm has them (FedAvg). The analytic normalization has none; it needs the moments of all
images, which clients can send once, as counts, sums and sums of squares of three channels.

The clients of several trainings are trained side by side, as one network with as many groups of channels. RECORDS is a
file of JSON lines: for every method first a search of the rate on held-out training images, then the best of them on
the test images, with other seeds. Cells that it has are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from normalizations import StandardizedConv2d
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab.datasets import load
from varprop_lab.environment import git_state, versions
from varprop_lab.training import captured

from .deep.joined import joined
from .deep.side_by_side import GroupedConvolutions, fastest_way

METHODS = ("analytic", "batch norm", "group norm", "group norm + WS", "none")
SPLITS = ("two classes", "Dirichlet 0.1")
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
CLIENTS, BATCH, HELD_OUT = 10, 50, 5000
SIZE = 32, 32
CLIP = 4.5  # of the norm of each client's gradient, the same for all methods
DECAY = 5e-4  # of weights


def network(method: str, width: int) -> nn.Sequential:
    """Return four convolutions with their normalizations, a global average and a linear layer."""
    layers: list[nn.Module] = []
    for before, after, stride in (
        (3, width, 1),
        (width, 2 * width, 2),
        (2 * width, 4 * width, 2),
        (4 * width,) * 2 + (1,),
    ):
        kind = StandardizedConv2d if method.endswith("WS") else nn.Conv2d
        layers.append(kind(before, after, 3, stride, 1, bias=method == "none"))
        if method == "batch norm" or method == "analytic":  # whose place it takes
            layers.append(nn.BatchNorm2d(after))
        elif method.startswith("group"):
            layers.append(nn.GroupNorm(after // 8, after))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def side_by_side(method: str, width: int, seeds: Sequence[int], pooled: vp.Moments | None) -> nn.Module:
    """Return networks with the weights of their seeds as one, normalized if pooled moments of images are given."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(network(method, width))
    model = joined(models)
    if pooled is None:
        return model
    mean, var = (moment.repeat(1, len(seeds), 1, 1) for moment in (pooled.mean, pooled.var))
    return vp.normalize(model, vp.Moments(mean, var, (1, mean.shape[1], *SIZE)), form="deep")


def clients_of(labels: Tensor, split: str, seed: int) -> list[Tensor]:
    """Return the images of every client, as indices."""
    generator = torch.Generator().manual_seed(seed)
    if split == "two classes":  # McMahan's: sorted by class, and cut in twenty
        order = torch.argsort(labels + torch.rand(len(labels), generator=generator))
        shards = order.tensor_split(2 * CLIENTS)
        chosen = torch.randperm(2 * CLIENTS, generator=generator).view(CLIENTS, 2).tolist()
        return [torch.cat([shards[first], shards[second]]) for first, second in chosen]
    clients: list[list[Tensor]] = [[] for _ in range(CLIENTS)]
    for label in range(10):
        images = (labels == label).nonzero()[:, 0]
        images = images[torch.randperm(len(images), generator=generator)]
        torch.manual_seed(1000 * seed + label)
        shares = torch.distributions.Dirichlet(torch.full((CLIENTS,), 0.1)).sample()
        ends = (shares.cumsum(0) * len(images)).round().long().tolist()
        for client, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            clients[client].append(images[start:end])
    return [torch.cat(pieces) for pieces in clients]


class Federation:
    """Federated trainings side by side, each with its rate and its seed.

    Args:
        method: The normalization.
        runs: Rate and seed of every training.
        data: Images of all clients as bytes (N, H, W, 3), and labels.
        split: How classes are spread over clients.
        options: Width, rounds and device.
    """

    def __init__(
        self, method: str, runs: Sequence[tuple[float, int]], data: tuple[Tensor, Tensor], split: str, options: Any
    ) -> None:
        self.method, self.runs, self.device, self.rounds = method, runs, torch.device(options.device), options.rounds
        self.images, self.labels = (tensor.to(self.device) for tensor in data)
        pooled = vp.input_moments(scaled(data[0])) if method == "analytic" else None
        seeds = [seed for _, seed in runs]
        last: Any = {"memory_format": torch.channels_last}
        self.server = side_by_side(method, options.width, seeds, pooled).to(self.device, **last).eval()
        everywhere = [seed for seed in seeds for _ in range(CLIENTS)]
        self.clients = side_by_side(method, options.width, everywhere, pooled).to(self.device, **last).train()
        self.members = [clients_of(data[1], split, seed) for seed in seeds]
        counts = torch.tensor([[len(chosen) for chosen in members] for members in self.members], device=self.device)
        self.shares = counts / counts.sum(1, keepdim=True)
        self.steps = len(data[0]) // CLIENTS // BATCH
        self.groups = len(everywhere)
        self.order = torch.zeros(self.steps, self.groups, BATCH, dtype=torch.int64, device=self.device)
        self.now = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.rates = torch.tensor([rate for rate, _ in runs], device=self.device).repeat_interleave(CLIENTS)
        self.rate = self.rates.clone()
        self.parameters = list(self.clients.parameters())

    def step(self) -> None:
        """Take a local step of every client."""
        chosen = self.order[self.now % self.steps][0]  # groups, images
        images = self.images[chosen]
        flipped = torch.rand(chosen.shape, device=self.device)[..., None, None, None] < 0.5
        images = torch.where(flipped, images.flip(3), images)
        x = scaled(images.permute(1, 2, 3, 0, 4).flatten(3))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.clients(x).unflatten(1, (self.groups, -1)).transpose(0, 1)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.labels[chosen].flatten(), reduction="none")
        grads = torch.autograd.grad(loss.sum() / BATCH, self.parameters)
        with torch.no_grad():
            rows = [grad.reshape(self.groups, -1) for grad in grads]
            norm = sum(row.square().sum(1) for row in rows).sqrt()  # type: ignore[union-attr]
            factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
            for parameter, row in zip(self.parameters, rows, strict=True):
                move = row * factor[:, None]
                if parameter.ndim > 1:
                    move = move + DECAY * parameter.reshape(self.groups, -1)
                parameter -= (self.rate[:, None] * move).view_as(parameter)
            self.now += 1

    def train(self, images: Tensor, labels: Tensor, until: float) -> tuple[list[list[float]], int]:
        """Return accuracies of every training after every fifth round, and how many rounds there was time for."""
        curve, replay = [], self.step_on_device()
        for number in range(self.rounds):
            self.rate.copy_(self.rates * 0.5 * (1 + math.cos(math.pi * number / self.rounds)))
            self.broadcast()
            for place, (members, (_, seed)) in enumerate(zip(self.members, self.runs, strict=True)):
                generator = torch.Generator().manual_seed(1000 * seed + number)
                for client, chosen in enumerate(members):  # one with fewer images sees them more often
                    often = -(-self.steps * BATCH // max(1, len(chosen)))
                    order = torch.cat([torch.randperm(len(chosen), generator=generator) for _ in range(often)])
                    drawn = chosen[order[: self.steps * BATCH]] if len(chosen) else torch.zeros(self.steps * BATCH)
                    self.order[:, place * CLIENTS + client] = drawn.view(self.steps, BATCH).to(self.order)
            self.now.zero_()
            for _ in range(self.steps):
                replay()
            self.average()
            if (number + 1) % 5 == 0 or number + 1 == self.rounds:
                curve.append(self.accuracies(images, labels))
            if time.time() > until:
                return curve, number + 1
        return curve, self.rounds

    def step_on_device(self) -> Callable[[], Any]:
        """Return a step, on a GPU a CUDA graph with the fastest convolutions."""
        if self.device.type != "cuda":
            return self.step
        torch.backends.cudnn.benchmark = True
        mode = GroupedConvolutions({})
        self.broadcast()
        with mode:
            self.step()
        ways = {name: fastest_way(shapes, torch.bfloat16, self.device) for name, shapes in mode.met.items()}

        def step() -> None:
            with GroupedConvolutions(ways):
                self.step()

        return captured(step)  # what it changes is broadcast anew

    def state(self, model: nn.Module) -> list[Tensor]:
        """Return what clients send: parameters, and running statistics where there are any."""
        return [*(p.detach() for p in model.parameters()), *(b for b in model.buffers() if b.ndim)]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give the server's state to all clients."""
        for here, there in zip(self.state(self.clients), self.state(self.server), strict=True):
            here.copy_(there.unflatten(0, (len(self.runs), -1)).repeat_interleave(CLIENTS, 0).reshape(here.shape))

    @torch.no_grad()
    def average(self) -> None:
        """Average the states of clients into the server's, each by its number of images."""
        if self.method == "analytic":
            vp.unit_norm_(self.clients)  # lengths of rows mean nothing: every client counts by its directions
        for here, there in zip(self.state(self.server), self.state(self.clients), strict=True):
            by_client = there.reshape(len(self.runs), CLIENTS, -1)
            here.copy_((self.shares[..., None] * by_client).sum(1).view_as(here))

    @torch.no_grad()
    def accuracies(self, images: Tensor, labels: Tensor) -> list[float]:
        """Return the accuracy of every training's server."""
        right = torch.zeros(len(self.runs), device=self.device)
        for x, y in zip(images.split(500), labels.split(500), strict=True):
            x, y = scaled(x.to(self.device)).repeat(1, len(self.runs), 1, 1), y.to(self.device)
            x = x.contiguous(memory_format=torch.channels_last)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                logits = self.server(x).unflatten(1, (len(self.runs), -1))
            right += (logits.argmax(2) == y[:, None]).sum(0)
        return [round(value / len(images), 4) for value in right.tolist()]


def scaled(images: Tensor) -> Tensor:
    """Return bytes (N, H, W, C) as numbers around zero (N, C, H, W)."""
    return images.permute(0, 3, 1, 2).float().sub(127.5).div(64.0)


# -------------------------------------------------------------------------------------------------------- records


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records by the names of their cells."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["cell"]: record for record in map(json.loads, lines)}


def best_rate(record: dict[str, Any]) -> float:
    """Return the rate of a search with the highest accuracy."""
    return float(max(record["runs"], key=lambda run: run["accuracies"][-1])["rate"])


def run(options: argparse.Namespace) -> None:
    """Run the cells that are missing until time is up."""
    until = time.time() + options.max_seconds
    data = load("cifar10", options.data)
    train, test = (
        (images.permute(0, 2, 3, 1).contiguous()[: options.images], labels[: options.images])
        for images, labels in ((data.train_x, data.train_y), (data.test_x, data.test_y))
    )
    for split in options.splits:
        for method in options.methods:
            name = f"{split}, {method}"
            for kind in ("search", "test"):
                records = read(options.records)
                if f"{kind}, {name}" in records or time.time() > until:
                    continue
                if kind == "search":
                    runs = [(rate, SEARCH_SEED) for rate in options.rates]
                elif f"search, {name}" not in records:
                    continue
                else:
                    runs = [(best_rate(records[f"search, {name}"]), seed) for seed in options.seeds]
                record_cell(f"{kind}, {name}", kind, split, method, runs, (train, test), options, until)


def record_cell(
    cell: str,
    kind: str,
    split: str,
    method: str,
    runs: list[tuple[float, int]],
    data: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    options: argparse.Namespace,
    until: float,
) -> None:
    """Train and append the record, unless time was up."""
    start = time.time()
    (images, labels), judged = data
    kept = (images, labels) if kind == "test" else (images[options.held_out :], labels[options.held_out :])
    judged = judged if kind == "test" else (images[: options.held_out], labels[: options.held_out])
    settings = argparse.Namespace(**vars(options))
    settings.rounds = options.rounds if kind == "test" else options.search_rounds
    federation = Federation(method, runs, kept, split, settings)
    curve, rounds = federation.train(*judged, until)
    if rounds < settings.rounds:
        print(f"{cell}: stopped after {rounds} rounds", flush=True)
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    about = {"hardware": where, "git": git_state(), "torch": versions()["torch"]}
    names = {"cell": cell, "kind": kind, "split": split, "method": method, "rounds": rounds, "width": options.width}
    results = [
        {"rate": rate, "seed": seed, "accuracies": [values[place] for values in curve]}
        for place, (rate, seed) in enumerate(runs)
    ]
    line = {**names, **about, "seconds": round(time.time() - start, 1), "runs": results}
    with options.records.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(f"{cell}: {[(run['rate'], run['accuracies'][-1]) for run in results]} in {line['seconds']} s", flush=True)


def shown(records: dict[str, dict[str, Any]]) -> str:
    """Return the table: rate and accuracies of every method by split."""
    lines = []
    for split in SPLITS:
        for method in METHODS:
            record = records.get(f"test, {split}, {method}")
            if record:
                values = [run["accuracies"][-1] for run in record["runs"]]
                rate = record["runs"][0]["rate"]
                at_edge = " (at the edge)" if rate in (RATES[0], RATES[-1]) else ""
                middle = f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
                lines.append([split, method, f"{rate:g}{at_edge}", middle, str(len(values))])
    columns = ["split", "method", "rate", "test accuracy, mean (lowest to highest)", "seeds"]
    return Table("", columns, lines, left=("split", "method")).markdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "show"])
    parser.add_argument("records", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--search-rounds", type=int, default=15)
    parser.add_argument("--held-out", type=int, default=HELD_OUT)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--images", type=int, help="train on so many alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-seconds", type=float, default=300.0)
    options = parser.parse_args()
    if options.command == "run":
        run(options)
    else:
        print(shown(read(options.records)))
