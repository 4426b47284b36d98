"""``varprop compare``: the same comparison for a model of one's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from varprop_lab.protocol.records import ALL_METHODS, METHODS, STARTS

from . import options
from .errors import stoppable
from .parser import typer
from .reproduce import CONTINUE

INITS = (*STARTS, "orthogonal")  # weight norm's own start is for the paper's naive comparison


def compare(
    dataset: Annotated[
        str,
        typer.Option(
            help="mnist, cifar10, digits, or path.py:function, which returns training inputs, training targets, test "
            "inputs and test targets: images (N, C, H, W), other floats (N, ...) or tokens (integers), and classes."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="path.py:function, which returns the plain model, an nn.Module; its batch norms are left out."
        ),
    ],
    methods: Annotated[str, typer.Option(help="Separated by commas; also layer, group.")] = ",".join(METHODS),
    inits: Annotated[str, typer.Option(help="Starting points, separated by commas; also orthogonal.")] = ",".join(
        STARTS
    ),
    loss: Annotated[
        str | None, typer.Option(help="path.py:function of outputs and targets, instead of cross-entropy.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="A class of torch.optim, or path.py:function of parameter groups and lr, instead of Adam."),
    ] = None,
    shift: Annotated[int, typer.Option(min=0, help="Random offsets of the images, in pixels.")] = 0,
    flip: Annotated[bool, typer.Option("--flip", help="Mirror half of the images.")] = False,
    noise: Annotated[float, typer.Option(min=0.0, help="Variance of the noise on pixels in [0, 1].")] = 0.0,
    batch_size: Annotated[int, typer.Option(min=2, help="Samples in a step.")] = 128,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Train cell by cell: for models too large for an ensemble.")
    ] = False,
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
    ray: options.RayOption = None,
) -> None:
    """Compare normalizations of your own model: equal starts, and a learning rate found for each."""
    from varprop_lab import comparison
    from varprop_lab.data.augmentation import Augmentation

    given: dict[str, Any] = {"seeds": seeds, "epochs": epochs, "lr_max": tuple(lr_max) if lr_max else None}
    with stoppable(CONTINUE):
        found = comparison.compare(
            model,
            dataset,
            methods=options.listed(methods, ALL_METHODS, "--methods"),
            starts=options.listed(inits, INITS, "--inits"),
            loss=loss,
            optimizer=optimizer,
            out=out,
            augmentation=Augmentation(shift, flip, noise),
            batch_size=batch_size,
            together=not one_at_a_time,
            device=device,
            root=root,
            resume=resume,
            overwrite=overwrite,
            tensorboard=out / "tensorboard" if tensorboard else None,
            max_seconds=max_seconds,
            ray=ray,
            **{name: value for name, value in given.items() if value is not None},
        )
        typer.echo(str(found))
        typer.echo(f"Report: {found.report().resolve()}")
