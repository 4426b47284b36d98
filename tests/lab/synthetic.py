"""Synthetic outcomes: numbers made up by formulas, in the shape of real ones. Nothing here was ever trained."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict, replace

from varprop_lab.protocol import (
    METHODS,
    STARTS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_LOSS,
    Cell,
    Outcome,
    Search,
)

FLOOR = {"mnist": 0.004, "noisy-mnist": 0.25, "noisy-cifar10": 0.55, "digits": 0.02, "naive": 0.05}
SLOWER = {"standard": 3.0, "weight": 2.5, "batch": 1.8, "analytic": 1.0, "layer": 1.6, "group": 1.7}


def outcome(cell, epochs=12, floor=None, overfit=0.0, eval_gap=0.05, at_bound=False, diverged=False):
    """One synthetic outcome: the training loss falls from log 10 towards `floor`."""
    noise = random.Random(f"{cell.experiment} {cell.key}")
    floor = FLOOR.get(cell.experiment, 0.1) * SLOWER[cell.method] if floor is None else floor
    train = [falling(epoch, epochs, floor) * math.exp(noise.gauss(0, 0.03)) for epoch in range(1, epochs + 1)]
    valid = [value + 0.05 + overfit * epoch / epochs for epoch, value in enumerate(train, 1)]
    curves = {TRAIN_LOSS: train, VALID_LOSS: valid, VALID_ACCURACY: [math.exp(-value) for value in valid]}
    if cell.method == "batch":
        curves[TRAIN_EVAL_LOSS] = [value * (1 + eval_gap * (0.5 + noise.random())) for value in train]
    if diverged:
        curves = {name: values[: epochs // 3] for name, values in curves.items()}
    test = math.nan if diverged else valid[-1]
    found = search(cell, noise, at_bound)
    return Outcome(cell, found, curves, test, math.exp(-valid[-1]) if not diverged else 0.1, diverged, 2e-6, 3.5)


def falling(epoch, epochs, floor):
    return floor + (math.log(10) - floor) * math.exp(-7 * epoch / epochs)


def search(cell, noise, at_bound):
    best = math.log10(cell.lr_max) - (0.02 if at_bound else 0.8 + noise.random())
    tried = sorted({round(noise.uniform(-6, math.log10(cell.lr_max)), 3) for _ in range(8)} | {best})
    trace = [(10**place, 0.2 + 0.3 * (place - best) ** 2 if place < best + 0.7 else math.inf) for place in tried]
    noise.shuffle(trace)
    return Search(10**best, 0.2, trace, at_bound=at_bound)


def grid(experiment, seeds=(0, 1, 2), starts=STARTS, methods=METHODS, batch_sizes=(128,), bounds=(1e-2,), **more):
    """Every method from every start."""
    return [
        outcome(Cell(experiment, method, start, seed, batch, bound), **{**quirks(method, start), **more})
        for bound in bounds
        for batch in batch_sizes
        for start in starts
        for method in methods
        for seed in seeds
    ]


def quirks(method, start):
    """What the paper saw: plain networks stuck from None, batch norm odd in evaluation there."""
    if start == "none" and method in ("standard", "weight"):
        return {"floor": 1.9}
    if start == "none" and method == "batch":
        return {"eval_gap": 1.5}
    return {"at_bound": True} if method == "analytic" else {}


def naive(seeds=(0, 1, 2), rate=1e-3):
    """Each method from its own start at one rate, and the standard network as w = 2w'."""
    own = {"standard": "none", "weight": "none", "batch": "bn", "analytic": "ap2"}
    cells = [Cell("naive", method, start, seed, lr_max=rate) for method, start in own.items() for seed in seeds]
    doubled = [replace(cell, variant="double") for cell in cells if cell.method == "standard"]
    outcomes = [outcome(cell) for cell in cells] + [outcome(cell, floor=0.08) for cell in doubled]
    return [replace(o, search=Search(rate, math.nan)) for o in outcomes]


def everything():
    """All experiments, as a complete run would leave them, one run diverged and one method missing."""
    mnist = grid("mnist", bounds=(1e-2, 1e-1), overfit=0.1)
    mnist = [o if o.cell.method != "batch" else replace(o, curves=generalizing(o.curves)) for o in mnist]
    broken = outcome(Cell("noisy-mnist", "weight", "ap2", 1), diverged=True)
    noisy = [broken if o.cell == broken.cell else o for o in grid("noisy-mnist")]
    cifar = [o for o in grid("noisy-cifar10") if o.cell.seed == 0 or o.cell.method in ("batch", "analytic")]
    cifar = [o for o in cifar if (o.cell.method, o.cell.start) != ("weight", "none")]
    small = grid("small-batches", starts=("bn",), batch_sizes=(4, 16, 128))
    orthogonal = grid("orthogonal", starts=(*STARTS, "orthogonal"))
    decay = [
        outcome(replace(o.cell, variant=variant), floor=0.02 + 0.01 * len(variant))
        for o in grid("decay", starts=("ap2",), methods=("batch", "analytic"))
        for variant in ("", "decay", "unit-norm")
    ]
    return [*mnist, *noisy, *cifar, *small, *orthogonal, *decay, *naive()]


def generalizing(curves):
    loss = [value - 0.08 * epoch / len(curves[VALID_LOSS]) for epoch, value in enumerate(curves[VALID_LOSS], 1)]
    return {**curves, VALID_LOSS: loss, VALID_ACCURACY: [math.exp(-value) for value in loss]}


def manifest(experiment):
    return {
        "command": f"varprop reproduce {experiment} --seeds 3",
        "experiment": experiment,
        "configuration": {"experiment": experiment, "epochs": 12, "note": "synthetic"},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "varprop": "0.1.0", "cuda": None},
        "hardware": {"machine": "synthetic, no hardware"},
        "git": {"commit": "0123456789abcdef", "dirty": False},
        "started": "2026-01-01T00:00:00+00:00",
        "seconds": 83.25,
    }


def write(out, outcomes):
    """Lays outcomes down as a run does."""
    for one in outcomes:
        folder = out / one.cell.experiment
        (folder / "cells").mkdir(parents=True, exist_ok=True)
        (folder / "cells" / f"{one.cell.key}.json").write_text(json.dumps(asdict(one)))
        (folder / "manifest.json").write_text(json.dumps(manifest(one.cell.experiment)))
    return out
