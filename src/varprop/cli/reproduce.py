"""``varprop reproduce``: the experiments of the paper."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import varprop as vp
from varprop_lab.names import unknown

from . import options
from .errors import stoppable
from .parser import typer

CONTINUE = "What is finished is kept: run the command again with --resume."
UNTRAINED = ("relu", "claims")  # made by the report from nothing, and from what lies in the folder
STUDIES = ("search", "deep", "questions")  # no experiments of the paper
DEMO = "digits"  # has a command of its own
HELP = (
    "mnist, noisy-mnist, noisy-cifar10, naive; small-batches, recurrent, orthogonal, decay, momentum; relu (a figure, "
    "nothing is trained); claims (the verdicts on what lies in the folder of the results); search (what each search "
    "for the learning rate loses, on a CPU); deep (ResNets and transformers by normalization, on a GPU); questions "
    "(what the paper leaves open, on a CPU); all."
)
SearchChoice = StrEnum("SearchChoice", {"brent": "brent", "grid_brent": "grid+brent"})
OwnWeights = StrEnum("OwnWeights", ["original", "converted"])
Borders = StrEnum("Borders", ["pooled", "plain"])


def known_names() -> list[str]:
    """Everything that can be asked for."""
    from varprop_lab.protocol.experiments import EXPERIMENTS

    return [*EXPERIMENTS, *UNTRAINED, *STUDIES, "all"]


def expanded(names: Sequence[str]) -> list[str]:
    """The names, each once, with `all` written out; one that is not known is refused."""
    known = known_names()
    for name in names:
        if name not in known:
            raise vp.VarpropError(unknown("experiment", name, known))
    everything = [name for name in known if name not in (DEMO, *STUDIES, "all")]
    return list(dict.fromkeys(one for name in names for one in (everything if name == "all" else [name])))


def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAMES...", help=HELP, autocompletion=known_names)],
    device: options.DeviceOption = options.Device.auto,
    seeds: options.SeedsOption = None,
    epochs: options.EpochsOption = None,
    lr_max: options.RateOption = None,
    root: options.RootOption = None,
    out: options.OutOption = Path("runs"),
    resume: options.ResumeOption = False,
    overwrite: options.OverwriteOption = False,
    tensorboard: options.TensorboardOption = False,
    max_seconds: options.TimeOption = math.inf,
    jobs: Annotated[int, typer.Option(min=1, help="Train so many networks at once, each in a process of its own.")] = 1,
    ray: options.RayOption = None,
    methods: Annotated[str | None, typer.Option(help="Only these of standard,weight,batch,analytic.")] = None,
    starts: Annotated[str | None, typer.Option(help="Only these of none,bn,ap2,orthogonal,wn.")] = None,
    search: Annotated[
        SearchChoice | None,
        typer.Option(help="For the learning rate: brent is the paper's; grid+brent, the default, looks around first."),
    ] = None,
    own_weights: Annotated[
        OwnWeights | None,
        typer.Option(help="Of BN from bn and AP2 from ap2: original, as in the paper, or those all others get there."),
    ] = None,
    borders: Annotated[
        Borders | None,
        typer.Option(help="How AP2 counts zeros around images: pooled over positions, or plain as the paper's sums."),
    ] = None,
    tables: Annotated[str | None, typer.Option(help="Of deep: only these, such as resnet18,gpt.")] = None,
    only: Annotated[str | None, typer.Option(help="Of questions: only these, such as truth,dropout.")] = None,
    docs: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Bring the results into DOCS/results too, and write its pages again."),
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile", help="Compile networks on a GPU (noisy-cifar10, deep).", show_default=False),
    ] = None,
) -> None:
    """Run experiments of the paper and write their tables, figures, verdicts and an HTML report."""
    from varprop_lab import report
    from varprop_lab.execution import run as runner
    from varprop_lab.execution import search_study
    from varprop_lab.protocol.records import ALL_STARTS, METHODS
    from varprop_lab.report.result_table import result_table

    wanted = expanded(names)
    settings = {
        "seeds": seeds,
        "epochs": epochs,
        "lr_max": tuple(lr_max) if lr_max else None,
        "methods": options.listed(methods, METHODS, "--methods") if methods else None,
        "starts": options.listed(starts, ALL_STARTS, "--starts") if starts else None,
        "compiled": compiled,
        "search": search.value if search else None,
        "own_weights": own_weights.value if own_weights else None,
        "borders": borders.value if borders else None,
    }
    with stoppable(CONTINUE):
        found = runner.reproduce(
            [name for name in wanted if name not in (*UNTRAINED, *STUDIES)],
            out,
            settings,
            device=device,
            root=root,
            resume=resume,
            overwrite=overwrite,
            tensorboard=out / "tensorboard" if tensorboard else None,
            max_seconds=max_seconds,
            jobs=jobs,
            ray=ray,
        )
        if "search" in wanted:
            typer.echo(f"Searches: {search_study.study(out, root).resolve()}")
        if "deep" in wanted:
            _run_deep(out, root, tables, seeds, jobs, max_seconds, bool(compiled))
        if "questions" in wanted:
            _answer(out, root, only, seeds)
        if set(wanted) <= set(STUDIES):
            return
        if outcomes := [outcome for of_one in found.values() for outcome in of_one]:
            typer.echo(result_table(outcomes))
        page = report.write(out, wanted)
        if "claims" in wanted:
            _echo_verdicts(out / "claims.json")
        typer.echo(f"Report: {page.resolve()}")
        if docs is not None:
            typer.echo(f"Documentation: {report.write_docs(out, docs).resolve()}")


def _echo_verdicts(file: Path) -> None:
    """Print each claim of the paper with its verdict; the numbers are in the report."""
    for claim in json.loads(file.read_text("utf-8"))["claims"]:
        typer.echo(f"{claim['verdict']:<14}  {claim['claim']}")


def _answer(out: Path, root: Path | None, only: str | None, seeds: int | None) -> None:
    """Make the runs of the open questions that are missing, and print what all of them show."""
    from varprop_lab.questions.study import QUESTIONS, study

    chosen = options.listed(only, tuple(QUESTIONS), "--only") if only else tuple(QUESTIONS)
    study(out, root, chosen, seeds or 3, say=typer.echo)


def _run_deep(
    out: Path, root: Path | None, tables: str | None, seeds: int | None, jobs: int, max_seconds: float, compiled: bool
) -> None:
    """Make the runs of the deep networks that are missing, and print the tables of all."""
    from varprop_lab.deep.figure import draw_losses
    from varprop_lab.deep.runs import HELD_OUT, TEST, Study
    from varprop_lab.deep.tables import TABLES

    deadline = time.monotonic() + max_seconds
    chosen = options.listed(tables, tuple(TABLES), "--tables") if tables else tuple(TABLES)
    for table in chosen:
        study = Study(table, out / "deep.json", seeds or 4, jobs, deadline, root, compiled, say=typer.echo)
        study.make()
        for judged in (HELD_OUT, TEST):
            if study.has(judged):
                typer.echo(f"\n{table}, {judged}\n{study.shown(judged)}")
    resnets = [Study(table, out / "deep.json", seeds or 4) for table in chosen if table.startswith(("resnet", "plain"))]
    if find_spec("matplotlib") and draw_losses(resnets, out / "deep"):  # the runs are what matters on a bare machine
        typer.echo(f"\nFigure: {(out / 'deep.png').resolve()}")
