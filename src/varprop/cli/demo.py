"""``varprop demo``: the whole comparison in little, without a download."""

from __future__ import annotations

import itertools
from pathlib import Path

from .errors import stoppable
from .options import Device, DeviceOption, OutOption, ResumeOption
from .parser import typer
from .reproduce import CONTINUE, DEMO


def demo(
    device: DeviceOption = Device.cpu,
    out: OutOption = Path("runs/demo"),
    resume: ResumeOption = False,
) -> None:
    """Compare the four parametrizations from the three starting points on scikit-learn's digits, in about a minute."""
    from varprop_lab import report
    from varprop_lab.execution import run as runner

    place = out if resume else unused(out)
    with stoppable(CONTINUE):
        found = runner.reproduce([DEMO], place, device=device, resume=resume)
        typer.echo(report.answer_and_table(found[DEMO]))
        typer.echo(f"Report: {report.write_one(place, DEMO).resolve()}")


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that does not exist: an earlier demo is not overwritten."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([folder], numbered) if not candidate.exists())
