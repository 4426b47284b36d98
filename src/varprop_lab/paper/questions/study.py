"""Makes the runs that are missing, writes the records, draws the figures and says what they show."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...data import datasets
from ...environment import provenance, reproducible
from ...report.plotting import draw
from ...store.folder import locked, write_atomically
from . import averaging, correlations, dropout, norm, truth
from .runs import Question, Records, trained

FILE = "questions.json"
QUESTIONS: dict[str, Question] = {
    module.QUESTION.name: module.QUESTION for module in (truth, averaging, dropout, norm, correlations)
}
Kept = dict[str, dict[str, Any]]


def study(
    out: Path,
    root: Path | None = None,
    only: Sequence[str] = (),
    seeds: int = 3,
    say: Callable[[str], None] = print,
) -> None:
    """Answer questions on a CPU; runs that the file has are not made again."""
    with locked(out):
        records_by_question = recorded(out)
        for name in only or QUESTIONS:
            question = QUESTIONS[name]
            _make(question, records_by_question, out, root, seeds, say)
            records = Records(records_by_question[name]["runs"])
            draw(question.figure(records), out / f"question-{name}")
            say(f"\n{question.title}\n{question.verdicts(records)}")


def recorded(out: Path) -> Kept:
    """The records in a folder, by question."""
    file = out / FILE
    return json.loads(file.read_text()) if file.exists() else {}


def _make(
    question: Question, records_by_question: Kept, out: Path, root: Path | None, seeds: int, say: Callable[[str], None]
) -> None:
    settings = {"epochs": question.settings.protocol.epochs, "images": question.settings.train_samples}
    if records_by_question.get(question.name, {}).get("settings") != settings:
        records_by_question[question.name] = {"settings": settings, "runs": []}
    runs = records_by_question[question.name]["runs"]
    there = {(run["arm"], run["seed"]) for run in runs}
    missing = [(arm, seed) for seed in range(seeds) for arm in question.arms if (arm.name, seed) not in there]
    if not missing:
        return
    cpu = torch.device("cpu")
    data = datasets.load(question.settings.dataset, root, cpu)
    records_by_question[question.name] |= {"source": provenance(cpu)}
    with reproducible(cpu, 1):
        for arm, seed in missing:
            new_runs = list(trained(arm, seed, data, question.settings))
            runs += new_runs
            losses = ", ".join(str(run["train_eval_loss"]) for run in new_runs)
            say(f"{question.name}: {arm.name}, seed {seed}: training losses {losses}")
            write_atomically(out / FILE, _text(records_by_question).encode())


def _text(records_by_question: Kept) -> str:
    """A line for every run."""
    entries = []
    for name, question in records_by_question.items():
        runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in question["runs"])
        about = json.dumps({key: value for key, value in question.items() if key != "runs"}, indent=1)
        entries.append(f'"{name}": {about[:-2]},\n "runs": [\n{runs}\n]}}')
    return "{\n" + ",\n".join(entries) + "\n}\n"
