"""The report as one HTML page with nothing outside it, and the other files of a run for a reader."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from varprop.pages import environment, script, style

from ..environment import write_atomically
from ..protocol import (
    METHOD_MEANINGS,
    SAMPLE_NORMS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_LOSS,
    Method,
    Outcome,
    experiment_label,
    experiment_rank,
    method_label,
    method_rank,
    start_label,
    start_rank,
)
from ..report import plotting
from ..store import Run, read_run, write_tables
from .series import Figure, figures_of, rounded
from .text import answer, facts

_TEMPLATES = Path(__file__).parent / "templates"
_COLUMNS = (
    ("start", "start"),
    ("method", "method"),
    ("seed", "seed"),
    ("batch", "batch size"),
    ("lr max", "upper bound of the search; the rate itself where there was no search"),
    ("lr", "learning rate found"),
    ("train loss", "running training loss at the end"),
    ("eval. loss", "loss on the training set in evaluation mode at the end"),
    ("valid. loss", "validation loss at the end"),
    ("valid. acc.", "validation accuracy at the end"),
    ("test loss", "loss on the official test set, once, at the end"),
    ("test acc.", "accuracy on the official test set, once, at the end"),
    ("start gap", "largest difference of log-probabilities from the plain network at the start"),
    ("seconds", "time spent on this run, or its share of it"),
)


@dataclass(frozen=True)
class _Value:
    """One entry of the table: what is shown, what it is sorted by, and flags beside it."""

    text: str
    key: float | str
    flags: tuple[str, ...] = ()


def render(runs: Sequence[Run], pictures: Path | None = None, verdicts: Sequence[Any] = (), rule: str = "") -> str:
    """The page as text.

    Args:
        runs: What it is about.
        pictures: A folder that has, in a folder for each run, the figures as files to put into the page.
        verdicts: Claims of the paper, each a `paper.verdicts.judge.Verdict`; without, the page is not about the paper.
        rule: How verdicts come about.
    """
    sections = [_section(run, pictures) for run in runs]
    methods = {outcome.cell.method for run in runs for outcome in run.outcomes}
    figures = [figure for section in sections for figure in section["figures"]]
    text: str = (
        environment(_TEMPLATES)
        .get_template("report.html.j2")
        .render(
            sections=sections,
            verdicts=verdicts,
            judged=any(verdict.setting and verdict.verdict != "no data" for verdict in verdicts),  # on runs
            places={f"{figure['folder']}/{figure['name']}": figure["id"] for figure in figures},
            rule=rule,
            headline=_headline(figures) if len(sections) > 1 else None,
            starts=_starts(methods),
            legend=_legend(methods),
            data={figure["id"]: figure["data"] for figure in figures},
            columns=_COLUMNS,
            css=style(_TEMPLATES / "report.css"),
            script=script(_TEMPLATES, "report.js"),
        )
    )
    return text


def _starts(methods: set[Method]) -> str:
    """Where these methods begin: layer and group norm cannot begin from the function of the others."""
    apart = [method_label(method) for method in SAMPLE_NORMS if method in methods]
    if not apart:
        return "Every method starts from the same function."
    return (
        f"Every method starts from the same function but {' and '.join(apart)}, which cannot compute it and start from "
        "the nearest: the table has the distance as start gap."
    )


def _legend(methods: set[Method]) -> str:
    """The meanings of these methods' short names."""
    meanings = [f"{method_label(name)}: {meaning}" for name, meaning in METHOD_MEANINGS.items() if name in methods]
    return "; ".join(meanings) + "." * bool(meanings)


def _section(run: Run, pictures: Path | None) -> dict[str, Any]:
    identifier = "e-" + _slug(run.experiment)
    return {
        "experiment": run.experiment,
        "id": identifier,
        "title": _title(run),
        "answer": answer(run.outcomes),
        "facts": facts(run.manifest),
        "problems": run.problems,
        "figures": [_figure_entry(figure, identifier, run.experiment, pictures) for figure in figures_of(run)],
        "rows": [(outcome.diverged, _row(outcome)) for outcome in run.outcomes],
        "hints": _hints(run.outcomes),
    }


def _slug(name: str) -> str:
    """A name for use in an address, different for different names."""
    return re.sub(r"[^a-zA-Z0-9-]", lambda match: f"_{ord(match.group()):x}", name)


def _title(run: Run) -> str:
    """The experiment; for a model of one's own, its name and that of its data."""
    settings = run.manifest.get("configuration", {})
    if run.experiment != "compare" or not {"model", "dataset"} <= settings.keys():
        return experiment_label(run.experiment)
    return f"{_short(settings['model'])} on {_short(settings['dataset'])}"


def _short(name: object) -> str:
    """``path/to/mine.py:make`` without its folders."""
    return str(name).replace("\\", "/").rpartition("/")[2]


def _figure_entry(figure: Figure, section_id: str, experiment: str, pictures: Path | None) -> dict[str, Any]:
    file = pictures / experiment / "figures" / f"{figure.name}.png" if pictures else None
    return {
        "folder": experiment,
        "experiment": experiment_label(experiment),
        "name": figure.name,
        "id": f"{section_id}-{_slug(figure.name)}",
        "picture": base64.b64encode(file.read_bytes()).decode() if file and file.is_file() else "",
        "title": figure.title,
        "caption": figure.caption,
        "data": rounded(asdict(figure)),
    }


def _headline(figures: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The training curves of the first experiment that has any, the paper's first."""
    return min(figures, key=lambda f: (f["name"] != "training", experiment_rank(f["folder"])), default=None)


def _row(outcome: Outcome) -> list[_Value]:
    cell = outcome.cell
    loss = _Value("diverged", math.inf, ("diverged",)) if outcome.diverged else _number(outcome.last(TRAIN_LOSS))
    return [
        _Value(start_label(cell.start).removeprefix("init = "), start_rank(cell.start)),
        _Value(method_label(cell.method, cell.variant), sum(method_rank(cell.method, cell.variant)[:2], 0)),
        _Value(str(cell.seed), cell.seed),
        _Value(str(cell.batch_size), cell.batch_size),
        _Value(f"{cell.lr_max:g}", cell.lr_max),
        _Value(f"{outcome.search.lr:.3g}", outcome.search.lr, _flags(outcome)),
        loss,
        _number(outcome.last(TRAIN_EVAL_LOSS)),
        _number(outcome.last(VALID_LOSS)),
        _percent(outcome.last(VALID_ACCURACY)),
        _number(outcome.test_loss),
        _percent(outcome.test_accuracy),
        _number(outcome.start_gap, "{:.2g}"),
        _number(outcome.seconds, "{:.3g}"),
    ]


def _flags(outcome: Outcome) -> tuple[str, ...]:
    """Notes on the learning rate."""
    search = outcome.search
    upper = search.lr > outcome.bound / 10
    states = {
        "at bound": search.at_bound and upper,
        "at lower bound": search.at_bound and not upper,
        "flat": search.flat,
        "no rate works": bool(search.trace) and not math.isfinite(search.loss),
    }
    return tuple(name for name, on in states.items() if on)


def _number(value: float | None, form: str = "{:.4g}", missing: float = math.inf) -> _Value:
    """A number, or a dash where there is none, sorted as if it were `missing`."""
    if value is None or not math.isfinite(value):
        return _Value("–", missing)
    return _Value(form.format(value), value)


def _percent(value: float | None) -> _Value:
    return _number(None if value is None else 100 * value, "{:.2f} %", -1.0)


def _hints(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """The meaning of every flag that occurs in the table, and what can be done."""
    flags = {flag for o in outcomes for flag in (*_flags(o), *["diverged"] * o.diverged)}
    further = 10 * max((o.bound for o in outcomes if o.search.at_bound), default=0.0)
    meanings = {
        "at bound": "the best learning rate found lies at the upper bound of the search, and a larger one may be "
        f"better; run again with --lr-max {further:g} to search further",
        "at lower bound": "the best learning rate found lies at the lower bound of the search",
        "flat": "all rates tried gave nearly the same loss, so that the one chosen means little",
        "no rate works": "training diverged at every rate tried",
        "diverged": "the loss became infinite or NaN during training, which is a result; its curves end there",
    }
    return [(name, meaning) for name, meaning in meanings.items() if name in flags]


def write_one(out: Path, experiment: str) -> Path:
    """Write tables, figures and the page of one experiment into its folder; the path of the page."""
    run = read_run(Path(out) / experiment)
    write_files(run, Path(out))
    page = Path(out) / experiment / "report.html"
    write_atomically(page, render([run], Path(out)).encode())
    return page


def write_files(run: Run, out: Path) -> None:
    """Write ``runs``, ``curves`` and ``searches`` as CSV, and figures as PNG and SVG, into the folder of a run."""
    folder = out / run.experiment
    if run.outcomes:
        write_tables(folder, run.outcomes, run.manifest)
    for figure in figures_of(run):
        plotting.draw(figure, folder / "figures" / figure.name, experiment_label(run.experiment))
