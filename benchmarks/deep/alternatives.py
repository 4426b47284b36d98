"""The deep form against what else is taken in its place, in a ResNet on CIFAR-10, and what each of its changes does.

    python -m benchmarks.deep.alternatives run RECORDS --data DIR [--jobs 4] [--max-seconds 540] [--compile]
    python -m benchmarks.deep.alternatives cost RECORDS [--compile]   # time and memory of a step, each alone
    python -m benchmarks.deep.alternatives show RECORDS               # the tables: .md, .png and .svg beside it

RECORDS is a file of JSON lines, one for every training; those that it has are not made again. For every row four rates
are tried, each without and with clipping, in short runs judged by held-out training images; while the best rate is the
lowest or the highest that was tried, the next one is tried as well. The best setting then trains longer with several
seeds, on all training images, and is judged by the test images. Every row has a process of its own, which records its
step once (`--compile` compiles it first) and trains with it what is asked for, one run after another.

The forms between the paper's and the deep one (centred rows, first shift, a global average as one position) are judged
by held-out images after the short runs, with two seeds, at their best rates without and with clipping.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from normalizations import start_weight_norm_
from torch import nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab.figures import Figure, Panel, PlottedSeries, draw, line_style

from . import form_changes
from .grid import COST, SEARCH, TEST, Grid, GridCell, GridWorker, best_of, parser, read, serve
from .side_by_side import Member, SideBySide

BATCH, CLIP = 256, 2.0
RATES = (0.05, 0.1, 0.2, 0.4)
FURTHER = 2  # rates beyond these, at either end
AGAIN = "again"  # a search with a second seed


class Alternative(NamedTuple):
    """A line of the table, and how many seeds it has on the test images."""

    label: str
    seeds: int = 2
    bounds: tuple[tuple[float, float], ...] = ((0.0, 0.0), (CLIP, 0.0))  # of the norm, and of adaptive clipping


ROWS = {  # the most important first
    "batch": Alternative("batch norm", 5),
    "analytic": Alternative("analytic, deep form", 5),
    "group-ws": Alternative("group norm + weight standardization", 5),
    "nf": Alternative("NF-ResNet", 5, ((0.0, 0.0), (CLIP, 0.0), (0.0, 0.01), (0.0, 0.08))),
    "group": Alternative("group norm", 5),
    "paper": Alternative("analytic, paper's form", 5),
    "evonorm": Alternative("EvoNorm-S0", 3),
    "frn": Alternative("filter response norm"),
    "renorm": Alternative("batch renorm"),
    "fixup": Alternative("Fixup"),
    "init": Alternative("none, `vp.init_`"),
    "none": Alternative("none"),
    "weight": Alternative("weight norm, data-dependent start"),
}
FIRST, FIRST_SEEDS = 6, 3  # rows, and how many of their seeds come before other rows
CHANGES = ("centred rows", "first shift", "average as one position")
FORMS = {  # names of rows by which changes of the deep form they have
    changes: "form-" + "".join("01"[change] for change in changes)
    for changes in itertools.product((True, False), repeat=3)
} | {(True, True, True): "analytic", (False, False, False): "paper"}
LABELS = {norm: row.label for norm, row in ROWS.items()}


def bounds_of(norm: str) -> tuple[tuple[float, float], ...]:
    """How gradients are bounded in the runs that are tried."""
    return ROWS[norm].bounds if norm in ROWS else Alternative("").bounds


def cell_of(kind: str, norm: str, rate: float, bounds: Sequence[float], seed: int = 0) -> GridCell:
    """A cell with one run."""
    clip, adaptive = bounds
    said = f"rate {rate:g} clip {clip:g}" + (f" adaptive {adaptive:g}" if adaptive else "") + f" seed {seed}"
    return GridCell(kind, norm, BATCH, (Member(rate, clip, seed, adaptive),), said)


def runs_of(norm: str, records: dict[str, Any], kind: str = SEARCH) -> list[dict[str, Any]]:
    """The runs of a row that there are."""
    return [r["runs"][0] for r in records.values() if r["kind"] == kind and r["norm"] == norm]


def searches(
    norm: str, records: dict[str, Any], tried: Sequence[float] = RATES, row: Alternative | None = None
) -> list[GridCell]:
    """All runs of a search, as far as it is known which."""
    rates = list(tried)
    while True:
        cells = [
            cell_of(SEARCH, norm, rate, bounds) for bounds in (row.bounds if row else bounds_of(norm)) for rate in rates
        ]
        best = best_of(runs_of(norm, records))
        if any(cell.key not in records for cell in cells) or best is None or len(rates) >= len(tried) + FURTHER:
            return cells
        if best["rate"] not in (min(rates), max(rates)):
            return cells
        rates.append(best["rate"] * 2 if best["rate"] == max(rates) else best["rate"] / 2)


def ready(records: dict[str, Any]) -> list[GridCell]:
    """Cells that can be made now, the most important first."""
    order: dict[GridCell, tuple[int, int]] = {}
    norms = [*ROWS, *(norm for norm in FORMS.values() if norm not in ROWS)]
    for number, norm in enumerate(norms):
        first = number < FIRST
        rank = 0 if first else 1 if norm in ROWS else 3
        tried = searches(norm, records)
        order |= {cell: (rank, number) for cell in tried}
        if any(cell.key not in records for cell in tried):
            continue
        runs = runs_of(norm, records)
        best = best_of(runs)
        for seed in range(ROWS[norm].seeds if norm in ROWS and best else 0):
            assert best is not None
            cell = cell_of(TEST, norm, best["rate"], (best["clip"], best.get("adaptive", 0.0)), seed)
            order[cell] = (2 if first and seed >= FIRST_SEEDS else rank, number)
        for bounds in bounds_of(norm) if norm in FORMS.values() else ():
            best = best_of(run for run in runs if run["clip"] == bounds[0])
            if best is not None:
                order[cell_of(AGAIN, norm, best["rate"], bounds, 1)] = (4, number)
    return sorted((cell for cell in order if cell.key not in records), key=lambda cell: order[cell])


class TableWorker(GridWorker):
    """Trains the cells of one row, one network after another by the same recorded step."""

    settings = ("model", "width", "epochs", "search_epochs", "images", "jobs", "compile")
    smoothing = 0.0  # of the labels

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.starts: dict[int, nn.Module] = {}
        self.milliseconds = 0.0  # of a step, lately

    def prepare(self, cell: GridCell) -> dict[str, Any]:
        """Record the step, for as many images and steps as the longest training has."""
        start = time.time()
        images = self.images(0)
        model = copy.deepcopy(self.start(cell.norm, 0))
        arguments = cell.members, self.epochs(images, BATCH), len(images.train[0]), BATCH, self.options.epochs
        settings = {"compiled": self.options.compile, "smoothing": self.smoothing}
        self.trainer = SideBySide(model, *arguments, self.device, **settings)
        self.trainer.prepare()
        return {"prepared": round(time.time() - start, 1)}

    def trained(self, cell: GridCell, until: float) -> dict[str, Any]:
        """The record of a cell; the seconds it takes if there is no time for it."""
        start, trainer = time.time(), self.trainer
        data = self.images(0 if cell.kind == TEST else self.options.held_out)
        epochs = self.options.epochs if cell.kind == TEST else self.options.search_epochs
        first = self.start(cell.norm, cell.members[0].seed)
        trainer.begin(cell.members, self.epochs(data, BATCH), len(data.train[0]), epochs, first)
        needed = trainer.steps * epochs * (self.milliseconds or trainer.milliseconds(0.5)) / 1000
        if time.time() + needed > until:
            return {"needs": round(needed)}
        began = time.time()
        if not trainer.train(until):
            return {"stopped": trainer.done, "of": trainer.steps * epochs}
        self.milliseconds = 1000 * (time.time() - began) / trainer.done
        runs = self.runs(cell, trainer, data.judged)
        return {**self.about(cell), "steps": trainer.steps, "seconds": round(time.time() - start, 1), "runs": runs}

    def start(self, norm: str, seed: int) -> nn.Module:
        """The network that a seed begins with."""
        if seed not in self.starts:
            self.starts[seed] = self._start(norm, seed)
        return self.starts[seed]

    def _start(self, norm: str, seed: int) -> nn.Module:
        train = self.images(self.options.held_out).train[0]
        form = next((changes for changes, name in FORMS.items() if name == norm), None)
        torch.manual_seed(seed)
        name = "analytic" if form else "none" if norm == "init" else norm
        model: nn.Module = self.example.resnet(self.options.model, name, self.options.width)
        if norm == "weight":
            model.to(self.device)
            start_weight_norm_(model, train[:BATCH])
        if form is not None:
            model = form_changes.normalized(model, vp.input_moments(train.cpu()), form)
        elif norm == "init":
            model = vp.init_(model, vp.input_moments(train.cpu()))
        return model


class TableGrid(Grid):
    """Every row has a process."""

    module = "benchmarks.deep.alternatives"
    same = ("model", "width", "epochs", "search_epochs", "images")

    def ready(self) -> list[GridCell]:
        """Cells of the wanted rows that can be made now."""
        wanted = self.options.norms.split(",")
        return [cell for cell in ready(self.records) if wanted == [""] or cell.norm in wanted]

    def names(self) -> list[str]:
        """Rows that miss something."""
        return list(dict.fromkeys(cell.norm for cell in self.ready()))

    def takes(self, name: str, cell: GridCell) -> bool:
        """Its own cells."""
        return cell.norm == name

    def prepared(self, name: str) -> GridCell:
        """With every bound that the row tries: one that is not there is infinite."""
        bounds = [max(tried) for tried in zip(*bounds_of(name), strict=True)]
        return cell_of("prepare", name, RATES[0], bounds)


def cost(options: argparse.Namespace) -> None:
    """Record ms a step and MiB of every row, with the clipping that it has as published, or a bound of the norm."""
    options.images, options.data = 1024, None
    TableGrid(options).cost(cell_of(COST, norm, 1e-4, (0.0, 0.01) if norm == "nf" else (CLIP, 0.0)) for norm in ROWS)


# ---------------------------------------------------------------------------------------------------- what is shown


def summary(values: Iterable[float | None]) -> str:
    """Mean and range of those that did not diverge."""
    good = [value for value in values if value is not None]
    return f"{statistics.mean(good):.4f} ({min(good):.4f} to {max(good):.4f})" if good else "diverged"


def seeds_of(runs: Sequence[dict[str, Any]]) -> str:
    """How many runs there are, and how many of them did not diverge if some did."""
    good = sum(run["accuracy"] is not None for run in runs)
    return str(good) if good == len(runs) else f"{good} of {len(runs)}"


def bound(run: dict[str, Any]) -> str:
    """How the gradients of a run were bounded."""
    return f"adaptive, {run['adaptive']:g}" if run.get("adaptive") else f"{run['clip']:g}" if run["clip"] else "none"


def table(records: dict[str, Any]) -> Table:
    """Test accuracy and the chosen setting, a row for each that has been tested."""
    lines = []
    for norm, row in ROWS.items():
        runs = runs_of(norm, records, TEST)
        if runs:
            rates = sorted({run["rate"] for run in runs_of(norm, records)})
            edge = " (edge)" if runs[0]["rate"] in (rates[0], rates[-1]) else ""
            loss = [run["losses"][-1] for run in runs if run["losses"][-1] is not None]
            setting = [f"{runs[0]['rate']:g}{edge}", bound(runs[0])]
            accuracy = summary(run["accuracy"] for run in runs)
            lines.append([row.label, *setting, accuracy, seeds_of(runs), f"{statistics.mean(loss):.3f}"])
    columns = ["normalization", "rate", "clip", "test accuracy, mean (range)", "seeds", "training loss"]
    return Table("", columns, lines, left=("normalization",))


def costs(records: dict[str, Any]) -> Table:
    """Time and memory of a step, each measured alone."""
    prices = {record["norm"]: record for record in records.values() if record["kind"] == COST}
    lines = [
        [
            row.label,
            f"{prices[norm]['ms']:.2f}",
            f"{prices[norm]['ms'] / prices['batch']['ms']:.2f}",
            f"{prices[norm]['MiB']}",
        ]
        for norm, row in ROWS.items()
        if norm in prices
    ]
    return Table("", ["normalization", "ms a step", "of batch norm", "MiB"], lines, left=("normalization",))


def searched(records: dict[str, Any], labels: Mapping[str, str] = LABELS) -> Table:
    """Held-out accuracy of every rate, without and with clipping, of the rows with these labels."""
    lines = []
    norms = [norm for norm in labels if runs_of(norm, records)]
    rates = sorted({run["rate"] for norm in norms for run in runs_of(norm, records)})
    for norm in norms:
        runs = runs_of(norm, records)
        for clip in dict.fromkeys(bound(run) for run in runs):
            found = {run["rate"]: run["accuracy"] for run in runs if bound(run) == clip}
            values = [("" if r not in found else f"{found[r]:.4f}" if found[r] else "diverged") for r in rates]
            lines.append([labels[norm], clip, *values])
    return Table("", ["normalization", "clip", *(f"{rate:g}" for rate in rates)], lines, left=("normalization", "clip"))


def ablation(records: dict[str, Any]) -> Table:
    """Held-out accuracy of every form at its best rate without and with clipping, one or two seeds."""
    lines = []
    for changes, norm in FORMS.items():
        values = []
        for clip, _ in bounds_of(norm):
            tried = [run for run in runs_of(norm, records) if run["clip"] == clip]
            best = best_of(tried)
            again = [run for run in runs_of(norm, records, AGAIN) if run["clip"] == clip]
            accuracies = [run["accuracy"] for run in (best, *again) if run is not None]
            failed = f"diverged at all {len(tried)} rates" if tried else ""
            values.append(f"{summary(accuracies)} at {best['rate']:g}" if best else failed)
        if any(values):
            lines.append([*("yes" if change else "no" for change in changes), *values])
    return Table("", [*CHANGES, "not clipped", f"clipped at {CLIP:g}"], lines)


def _label_of(changes: tuple[bool, ...]) -> str:
    return ", ".join(name for name, change in zip(CHANGES, changes, strict=True) if change) or "none of them"


def figure(records: dict[str, Any]) -> Figure:
    """Held-out accuracy over the rate, without and with clipping; a cross where a training diverged."""
    styles = {
        "batch": line_style("batch"),
        "analytic": line_style("analytic"),
        "paper": line_style("analytic", evaluation=True),
        "group-ws": line_style("standard", "double"),
        "group": line_style("group"),
        "nf": line_style("weight"),
    }
    panels = []
    for clip, title in ((0.0, "not clipped"), (CLIP, f"clipped at {CLIP:g}")):
        lines = []
        for rank, (norm, style) in enumerate(styles.items()):
            runs = [run for run in runs_of(norm, records) if run["clip"] == clip and not run.get("adaptive")]
            runs.sort(key=lambda run: run["rate"])
            y = tuple(100 * run["accuracy"] if run["accuracy"] is not None else None for run in runs)
            if runs:
                x = tuple(run["rate"] for run in runs)
                lines.append(PlottedSeries(ROWS[norm].label, **style, x=x, y=y, rank=rank))
        panels.append(Panel(title, tuple(lines)))
    caption = "One short run for every point, judged by held-out images; lines end where trainings diverge."
    labels = "peak rate", "held-out accuracy (%)"
    return Figure("alternatives", "CIFAR-10 by peak rate", caption, tuple(panels), *labels, False, False)


def page(records: dict[str, Any]) -> str:
    """All tables, with what they show."""
    first = next(iter(records.values()))
    short, long = first["search_epochs"], first["epochs"]
    parts = [
        "# Alternatives to the deep form",
        "`python -m benchmarks.deep.alternatives show docs/results/alternatives.jsonl` writes this page.",
        f"## Test accuracy after {long} epochs",
        table(records).markdown(),
        f"## Held-out accuracy after {short} epochs by peak rate",
        searched(records).markdown(),
        f"## Changes of the deep form, held-out accuracy after {short} epochs at the best rate",
        ablation(records).markdown(),
        searched(records, {norm: _label_of(changes) for changes, norm in FORMS.items()}).markdown(),
        f"## Time and memory of a step of {BATCH} images",
        costs(records).markdown(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def show(options: argparse.Namespace) -> None:
    """Print all tables and write them beside the records; draw the figure if matplotlib is installed."""
    records = read(options.records)
    print(page(records))
    options.records.with_suffix(".md").write_text(page(records))
    if importlib.util.find_spec("matplotlib"):
        draw(figure(records), options.records.with_suffix(""))


def table_parser(description: str | None, actions: Sequence[str], epochs: int, short: int) -> argparse.ArgumentParser:
    """Options of a table whose rows have a process each."""
    words = parser(description, actions)
    words.add_argument("--width", type=int, default=64, help="of the first stage")
    words.add_argument("--epochs", type=int, default=epochs)
    words.add_argument("--search-epochs", type=int, default=short)
    words.add_argument("--jobs", type=int, default=4, help="networks that train at the same time")
    words.add_argument("--preparing", type=int, default=5, help="processes that make ready at the same time")
    words.add_argument("--alive", type=int, default=8, help="processes at the same time, each with 4 GB of the GPU")
    words.add_argument("--compile", action="store_true")
    return words


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    words = table_parser(__doc__, ["run", "cost", "show"], 15, 3)
    words.add_argument("--norms", default="", help=f"train these rows alone: {','.join(ROWS)}")
    options = words.parse_args(arguments)
    if unknown := set(filter(None, options.norms.split(","))) - {*ROWS}:
        words.error(f"there is no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    if options.action == "run":
        TableGrid(options).run()
    elif options.action == "serve":
        serve(TableWorker(options))
    else:
        {"cost": cost, "show": show}[options.action](options)


if __name__ == "__main__":
    main()
