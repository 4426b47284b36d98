"""The report as one HTML page with nothing outside it: styles, script and data are inside."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .extras import need
from .gather import Run
from .layout import figures_of
from .panels import Figure
from .records import TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_ACCURACY, VALID_LOSS, Outcome
from .style import experiment_label, experiment_rank, method_label, method_rank, start_label, start_rank
from .tables import last, part
from .verdicts import RULE, Verdict

TEMPLATES = Path(__file__).parent / "templates"
COLUMNS = (
    ("start", "start"),
    ("method", "method"),
    ("seed", "seed"),
    ("batch", "batch size"),
    ("lr max", "upper bound of the search; the rate itself where there was no search"),
    ("lr", "learning rate found"),
    ("train loss", "running training loss at the end"),
    ("BN eval loss", "loss on the training set in evaluation mode at the end, batch norm only"),
    ("valid. loss", "validation loss at the end"),
    ("valid. acc.", "validation accuracy at the end"),
    ("test loss", "loss on the official test set, once, at the end"),
    ("test acc.", "accuracy on the official test set, once, at the end"),
    ("start gap", "largest difference of log-probabilities from the plain network at the start"),
    ("seconds", "time spent on this run, or its share of it"),
)


@dataclass(frozen=True)
class Value:
    """One entry of the table: what is shown, what it is sorted by, and flags beside it."""

    text: str
    key: float | str
    flags: tuple[str, ...] = ()


def render(runs: Sequence[Run], verdicts: Sequence[Verdict]) -> str:
    """The page as text."""
    jinja2 = need("jinja2", "The report")
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    sections = [section(run) for run in runs]
    places = {f"{one.experiment}/{figure['name']}": figure["id"] for one in sections for figure in one.figures}
    text: str = environment.get_template("report.html.j2").render(
        sections=sections,
        verdicts=verdicts,
        judged=any(verdict.verdict != "no data" for verdict in verdicts),
        places=places,
        rule=RULE,
        headline=headline(sections),
        data={figure["id"]: figure["data"] for one in sections for figure in one.figures},
        columns=COLUMNS,
        css=(TEMPLATES / "report.css").read_text("utf-8"),
        script=(TEMPLATES / "report.js").read_text("utf-8"),
    )
    return text


@dataclass(frozen=True)
class Section:
    """One experiment on the page."""

    experiment: str
    id: str
    title: str
    facts: list[tuple[str, str]]
    problems: list[str]
    figures: list[dict[str, Any]]
    rows: list[tuple[bool, list[Value]]]
    hints: list[tuple[str, str]]


def section(run: Run) -> Section:
    """What the page says about one run."""
    identifier = "e-" + slug(run.experiment)
    return Section(
        run.experiment,
        identifier,
        experiment_label(run.experiment),
        facts(run.manifest),
        run.problems,
        [figure_entry(figure, identifier, run.experiment) for figure in figures_of(run)],
        [(outcome.diverged, row(outcome)) for outcome in run.outcomes],
        hints(run.outcomes),
    )


def slug(name: str) -> str:
    """A name for use in an address, different for different names."""
    return re.sub(r"[^a-zA-Z0-9-]", lambda match: f"_{ord(match.group()):x}", name)


def figure_entry(figure: Figure, section_id: str, experiment: str) -> dict[str, Any]:
    """A figure, its data and the addresses of its files."""
    file = f"{quote(experiment)}/figures/{quote(figure.name)}"
    entry = {
        "experiment": experiment_label(experiment),
        "name": figure.name,
        "id": f"{section_id}-{slug(figure.name)}",
        "file": file,
    }
    return {**entry, "title": figure.title, "caption": figure.caption, "data": rounded(asdict(figure))}


def rounded(value: Any) -> Any:
    """The same with five significant digits, and None for what JSON cannot say."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def headline(sections: Sequence[Section]) -> dict[str, Any] | None:
    """The training curves of the first experiment that has any, the paper's first."""
    ordered = sorted(sections, key=lambda one: experiment_rank(one.experiment))
    curves = [figure for one in ordered for figure in one.figures if figure["name"] == "training"]
    every = [figure for one in ordered for figure in one.figures]
    return next(iter([*curves, *every]), None)


def facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """How it was run."""
    if not manifest:
        return []
    versions = part(manifest, "versions")
    known = {
        "Command": manifest.get("command"),
        "Hardware": machine(manifest.get("hardware")),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None),
        "Git": state_of(part(manifest, "git")),
        "Started": manifest.get("started"),
        "Time": duration(manifest.get("seconds")),
        "Configuration": ", ".join(flat(part(manifest, "configuration"))),
    }
    return [(name, str(value)) for name, value in known.items() if value not in (None, "")]


def state_of(git: dict[str, Any]) -> str:
    """The commit, and whether the sources differed from it."""
    if not git:
        return "unknown"
    return f"{git.get('commit', 'unknown')}{', with local changes' if git.get('dirty') else ''}"


def machine(hardware: object) -> object:
    """What it ran on, in words."""
    if not isinstance(hardware, dict):
        return hardware
    names = {"gpu": "", "cuda": "CUDA ", "machine": "", "cpu_threads": ""}
    parts = [f"{prefix}{hardware[name]}" for name, prefix in names.items() if hardware.get(name)]
    return ", ".join(parts) + (" threads" if hardware.get("cpu_threads") else "")


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """``name = value``, with a dot for what lies inside."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value}"


def duration(seconds: object) -> str | None:
    """Seconds as a person says them."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes} min {rest} s"


def row(outcome: Outcome) -> list[Value]:
    """One training run in the table."""
    cell = outcome.cell
    flags = tuple(name for name, on in flag_states(outcome) if on)
    loss = Value("diverged", math.inf, ("diverged",)) if outcome.diverged else number(last(outcome, TRAIN_LOSS))
    return [
        Value(start_label(cell.start).removeprefix("init = "), start_rank(cell.start)),
        Value(method_label(cell.method, cell.variant), sum(method_rank(cell.method, cell.variant)[:2], 0)),
        Value(str(cell.seed), cell.seed),
        Value(str(cell.batch_size), cell.batch_size),
        Value(f"{cell.lr_max:.2g}", cell.lr_max),
        Value(f"{outcome.search.lr:.3g}", outcome.search.lr, flags),
        loss,
        number(last(outcome, TRAIN_EVAL_LOSS)),
        number(last(outcome, VALID_LOSS)),
        percent(last(outcome, VALID_ACCURACY)),
        number(outcome.test_loss),
        percent(outcome.test_accuracy),
        number(outcome.start_gap, 2),
        number(outcome.seconds, 3),
    ]


def flag_states(outcome: Outcome) -> list[tuple[str, bool]]:
    """What is to be said about the learning rate."""
    search, failed = outcome.search, bool(outcome.search.trace) and not math.isfinite(outcome.search.loss)
    upper = search.lr > outcome.cell.lr_max / 10
    return [
        ("at bound", search.at_bound and upper),
        ("at lower bound", search.at_bound and not upper),
        ("flat", search.flat),
        ("no rate works", failed),
    ]


def number(value: float | None, digits: int = 4) -> Value:
    """A number, or a dash where there is none."""
    if value is None or not math.isfinite(value):
        return Value("–", math.inf)
    return Value(f"{value:.{digits}g}", value)


def percent(value: float | None) -> Value:
    """A share in percent."""
    if value is None or not math.isfinite(value):
        return Value("–", -1.0)
    return Value(f"{100 * value:.2f} %", value)


def hints(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """What the flags in the table mean, those that occur, and what can be done."""
    flags = {name for o in outcomes for name, on in [*flag_states(o), ("diverged", o.diverged)] if on}
    further = 10 * max((o.cell.lr_max for o in outcomes if o.search.at_bound), default=0.0)
    meanings = {
        "at bound": "the best learning rate found lies at the upper bound of the search, and a larger one may be "
        f"better; run again with --lr-max {further:g} to search further",
        "at lower bound": "the best learning rate found lies at the lower bound of the search",
        "flat": "all rates tried gave nearly the same loss, so that the one chosen means little",
        "no rate works": "training diverged at every rate tried",
        "diverged": "the loss became infinite or NaN during training, which is a result; its curves end there",
    }
    return [(name, meaning) for name, meaning in meanings.items() if name in flags]
