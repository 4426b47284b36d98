"""``varprop bench``: what the analytic normalization costs, beside its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from .errors import stoppable
from .options import Device, DeviceOption, OutOption, listed
from .parser import typer


def bench(
    cases: Annotated[
        str | None, typer.Option(help="cifar, mlp, resnet50, unet; separated by commas. On a CPU the first two.")
    ] = None,
    modes: Annotated[
        str | None, typer.Option(help="eager, compiled, captured; separated by commas. On a CPU the first.")
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            help="none, none-no-bias, weight, batch, group, layer, analytic; separated by commas. By default all, "
            "except where compiling them would take too long."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of every variant.")] = None,
    seconds: Annotated[float, typer.Option(min=1e-3, help="For all turns of one cell.")] = 0.5,
    max_seconds: Annotated[
        float | None, typer.Option("--max-seconds", min=1.0, help="Begin nothing new after that.")
    ] = None,
    device: DeviceOption = Device.auto,
    out: OutOption = Path("runs/bench"),
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True)] = False,
) -> None:
    """Measure training steps with each normalization side by side: time, memory, kernels."""
    from varprop_lab.bench.cases import CASES, MODES
    from varprop_lab.bench.run import measure
    from varprop_lab.bench.session import Options
    from varprop_lab.bench.variants import VARIANTS

    options = Options(
        device=device,
        cases=listed(cases, CASES, "--cases") if cases else None,
        modes=listed(modes, MODES, "--modes") if modes else None,
        variants=listed(variants, tuple(VARIANTS), "--variants") if variants else None,
        rounds=rounds,
        seconds=seconds,
        max_seconds=max_seconds,
        out=out,
        tiny=tiny,
    )
    with stoppable("What was measured is kept in the folder of the results."):
        measure(options)
