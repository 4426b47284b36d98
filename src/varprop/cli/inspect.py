"""The command ``varprop inspect``: see inside a network without data, in one state or beside another."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import sys
from json import dumps
from pathlib import Path
from typing import Any

import varprop as vp

from .inputs import InputOptions, Inputs, make_inputs
from .models import load, load_weights
from .options import add_command, add_root, number, stoppable
from .progress import Progress, show

TARGET = (
    "package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME (or hf:FOLDER with a "
    "config.json)."
)
SHAPE = (
    "Shape of one input without the batch axis, such as 3,224,224, or 128 for 128 tokens. Repeat for several inputs."
)
DATA = (
    "A folder of pictures, or mnist, cifar10, digits. Mean and std of the input are measured on it; with --mean and "
    "--std its channels are scaled to these."
)
POSITIONS = (
    "Compute statistics for every position of an image instead of one for all: slower, but right at borders and behind "
    "averages too."
)
COVARIANCE = (
    "Follow the covariance of all units, starting from that of --data. For trained networks, whose units are far from "
    "independent, with up to a few thousand units per layer."
)
AGAINST = (
    "Compare with another state: a file of earlier weights, `fresh` for the model as built, without --weights, or "
    "`init` for the same weights after vp.init_."
)
LOG_SECONDS = 2.0  # between two lines of progress in a log, at least
FRESH, INIT = "fresh", "init"
TEXT = """Statistics, gradients and problems of every layer, from the weights alone.

Ends with exit code 1 if a finding of severity error exists in the state that TARGET and --weights give."""


def add_to(commands: Any) -> None:
    """Add ``inspect`` to the commands."""
    parser = add_command(commands, "inspect", inspect, TEXT)
    parser.add_argument("target", metavar="TARGET", help=TARGET)
    add_shape(parser)
    text = "Mean of the model's input: one number, or one per channel."
    parser.add_argument("--mean", metavar="NUMBERS", help=text)
    parser.add_argument("--std", metavar="NUMBERS", help="Standard deviation of the input, likewise.")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="Weights to load: a safetensors or torch file.")
    parser.add_argument("--data", help=DATA)
    text = "Also measure the same numbers, on --data or else on Gaussian inputs."
    parser.add_argument("--check", action="store_true", help=text)
    parser.add_argument("--samples", type=number(int, 16), default=64, help="How many inputs --check runs.")
    parser.add_argument("--positions", action="store_true", help=POSITIONS)
    parser.add_argument("--covariance", choices=("full",), help=COVARIANCE)
    parser.add_argument("--against", metavar="STATE", help=AGAINST)
    text = "Write an HTML page, one self-contained file."
    parser.add_argument("--html", type=Path, metavar="FILE", help=text)
    text = "With --against: both states in one picture (.png, .svg, .pdf)."
    parser.add_argument("--figure", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", metavar="FILE", help="Write everything as JSON; - for standard output.")
    text = "Write activation ranges and bias corrections for rounded weights as JSON."
    parser.add_argument("--quantization", type=Path, metavar="FILE", help=text)
    parser.add_argument(
        "--bits", type=number(int, 2, 16), default=8, help="Bits of the rounded weights, for --quantization."
    )
    text = "Seed of the random weights, and of the inputs that --check draws."
    parser.add_argument("--seed", type=number(int, 0), default=0, help=text)
    text = "The deepest level of modules in the table; the model itself is level 0."
    parser.add_argument("--depth", type=number(int, 0), help=text)
    add_root(parser)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add ``--input-shape``."""
    parser.add_argument("--input-shape", action="append", default=[], metavar="SHAPE", help=SHAPE)


def inspect(options: argparse.Namespace) -> int:
    """Inspect a model and write what was asked for; the exit status."""
    check_against(options.against, options.weights, options.figure)
    _check_folders(options.html, options.figure, options.quantization, None if options.json == "-" else options.json)
    # whatever a model prints does not end up among the JSON
    output = contextlib.redirect_stdout(sys.stderr) if options.json == "-" else contextlib.nullcontext()
    with stoppable("Nothing was written."), output:
        named = load(options.target, options.seed)
        if options.weights is not None:
            load_weights(named.model, options.weights)
        names = [field.name for field in dataclasses.fields(InputOptions)]
        inputs = make_inputs(named, options.target, InputOptions(**{name: getattr(options, name) for name in names}))
        # both states before the work: a file that does not fit is refused at once
        earlier = None
        if options.against is not None:
            as_built = load(options.target, options.seed).model
            earlier = other_model(as_built, named.model, options.against, inputs)
        report = result = _inspected(named.model, inputs, options)
        if options.against is not None:
            result = compared(report, _inspected(earlier, inputs, options), options.weights, options.against)
        roundings = report.quantization(options.bits) if options.quantization is not None else None
    if options.quantization is not None:
        options.quantization.expanduser().write_text(dumps(roundings, allow_nan=False) + "\n")
    _write(result, options)
    return 1 if report.errors else 0


def _check_folders(*files: Path | str | None) -> None:
    """Refuse before the work what could not be written after it."""
    for file in files:
        if file is not None and not Path(file).expanduser().parent.is_dir():
            raise vp.VarpropError(f"There is no folder {Path(file).expanduser().parent} to write {Path(file).name} to.")


def _write(result: Any, options: argparse.Namespace) -> None:
    """Files first: whoever reads the table may stop reading."""
    if options.json is not None and options.json != "-":
        result.to_json(Path(options.json).expanduser())
    if options.html is not None:
        result.to_html(options.html.expanduser())
        print(f"Page: {options.html}", file=sys.stderr)
    if options.figure is not None:
        result.figure(options.figure.expanduser())
    if options.json == "-":
        print(result.to_json())
    elif options.against is not None:
        result.show()
    else:
        result.show(depth=options.depth)


def _inspected(model: Any, inputs: Inputs, options: argparse.Namespace) -> Any:
    settings = {name: getattr(options, name) for name in ("samples", "seed", "covariance")}
    with _progress() as progress:
        return vp.inspect(
            model, inputs.moments, example=inputs.example, check=inputs.check, progress=progress.reach, **settings
        )


def _progress() -> contextlib.AbstractContextManager[Progress]:
    """On standard error: a bar on a terminal; in a log a line now and then, and none if that is all it takes."""
    if sys.stderr.isatty():
        return show(1, "inspect")
    return contextlib.nullcontext(Progress(1, "inspect", sys.stderr, seconds=LOG_SECONDS))


def check_against(against: str | None, weights: Path | None, figure: Path | None) -> None:
    """Refuse options that do not go together, before anything is loaded."""
    if figure is not None and against is None:
        raise vp.VarpropError("--figure draws two states: name the other by --against.")
    if against == FRESH and weights is None:
        raise vp.VarpropError("--against fresh compares with the model as built: give the other state by --weights.")
    if against not in (None, FRESH, INIT) and not Path(str(against)).expanduser().is_file():
        raise vp.VarpropError(f"--against takes a file of weights, {FRESH} or {INIT}; there is no file {against}.")


def other_model(as_built: Any, model: Any, against: str, inputs: Inputs) -> Any:
    """The model in the state that ``--against`` names."""
    if against == INIT:
        return vp.init_(copy.deepcopy(model), inputs.moments, example=inputs.example)
    if against != FRESH:
        load_weights(as_built, Path(against))
    return as_built


def compared(report: vp.Report, earlier: vp.Report, weights: Path | None, against: str) -> Any:
    """The comparison of both reports, the earlier state first: ``vp.init_`` comes after, weights in a file before."""
    name = weights.name if weights is not None else "as built"
    if against == INIT:
        return report.compare(earlier, (name, "vp.init_"))
    if against == FRESH:
        return earlier.compare(report, ("as built", name))
    file = Path(against).expanduser()
    if weights is not None and weights.name == file.name:
        return earlier.compare(report, (str(file), str(weights)))
    return earlier.compare(report, (file.name, name))
