"""``varprop reproduce``: the experiments of the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import varprop as vp

from .errors import stoppable
from .options import (
    CompileOption,
    Device,
    DeviceOption,
    EpochsOption,
    JobsOption,
    OutOption,
    RateOption,
    ResumeOption,
    RootOption,
    SeedsOption,
    TensorboardOption,
    TimeOption,
    chosen,
    command_line,
    event_folder,
    listed,
)

CONTINUE = "What is finished is kept: run the command again with --resume."
UNTRAINED = ("relu", "claims")  # made by the report from nothing, and from what lies in the folder
DEMO = "digits"  # has a command of its own
HELP = (
    "mnist, noisy-mnist, noisy-cifar10, naive; small-batches, recurrent, orthogonal, decay; relu (a figure, nothing is "
    "trained); claims (the verdicts on what lies in the folder of the results); all."
)


def known_names() -> list[str]:
    """Everything that can be asked for."""
    from varprop.lab.protocol.experiments import EXPERIMENTS

    return [*EXPERIMENTS, *UNTRAINED, "all"]


def expanded(names: Sequence[str]) -> list[str]:
    """The names, each once, with `all` written out.

    Raises:
        VarpropError: On an unknown name, with those that are known.
    """
    known = known_names()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise vp.VarpropError(f"There is no experiment {unknown[0]!r}; known are {', '.join(known)}.")
    everything = [name for name in known if name not in (DEMO, "all")]
    return list(dict.fromkeys(one for name in names for one in (everything if name == "all" else [name])))


def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="NAMES...", help=HELP, autocompletion=known_names)],
    device: DeviceOption = Device.auto,
    seeds: SeedsOption = None,
    epochs: EpochsOption = None,
    lr_max: RateOption = None,
    root: RootOption = None,
    out: OutOption = Path("runs"),
    resume: ResumeOption = False,
    tensorboard: TensorboardOption = False,
    max_seconds: TimeOption = math.inf,
    jobs: JobsOption = 1,
    methods: Annotated[str | None, typer.Option(help="Only these of standard,weight,batch,analytic.")] = None,
    starts: Annotated[str | None, typer.Option(help="Only these of none,bn,ap2,orthogonal.")] = None,
    compiled: CompileOption = None,
) -> None:
    """Run experiments of the paper and write their tables, figures, verdicts and an HTML report."""
    from varprop.lab.execution import run as runner
    from varprop.lab.protocol.records import ALL_STARTS, METHODS

    from . import results

    wanted = expanded(names)
    with stoppable(CONTINUE):
        found = runner.reproduce(
            [name for name in wanted if name not in UNTRAINED],
            out,
            device=chosen(device),
            seeds=seeds,
            epochs=epochs,
            lr_max=tuple(lr_max) if lr_max else None,
            root=root,
            resume=resume,
            tensorboard=event_folder(out, tensorboard),
            max_seconds=max_seconds,
            jobs=jobs,
            methods=tuple(listed(methods, METHODS, "--methods")) if methods else None,
            starts=tuple(listed(starts, ALL_STARTS, "--starts")) if starts else None,
            compiled=compiled,
            command=command_line(),
        )
        results.show([outcome for outcomes in found.values() for outcome in outcomes], out, wanted)
