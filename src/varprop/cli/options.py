"""Options that several commands share, each declared once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import varprop as vp
from varprop_lab.names import did_you_mean

from .parser import typer


class Device(StrEnum):
    """Where to compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


DeviceOption = Annotated[Device, typer.Option("--device", help="Where to compute; auto takes a GPU if there is one.")]
SeedsOption = Annotated[
    int | None, typer.Option("--seeds", min=1, help="Runs of each cell, with seeds 0, 1, ...; one by default.")
]
EpochsOption = Annotated[
    int | None, typer.Option("--epochs", min=1, help="Epochs of training, instead of the experiment's own.")
]
RateOption = Annotated[
    list[float] | None,
    typer.Option(
        "--lr-max",
        min=1e-5,
        max=10.0,
        help="Upper bound of the learning rate search, instead of 1e-2; several times for several bounds.",
    ),
]
RootOption = Annotated[
    Path | None,
    typer.Option(
        "--root", file_okay=False, help="Folder of the data; otherwise $VARPROP_DATA or the user's cache directory."
    ),
]
OutOption = Annotated[Path, typer.Option("--out", file_okay=False, help="Folder of the results.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue what was begun in the folder of the results.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Delete the run that is in the folder of the results, and start anew.")
]
TensorboardOption = Annotated[
    bool, typer.Option("--tensorboard", help="Write event files to OUT/tensorboard as well (extra `tracking`).")
]
TimeOption = Annotated[
    float,
    typer.Option("--max-seconds", min=0.0, help="Stop at the next piece after this time; --resume goes on from there."),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Run on Ray: the address of a cluster, `auto` for the one this machine is in, or `local` (extra `ray`). "
        "Networks that are trained together are one task.",
    ),
]


def listed(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Names separated by commas, in the order given; one that is not known is refused."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        near = did_you_mean(unknown[0], known) if unknown else ""
        raise vp.VarpropError(f"{option} takes names out of {','.join(known)}, not {text!r}.{near}")
    return tuple(dict.fromkeys(names))
