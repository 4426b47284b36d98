"""The command ``varprop inspect``: see inside a network without data, in one state or beside another."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeAlias

import varprop as vp

from ..errors import stoppable
from ..options import RootOption
from ..parser import typer
from .files import load_weights, write_json
from .inputs import InputOptions, Inputs, make_inputs
from .models import load
from .states import check_against, compared, other_model

TARGET = (
    "package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME (or hf:FOLDER with a "
    "config.json)."
)
SHAPE = (
    "Shape of one input without the batch axis, such as 3,224,224; 128 tokens: 128. Several times for several inputs."
)
DATA = (
    "A folder of pictures, or mnist, cifar10, digits: the mean and std are measured on it; where --mean and --std are "
    "given, its channels are brought to them."
)
POSITIONS = (
    "Follow every position of an image by itself instead of one for all: right at borders and behind averages too, but "
    "slower."
)
AGAINST = (
    "Compare with an earlier state: a file of weights, or `fresh` for the model as built, without --weights; `init` "
    "compares with the same weights after vp.init_."
)
Text: TypeAlias = str | None
File: TypeAlias = Path | None


def inspect(
    target: Annotated[str, typer.Argument(help=TARGET)],
    input_shape: Annotated[list[str] | None, typer.Option(help=SHAPE)] = None,
    mean: Annotated[Text, typer.Option(help="Mean of what enters the model: one number, or one a channel.")] = None,
    std: Annotated[Text, typer.Option(help="Its standard deviation, likewise.")] = None,
    weights: Annotated[File, typer.Option(help="Weights to load: a safetensors or torch file.")] = None,
    data: Annotated[Text, typer.Option(help=DATA)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the same numbers on the data, or on Gaussian inputs without it.")
    ] = False,
    samples: Annotated[int, typer.Option(min=16, help="How many inputs --check runs.")] = 64,
    positions: Annotated[bool, typer.Option("--positions", help=POSITIONS)] = False,
    against: Annotated[Text, typer.Option(help=AGAINST)] = None,
    html: Annotated[File, typer.Option(help="Write a page to open in a browser, one file without links.")] = None,
    figure: Annotated[File, typer.Option(help="With --against: both states in one picture (.png, .svg, .pdf).")] = None,
    json: Annotated[Text, typer.Option(help="Write everything as JSON; - for standard output.")] = None,
    quantization: Annotated[
        File, typer.Option(help="Write activation ranges and bias corrections for rounded weights as JSON.")
    ] = None,
    bits: Annotated[int, typer.Option(min=2, max=16, help="Of the weights, for --quantization.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights, and of the inputs that --check draws.")] = 0,
    root: RootOption = None,
) -> None:
    """Statistics, gradients and problems of every layer, from the weights alone.

    Ends with exit code 1 if a finding of severity error exists in the state that TARGET and --weights give.
    """
    check_against(against, weights, figure)
    _check_folders(html, figure, quantization, None if json == "-" else json)
    with stoppable("Nothing was written."), _quiet_output(json == "-"):
        found = load(target, seed)
        if weights is not None:
            load_weights(found.model, weights)
        options = InputOptions(input_shape or [], mean, std, data, check, samples, root, positions)
        inputs = make_inputs(found, target, options)
        # both states before the work: a file that does not fit is refused at once
        other = None if against is None else other_model(load(target, seed).model, found.model, against, inputs)
        report = result = _inspected(found.model, inputs, samples, seed)
        if against is not None:
            result = compared(report, _inspected(other, inputs, samples, seed), weights, against)
        roundings = report.quantization(bits) if quantization is not None else None
    if quantization is not None:
        write_json(roundings, quantization.expanduser())
    _write(result, html, figure, json)
    if report.errors:
        raise typer.Exit(1)


def _check_folders(*files: Path | str | None) -> None:
    """Refuse before the work what could not be written after it."""
    for file in files:
        if file is not None and not Path(file).expanduser().parent.is_dir():
            raise vp.VarpropError(f"There is no folder {Path(file).expanduser().parent} to write {Path(file).name} to.")


def _write(result: Any, html: Path | None, figure: Path | None, json: str | None) -> None:
    """Files first: whoever reads the table may stop reading."""
    if json not in (None, "-"):
        result.to_json(json)
    if html is not None:
        result.to_html(html.expanduser())
        print(f"Page: {html}", file=sys.stderr)
    if figure is not None:
        result.figure(figure.expanduser())
    if json == "-":
        print(result.to_json())
    else:
        result.show()


@contextlib.contextmanager
def _quiet_output(wanted: bool) -> Iterator[None]:
    """Whatever a model prints does not end up among the JSON."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def _inspected(model: Any, inputs: Inputs, samples: int, seed: int) -> Any:
    settings: dict[str, Any] = {"check": inputs.check, "samples": samples, "seed": seed}
    with _progress() as progress:
        return vp.inspect(model, inputs.moments, example=inputs.example, progress=progress, **settings)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, float, int], None]]:
    """Shows the steps of `vp.inspect` on standard error: as a bar on a terminal, in a log as a line now and then."""
    if not sys.stderr.isatty():
        yield PlainLines(sys.stderr)
        return
    from varprop.lab import progress

    with contextlib.ExitStack() as stack:
        bars: list[Any] = []

        def step(text: str, done: float, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(progress.show(total, "inspect", stream=sys.stderr)))
            bars[0].advance(round(done - bars[0].done, 2), text)

        yield step


class PlainLines:
    """One line every few seconds, with what is being done and the time left; none for what takes no longer."""

    def __init__(self, stream: TextIO, seconds: float = 2.0) -> None:
        self.stream, self.seconds = stream, seconds
        self.started = self.printed = time.monotonic()

    def __call__(self, text: str, done: float, total: int) -> None:
        """Called with what is being done, the steps done and all steps."""
        now = time.monotonic()
        if now - self.printed >= self.seconds:
            self.printed, gone = now, now - self.started
            left = f", about {gone * (total - done) / done:.0f} s left" if done else ""
            print(f"inspect: {100 * done / total:.0f} %, {gone:.0f} s gone{left}, {text}", file=self.stream, flush=True)
