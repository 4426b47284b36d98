"""Makes the runs that are missing, writes the records and their page, draws the figures and says what they show."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from varprop_lab import datasets
from varprop_lab.environment import locked, provenance, reproducible, write_atomically
from varprop_lab.figures import draw

from ..processes import results_of
from . import of_statistics, of_training
from .runs import Question, Records, Run, trained

FILE, PAGE = "questions.json", "questions.md"
QUESTIONS: dict[str, Question] = {
    question.name: question
    for question in (
        *(of_statistics.TRUTH, of_training.AVERAGING, of_training.DROPOUT, of_training.NORM),
        *(of_statistics.CORRELATIONS, of_statistics.FROZEN, of_statistics.LINEAR, of_statistics.OVERESTIMATED),
        *(of_statistics.NORMALITY, of_training.SCALE_DECAY),
    )
}
Kept = dict[str, dict[str, Any]]
_CPU = torch.device("cpu")


def study(
    out: Path,
    root: Path | None = None,
    only: Sequence[str] = (),
    seeds: int | None = None,
    say: Callable[[str], None] = print,
    jobs: int = 1,
    max_seconds: float = math.inf,
) -> None:
    """Answer questions on a CPU; runs that the file has are not made again.

    Args:
        out: The folder of the records and figures.
        root: Where MNIST is looked for first.
        only: Names of questions; all by default.
        seeds: So many of each; as many as the question asks for by default.
        say: Gets every line of the answer.
        jobs: So many runs at once, each in a process of its own.
        max_seconds: After this time no run is begun.
    """
    deadline, names = time.monotonic() + max_seconds, list(only or QUESTIONS)
    with locked(out):
        kept = recorded(out)
        missing = [job for name in names for job in _missing(name, kept, seeds or QUESTIONS[name].seeds, root)]
        source = provenance(_CPU) | {"processes": jobs} if missing else {}
        for job, new_runs in results_of(_ArmWithSeed.runs, missing, jobs, deadline):
            order = {arm.name: index for index, arm in enumerate(QUESTIONS[job.question].arms)}
            entry = kept[job.question] | {"source": source}
            entry["runs"] = sorted([*entry["runs"], *new_runs], key=lambda run: (run["seed"], order[run["arm"]]))
            kept[job.question] = entry
            write_atomically(out / FILE, _text(kept).encode())
            losses = ", ".join(str(run["train_eval_loss"]) for run in new_runs)
            say(f"{job.question}: {new_runs[0]['arm']}, seed {job.seed}: training losses {losses}")
        for name in names:
            question, records = QUESTIONS[name], Records(kept.get(name, {}).get("runs", ()))
            if find_spec("matplotlib") and records.runs:  # a bare machine only makes runs
                draw(question.figure(records), out / f"question-{name}")
            say(f"\n{question.title}\n{question.verdicts(records)}")
        write_atomically(out / PAGE, page(kept).encode())


def page(kept: Kept) -> str:
    """Every claim with its verdict, in Markdown, of the questions that have runs."""
    sections = [
        f"## {question.title}\n\n{question.verdicts(Records(kept[name]['runs'])).strip()}"
        for name, question in QUESTIONS.items()
        if kept.get(name, {}).get("runs")
    ]
    about = "`python -m benchmarks.questions` writes this page. [Open questions](../questions.md) says what it means."
    return "\n\n".join(["# Verdicts on open questions", about, *sections]) + "\n"


def recorded(out: Path) -> Kept:
    """The records in a folder, by question."""
    file = out / FILE
    return json.loads(file.read_text()) if file.exists() else {}


@dataclass(frozen=True)
class _ArmWithSeed:
    """The runs of one arm and seed, at all its rates."""

    question: str
    arm: int
    seed: int
    root: Path | None

    def runs(self) -> list[Run]:
        """The runs."""
        question = QUESTIONS[self.question]
        with reproducible(_CPU):
            data = _data(question.settings.dataset, self.root)
            return list(trained(question.arms[self.arm], self.seed, data, question.settings))


@functools.cache
def _data(name: str, root: Path | None) -> datasets.Dataset:
    return datasets.load(name, root, _CPU)


def _missing(name: str, kept: Kept, seeds: int, root: Path | None) -> list[_ArmWithSeed]:
    question = QUESTIONS[name]
    settings = {"epochs": question.settings.protocol.epochs, "images": question.settings.train_samples}
    if kept.get(name, {}).get("settings") != settings:
        kept[name] = {"settings": settings, "runs": []}
    there = {(run["arm"], run["seed"]) for run in kept[name]["runs"]}
    return [
        _ArmWithSeed(name, index, seed, root)
        for seed in range(seeds)
        for index, arm in enumerate(question.arms)
        if (arm.name, seed) not in there
    ]


def _text(kept: Kept) -> str:
    """A line for every run."""
    entries = []
    for name, question in kept.items():
        if not question["runs"]:
            continue
        runs = ",\n".join(json.dumps(run, separators=(",", ":")) for run in question["runs"])
        about = json.dumps({key: value for key, value in question.items() if key != "runs"}, indent=1)
        entries.append(f'"{name}": {about[:-2]},\n "runs": [\n{runs}\n]}}')
    return "{\n" + ",\n".join(entries) + "\n}\n"
