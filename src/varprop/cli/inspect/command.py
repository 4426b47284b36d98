"""The command ``varprop inspect``: see inside a network without data, in one state or beside another."""

from __future__ import annotations

import contextlib
import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import varprop as vp
from varprop_lab.progress import Progress, show
from varprop_lab.store.files import write_atomically

from ..errors import stoppable
from ..options import RootOption
from ..parser import typer
from .files import load_weights
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
LOG_SECONDS = 2.0  # between two lines of progress in a log, at least
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
    # whatever a model prints does not end up among the JSON
    output = contextlib.redirect_stdout(sys.stderr) if json == "-" else contextlib.nullcontext()
    with stoppable("Nothing was written."), output:
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
        content = dumps(roundings, allow_nan=False) + "\n"
        write_atomically(quantization.expanduser(), content.encode(), then="run the command again")
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
    if json is not None and json != "-":
        result.to_json(Path(json).expanduser())
    if html is not None:
        result.to_html(html.expanduser())
        print(f"Page: {html}", file=sys.stderr)
    if figure is not None:
        result.figure(figure.expanduser())
    if json == "-":
        print(result.to_json())
    else:
        result.show()


def _inspected(model: Any, inputs: Inputs, samples: int, seed: int) -> Any:
    settings: dict[str, Any] = {"check": inputs.check, "samples": samples, "seed": seed}
    with _progress() as progress:
        return vp.inspect(model, inputs.moments, example=inputs.example, progress=progress.reach, **settings)


def _progress() -> contextlib.AbstractContextManager[Progress]:
    """On standard error: a bar on a terminal; in a log a line now and then, and none if that is all it takes."""
    if sys.stderr.isatty():
        return show(1, "inspect")
    return contextlib.nullcontext(Progress(1, "inspect", sys.stderr, seconds=LOG_SECONDS))
