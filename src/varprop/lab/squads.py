"""Which cells of an experiment run together, and how one such squad is run."""

from __future__ import annotations

import torch

from .ensemble import Ensemble
from .material import Material
from .protocol import Experiment
from .records import Cell
from .squad import Plan, Surroundings, run_squad
from .trainer import Trainer
from .training import Training


def squads(experiment: Experiment, cells: list[Cell]) -> dict[str, list[Cell]]:
    """Which cells run together, by the name of their files."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(f"b{cell.batch_size}" if experiment.together else cell.key, []).append(cell)
    return found


def run_one(material: Material, around: Surroundings, name: str, cells: list[Cell]) -> None:
    """Run a squad from where an earlier run left it."""
    plan = Plan.kept(around.store, name) or Plan(name, cells)
    plan.keep(around.store)
    run_squad(plan, _trainer(material, plan.cells), around)


def _trainer(material: Material, cells: list[Cell]) -> Trainer:
    if material.experiment.together:
        return Ensemble(material, cells)
    if material.experiment.precision.compiled:
        torch.compiler.reset()  # what was compiled for earlier cells: torch keeps a few versions of a function only
    return Training(material, cells[0])
