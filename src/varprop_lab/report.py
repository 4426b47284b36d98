"""Results as text, the sentence that answers a comparison and its table, and as an HTML page with figures."""

from __future__ import annotations

import base64
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from varprop.pages import environment, script, style
from varprop.text_table import Table

from . import figures
from .environment import write_atomically
from .figures import Figure, figures_of, rounded
from .protocol import (
    METHOD_MEANINGS,
    SAMPLE_NORMS,
    TRAIN_EVAL_LOSS,
    TRAIN_LOSS,
    VALID_ACCURACY,
    VALID_LOSS,
    Cell,
    Method,
    Outcome,
    experiment_label,
    experiment_rank,
    grouped,
    method_label,
    method_rank,
    start_label,
    start_rank,
)
from .seed_statistics import HOLDS, Metric, Sample, final, final_error, lower
from .store import Run, read_run, write_tables


def facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of all that is known."""
    if not manifest:
        return []
    versions = manifest.get("versions", {})
    entries = {
        "Command": manifest.get("command"),
        "Hardware": _machine(manifest.get("hardware", {})),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None),
        "Git": git_text(manifest.get("git", {})),
        "Started": manifest.get("started"),
        "Time": duration(manifest.get("seconds")),
        "Data": manifest.get("fingerprints", {}).get("data"),
        "Configuration": ", ".join(_flat(manifest.get("configuration", {}))),
    }
    return [(name, str(value)) for name, value in entries.items() if value not in (None, "")]


def git_text(git: dict[str, Any]) -> str:
    """The commit, and whether the sources differed from it."""
    if not git:
        return "unknown"
    changes = f" (SHA-256 {str(git['diff'])[:12]})" if git.get("diff") else ""
    return f"{git.get('commit', 'unknown')}{f', with local changes{changes}' if git.get('dirty') else ''}"


def _machine(hardware: dict[str, Any]) -> str:
    names = {"gpu": "", "cuda": "CUDA ", "machine": "", "cpu_threads": ""}
    items = [f"{prefix}{hardware[name]}" for name, prefix in names.items() if hardware.get(name)]
    return ", ".join(items) + (" threads" if hardware.get("cpu_threads") else "")


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """``name = value``, with a dot for what lies inside."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value}"


def duration(seconds: float | None) -> str | None:
    """Seconds in words; None where they are not known."""
    if seconds is None:
        return None
    minutes, remainder = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes} min {remainder} s"


HEADINGS = ("experiment", "start", "method", "lr", "training loss", "validation", "test")
AT_BOUND = "* the best rate lies next to the bound of the search, which --lr-max widens"


def result_table(outcomes: Sequence[Outcome]) -> str:
    """Learning rate, final loss and accuracies, mean ± standard deviation over the seeds; empty without outcomes."""
    if not outcomes:
        return ""
    text = Table("", HEADINGS, [_row(group) for group in _groups(outcomes)], left=HEADINGS).plain()
    return "\n".join([text, AT_BOUND] if any(outcome.search.at_bound for outcome in outcomes) else [text])


def _groups(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Outcomes that differ in nothing but the seed."""

    def place(c: Cell) -> tuple[Any, ...]:
        ranks = start_rank(c.start), c.start, method_rank(c.method, c.variant), c.method
        return c.experiment, c.lr_max, c.batch_size, *ranks

    groups = grouped(outcomes, place)
    return [groups[key] for key in sorted(groups)]


def _row(group: list[Outcome]) -> tuple[str, ...]:
    cell = group[0].cell
    lost = sum(outcome.diverged for outcome in group)
    small = f", batch {cell.batch_size}" if cell.batch_size != 128 else ""
    return (
        cell.experiment,
        start_label(cell.start) + small,
        method_label(cell.method, cell.variant),
        _rates(group),
        _spread([outcome.last(TRAIN_LOSS) for outcome in group], "{:.4g}"),
        _spread([outcome.last(VALID_ACCURACY) for outcome in group], "{:.2%}"),
        f"{lost} of {len(group)} diverged" if lost else _spread([o.test_accuracy for o in group], "{:.2%}"),
    )


def _rates(group: list[Outcome]) -> str:
    """The range of the learning rates over the seeds; a star where one lies next to the bound of the search."""
    rates = [f"{rate:.2g}" for rate in sorted(outcome.search.lr for outcome in group)]
    span = rates[0] if rates[0] == rates[-1] else f"{rates[0]}..{rates[-1]}"
    return f"{span}*" if any(outcome.search.at_bound for outcome in group) else span


def _spread(ends: Sequence[float | None], form: str) -> str:
    """The mean, and the standard deviation where there are several values; a dash where there are none."""
    values = [end for end in ends if end is not None and not math.isnan(end)]
    if not values:
        return "-"
    mean = form.format(statistics.fmean(values))
    return f"{mean} ± {form.replace('.4g', '.2g').format(statistics.stdev(values))}" if len(values) > 1 else mean


Case = dict[tuple[Method, str], list[Outcome]]  # by method and variant, all that started from the same function


def answer(outcomes: Sequence[Outcome]) -> str:
    """One sentence; empty where there is nothing to compare.

    A method leads where its mean over the seeds is the lowest and zero lies outside the 95 % interval of the
    differences, seed by seed, to every other method. It is undecided which one leads where that is not so, with one
    seed, and where a method that is behind has a learning rate at the bound of its search: a better one may lie beyond.
    """
    by_start = grouped(outcomes, lambda cell: (cell.lr_max, cell.batch_size, cell.start)).values()
    cases: list[Case] = [grouped(same_start, lambda cell: (cell.method, cell.variant)) for same_start in by_start]
    cases = [case for case in cases if len(case) > 1]
    if not cases:
        return ""
    starts = len({outcome.cell.start for outcome in outcomes}) == len(cases)
    counted = f" of {len(cases)} {'start' if starts else 'case'}s" if len(cases) > 1 else ""
    clauses = [_leaders(cases, final(TRAIN_LOSS), "the lowest training loss", counted)]
    if any(outcome.curves.get(VALID_ACCURACY) for outcome in outcomes):
        clauses += [_leaders(cases, final_error, "the highest validation accuracy", counted)]
    lost = sum(outcome.diverged for outcome in outcomes)
    clauses += [f"{lost} of {len(outcomes)} runs diverged"] * bool(lost)
    bounded = sum(any(run.search.at_bound for runs in case.values() for run in runs) for case in cases)
    if bounded:
        place = f"from {bounded}{counted} " if counted else ""
        clauses += [f"{place}a best learning rate lies at the bound of its search (--lr-max)"]
    if len({outcome.cell.seed for outcome in outcomes}) == 1:
        clauses += ["one seed decides nothing, take three or more (--seeds 3)"]
    sentence = "; ".join(clauses)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _leaders(cases: Sequence[Case], metric: Metric, what: str, counted: str) -> str:
    """``AP2 has the lowest training loss from 2 of 3 starts, BN from 1``, or of one start without counts."""
    wins = Counter(leader for case in cases if (leader := _leader(case, metric)) is not None)
    if not wins:
        return f"which method has {what} is undecided"
    first, *following = sorted(wins, key=lambda method: (-wins[method], method_rank(*method)))
    texts = [f"{method_label(*first)} has {what}" + (f" from {wins[first]}{counted}" if counted else "")]
    texts += [f"{method_label(*method)} from {wins[method]}" for method in following]
    undecided = len(cases) - wins.total()
    return ", ".join(texts + [f"undecided from {undecided}"] * bool(undecided))


def _leader(case: Case, metric: Metric) -> tuple[Method, str] | None:
    """The method that leads in a case; None where that is undecided."""
    samples = {m: Sample(tuple(map(metric, runs)), tuple(r.cell.seed for r in runs)) for m, runs in case.items()}
    best = min(samples, key=lambda method: (samples[method].mean, method_rank(*method)))
    behind = [method for method in samples if method != best]
    several = all(sample.seeds > 1 for sample in samples.values())
    bounded = any(run.search.at_bound for method in behind for run in case[method])
    ahead = all(lower(samples[best], samples[method]) == HOLDS for method in behind)
    return best if several and ahead and not bounded else None


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
    """The page on some runs as text.

    `pictures` is a folder that has, in a folder for each run, the figures as files to put into the page. Verdicts are
    claims of the paper (`paper.verdicts.judge.Verdict`) and `rule` says how they come about; without them the page is
    not about the paper.
    """
    sections = [_section(run, pictures) for run in runs]
    methods = {outcome.cell.method for run in runs for outcome in run.outcomes}
    entries = [figure for section in sections for figure in section["figures"]]
    text: str = (
        environment(_TEMPLATES)
        .get_template("report.html.j2")
        .render(
            sections=sections,
            verdicts=verdicts,
            judged=any(verdict.setting and verdict.verdict != "no data" for verdict in verdicts),  # on runs
            places={f"{figure['folder']}/{figure['name']}": figure["id"] for figure in entries},
            rule=rule,
            # the training curves of the first experiment that has any, the paper's first
            headline=min(entries, key=lambda f: (f["name"] != "training", experiment_rank(f["folder"])), default=None)
            if len(sections) > 1
            else None,
            starts=_starts(methods),
            legend=_legend(methods),
            data={figure["id"]: figure["data"] for figure in entries},
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
        "rows": [(outcome.diverged, _entries(outcome)) for outcome in run.outcomes],
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


def _entries(outcome: Outcome) -> list[_Value]:
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
        figures.draw(figure, folder / "figures" / figure.name, experiment_label(run.experiment))
