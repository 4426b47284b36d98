"""Accuracy over batch sizes by normalization: a grid of trainings that share a GPU, in as many sittings as it takes.

    python -m benchmarks.deep.small_batches run RECORDS [--epochs 4] [--jobs 10] [--max-seconds 540] [--data DIR]
    python -m benchmarks.deep.small_batches cost RECORDS      # time and memory of a step, each alone
    python -m benchmarks.deep.small_batches show RECORDS      # the table; RECORDS.png and .svg if matplotlib is there

RECORDS is a file of JSON lines, one for every finished cell of the grid; cells that it has are not made again. A cell
is a method with a batch size: first a search of rates and bounds of the gradient on held-out training images, six
networks side by side, then the best of them on the test images, a network for every seed. With `--state DIR` cells that
the limit of time stops are saved there, and the next sitting goes on with them; without it, cells that cannot end in
time are not begun.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab.figures import Figure, Panel, PlottedSeries, draw

from .grid import COST, SEARCH, TEST, Grid, GridCell, GridWorker, best_of, parser, read, serve
from .joined import joined
from .side_by_side import Member, SideBySide

METHODS = {  # names of examples/train_cifar.py; where there are several, the best with the largest batch
    "batch norm": ("batch",),
    "batch renorm": ("renorm",),
    "group norm": ("group", "group16"),
    "group norm + WS": ("group-ws", "group16-ws"),
    "analytic": ("analytic",),
}
BATCHES = (2, 4, 8, 16, 32)
RATES = (0.4, 1.0, 2.5)  # multiples of 0.2 batch / 256
SEEDS = (0, 1, 2)


def rate_of(batch: int, multiple: float) -> float:
    """Rates grow with the batch."""
    return float(f"{multiple * 0.2 * batch / 256:.6g}")


def clip_of(batch: int) -> float:
    """Noise falls with the root of the batch, and so does the bound."""
    return float(f"{2 * (256 / batch) ** 0.5:.4g}")


def search_of(norm: str, batch: int) -> GridCell:
    """All rates, with and without clipping."""
    tried = [Member(rate_of(batch, multiple), clip, 0) for clip in (0.0, clip_of(batch)) for multiple in RATES]
    return GridCell(SEARCH, norm, batch, tuple(tried))


def norm_of(method: str, records: dict[str, Any]) -> str | None:
    """The variant of a method, chosen with the largest batch; None while that is not known."""
    norms = METHODS[method]
    if len(norms) == 1:
        return norms[0]
    searched = {norm: records.get(search_of(norm, BATCHES[-1]).key) for norm in norms}
    if any(record is None for record in searched.values()):
        return None
    scores = {norm: (best_of(r["runs"]) or {"accuracy": 0.0})["accuracy"] for norm, r in searched.items() if r}
    return max(norms, key=lambda norm: scores[norm])


def ready(records: dict[str, Any]) -> list[GridCell]:
    """Cells that can be made now, the most steps first: what is last is short, and all processes end together."""
    cells = []
    for method, norms in METHODS.items():
        if len(norms) > 1:
            cells += [search_of(norm, BATCHES[-1]) for norm in norms]
        norm = norm_of(method, records)
        for batch in BATCHES if norm else ():
            assert norm is not None
            search = search_of(norm, batch)
            cells.append(search)
            best = best_of(records[search.key]["runs"]) if search.key in records else None
            if best is not None:
                members = tuple(Member(best["rate"], best["clip"], seed) for seed in SEEDS)
                cells.append(GridCell(TEST, norm, batch, members))
    missing = {cell.key: cell for cell in cells if cell.key not in records}
    deciding = [cell for cell in missing.values() if cell.kind == SEARCH and cell.norm.startswith("group")]
    first = {cell.key for cell in deciding if cell.batch == BATCHES[-1]}  # others wait for them
    order = {cell: (cell.key not in first, cell.batch, cell.kind, cell.norm != "analytic") for cell in missing.values()}
    return sorted(order, key=lambda cell: order[cell])


# ---------------------------------------------------------------------------------------------------- one cell


class BatchWorker(GridWorker):
    """Trains the networks of a cell side by side; convolutions are computed in whichever way is fastest."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.ways_file = (options.state or options.records.parent) / "convolutions.json"

    def prepare(self, cell: GridCell) -> dict[str, Any]:
        """Record a step of a cell that is timed alone."""
        start = time.time()
        self.trainer = self._trainer(cell, self.images(self.options.held_out))
        self.trainer.prepare()
        return {"prepared": round(time.time() - start, 1)}

    def trained(self, cell: GridCell, until: float) -> dict[str, Any]:
        """The record of a cell; the steps done if it was stopped, the seconds it takes if there is no time for it."""
        start = time.time()
        data = self.images(0 if cell.kind == TEST else self.options.held_out)
        trainer = self._trainer(cell, data)
        name = f"{cell.key.replace(' ', '-')}-{self.options.epochs}.pt"
        state = self.options.state / name if self.options.state else None
        if state and state.exists():
            trainer.load(state)
        trainer.prepare()
        self._keep_ways(trainer.ways)
        prepared = round(time.time() - start, 1)
        if state is None:
            needed = trainer.steps * trainer.epochs * trainer.milliseconds(0.5) / 1000
            if time.time() + needed > until:
                return {"needs": round(needed)}
        if not trainer.train(until):
            if state:
                trainer.save(state)
            return {"stopped": trainer.done, "of": trainer.steps * trainer.epochs}
        runs = self.runs(cell, trainer, data.judged)
        times = {"prepared": prepared, "seconds": round(time.time() - start, 1)}
        return {**self.about(cell), "steps": trainer.steps, **times, "runs": runs}

    def _ways(self) -> dict[str, str]:
        """How convolutions are fastest, as far as any process has found out."""
        ways: dict[str, str] = json.loads(self.ways_file.read_text()) if self.ways_file.exists() else {}
        return ways

    def _keep_ways(self, ways: dict[str, str]) -> None:
        """Write them by way of a file of this process alone: others write at the same time."""
        written = self.ways_file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps({**self._ways(), **ways}))
        written.replace(self.ways_file)

    def network(self, norm: str, members: Iterable[Member], moments: vp.Moments, batch: int) -> nn.Module:
        """Networks with the weights of their seeds, joined and normalized."""
        models = []
        for member in members:
            torch.manual_seed(member.seed)
            models.append(self.example.resnet(self.options.model, norm, self.options.width))
        model = joined(models)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):  # its running statistics are averages of as many images for all sizes
                layer.momentum = 0.1 * min(1.0, batch / BATCHES[-1])
        if norm != "analytic":
            return model
        mean, var = (tensor.repeat(1, len(models), 1, 1) for tensor in (moments.mean, moments.var))
        return vp.normalize(model, vp.Moments(mean, var, (1, mean.shape[1], 32, 32)), form="deep")

    def _trainer(self, cell: GridCell, data: Any) -> SideBySide:
        images = data.train[0]
        model = self.network(cell.norm, cell.members, vp.input_moments(images.cpu()), cell.batch)
        arguments = (cell.members, self.epochs(data, cell.batch), len(images), cell.batch, self.options.epochs)
        return SideBySide(model, *arguments, self.device, ways=self._ways())


class BatchGrid(Grid):
    """Any process takes any cell."""

    module = "benchmarks.deep.small_batches"

    def ready(self) -> list[GridCell]:
        """Cells that can be made now."""
        return ready(self.records)


def cost(options: argparse.Namespace) -> None:
    """Record ms a step and MiB of one network at a time, clipped, as a CUDA graph."""
    options.images, options.data = 1024, None
    grid, cells = BatchGrid(options), []
    for method, norms in METHODS.items():
        norm = norm_of(method, grid.records) or norms[0]
        cells += [GridCell(COST, norm, batch, (Member(1e-4, clip_of(batch), 0),)) for batch in BATCHES]
    grid.cost(cells)


# ---------------------------------------------------------------------------------------------------- what is shown


def shown(records: dict[str, Any]) -> str:
    """The table: accuracies on the test images, the settings that were chosen, and what a step costs."""
    lines = []
    for batch in BATCHES:
        for method in METHODS:
            norm = norm_of(method, records)
            search, test, price = (records.get(f"{kind} {norm} {batch}") for kind in (SEARCH, TEST, COST))
            best = best_of(search["runs"]) if search else None
            if best is None:
                continue
            values = [run["accuracy"] for run in test["runs"] if run["accuracy"] is not None] if test else []
            middle = f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else ""
            seeds = f"{len(values)} of {len(test['runs'])}" if test else ""
            multiple = best["rate"] / rate_of(batch, 1.0)
            at_edge = multiple < RATES[0] * 1.01 or multiple > RATES[-1] * 0.99
            rate = f"{best['rate']:g}{' (at the edge)' if at_edge else ''}"
            costs = [f"{price['ms']:.2f}", str(price["MiB"])] if price else ["", ""]
            lines.append([str(batch), f"{method}, {norm}", rate, f"{best['clip'] or 'none'}", middle, seeds, *costs])
    accuracy = "test accuracy, mean (lowest to highest)"
    columns = ["batch", "method", "rate", "clip", accuracy, "seeds", "ms a step", "MiB"]
    return Table("", columns, lines, left=("method",)).markdown()


def figure(records: dict[str, Any]) -> Figure:
    """Test accuracy over the batch size; bands from the lowest to the highest seed."""
    series = []
    colours = {
        "batch norm": ("#0064a8", "#4aa3ff", "o", "solid"),
        "batch renorm": ("#009e73", "#2bd4a4", "^", "dashed"),
        "group norm": ("#603000", "#cc183c", "X", "dashdot"),
        "group norm + WS": ("#d16aa8", "#cc66aa", "P", "dotted"),
        "analytic": ("#d55e00", "#ff8c42", "D", "solid"),
    }
    for rank, method in enumerate(METHODS):
        norm, points = norm_of(method, records), []
        for batch in BATCHES:
            runs = records.get(f"{TEST} {norm} {batch}", {"runs": []})["runs"]
            values = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
            if values:
                points.append((float(batch), statistics.mean(values), min(values), max(values)))
        if points:
            x, y, low, high = zip(*points, strict=True)
            colour, dark, marker, dash = colours[method]
            style = method, colour, dark, dash, marker
            series.append(PlottedSeries(*style, x, y, low, high, seeds=len(SEEDS), rank=rank))
    caption = (
        "Every method at its best rate and clipping on held-out images; bands from the lowest to the highest seed."
    )
    labels = "batch size", "test accuracy (%)"
    return Figure("small-batches", "CIFAR-10 by batch size", caption, (Panel("", tuple(series)),), *labels, True, False)


def show(options: argparse.Namespace) -> None:
    """Print the table, and draw the figure if there is anything to draw and matplotlib is installed."""
    records = read(options.records)
    print(shown(records))
    drawn = figure(records)
    if drawn.panels[0].series and importlib.util.find_spec("matplotlib"):
        draw(drawn, options.records.with_suffix(""))


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    words = parser(__doc__, ["run", "cost", "show"])
    words.add_argument("--width", type=int, default=32, help="of the first stage")
    words.add_argument("--epochs", type=int, default=4)
    words.add_argument("--jobs", type=int, default=10)
    words.add_argument("--preparing", type=int, default=12, help="processes that make ready at the same time for cost")
    words.add_argument("--state", type=Path, help="where stopped cells are saved")
    options = words.parse_args(arguments)
    options.records.parent.mkdir(parents=True, exist_ok=True)
    if options.state:
        options.state.mkdir(parents=True, exist_ok=True)
    if options.action == "run":
        BatchGrid(options).run()
    elif options.action == "serve":
        serve(BatchWorker(options))
    else:
        {"cost": cost, "show": show}[options.action](options)


if __name__ == "__main__":
    main()
