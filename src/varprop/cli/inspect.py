"""``varprop inspect``: see inside a network without data, in one state or beside another."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import varprop as vp

from .errors import stoppable
from .inspect_compare import check_against, other_state
from .inspect_files import write_json
from .inspect_inputs import data_of, gaussian, per_channel, shape_of, standardized
from .inspect_progress import shown
from .inspect_targets import Target, check_inputs, check_runs, load, load_weights
from .options import RootOption

BATCH = 16  # inputs that --check runs at a time, at most
RUNS = 8  # and how often at least: standard errors come from the differences


@dataclass(frozen=True)
class Given:
    """What the options say of the input."""

    mean: str | None
    std: str | None
    data: str | None
    check: bool
    samples: int
    root: Path | None
    positions: bool


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME (or hf:FOLDER "
            "with a config.json)."
        ),
    ],
    input_shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Shape of one input without the batch axis, such as 3,224,224; 128 tokens: 128. Several times for "
            "several inputs."
        ),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Mean of what enters the model: one number, or one a channel.")
    ] = None,
    std: Annotated[str | None, typer.Option(help="Its standard deviation, likewise.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights to load: a safetensors or torch file.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder of pictures, or mnist, cifar10, digits: the mean and std are measured on it; where --mean "
            "and --std are given, its channels are brought to them."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure the same numbers on the data, or on Gaussian inputs without it.")
    ] = False,
    samples: Annotated[int, typer.Option(min=16, help="How many inputs --check runs.")] = 64,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Follow every position of an image by itself instead of one for all: right at borders and behind "
            "averages too, but slower.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with an earlier state: a file of weights, or `fresh` for the model as built, without "
            "--weights; `init` compares with the same weights after vp.init_."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page to open in a browser, one file without links.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="With --against: both states in one picture (.png, .svg, .pdf).")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - for standard output.")] = None,
    quantization: Annotated[
        Path | None,
        typer.Option(help="Write activation ranges and bias corrections for rounded weights as JSON."),
    ] = None,
    bits: Annotated[int, typer.Option(min=2, max=16, help="Of the weights, for --quantization.")] = 8,
    root: RootOption = None,
) -> None:
    """Statistics, gradients and problems of every layer, from the weights alone.

    Ends with exit code 1 if a finding of severity error exists in the state that TARGET and --weights give.
    """
    check_against(against, weights, figure)
    _check_folders(html, figure, quantization, None if json == "-" else json)
    with stoppable("Nothing was written."), _quiet_output(json == "-"):
        found = load(target)
        if weights is not None:
            load_weights(found.model, weights)
        given = Given(mean, std, data, check, samples, root, positions)
        inputs = _inputs(found, target, _shapes(input_shape, found, target), given)
        report = _inspected(found.model, inputs, samples)
        other = None
        if against is not None:
            other = other_state(target, found.model, weights, against, inputs.moments, inputs.example)
            compared = other.ordered(report, _inspected(other.model, inputs, samples))
        roundings = report.quantization(bits) if quantization is not None else None
    if quantization is not None:
        write_json(roundings, quantization.expanduser())
    _give(report if other is None else compared, html, figure, json)
    if report.errors:
        raise typer.Exit(1)


def _check_folders(*files: Path | str | None) -> None:
    """Refuse before the work what could not be written after it."""
    for file in files:
        if file is not None and not Path(file).expanduser().parent.is_dir():
            raise vp.VarpropError(f"There is no folder {Path(file).expanduser().parent} to write {Path(file).name} to.")


def _give(result: Any, html: Path | None, figure: Path | None, json: str | None) -> None:
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


def _shapes(texts: list[str] | None, found: Target, target: str) -> list[tuple[int, ...]]:
    """The shape of every input."""
    if not texts and found.shape is None:
        raise vp.VarpropError(f"The shape of the input of {target} is not known: give it by --input-shape 3,224,224.")
    return [shape_of(text) for text in texts] if texts else [found.shape or ()]


@dataclass(frozen=True)
class Inputs:
    """What every state of the model is inspected with."""

    moments: Any
    example: Any
    check: Any


def _inspected(model: Any, inputs: Inputs, samples: int) -> vp.Report:
    with shown() as progress:
        return vp.inspect(
            model, inputs.moments, example=inputs.example, check=inputs.check, samples=samples, progress=progress
        )


def _inputs(found: Target, target: str, shapes: list[tuple[int, ...]], given: Given) -> Inputs:
    check_inputs(found.model, target, len(shapes))
    if found.tokens is not None:
        return _over_tokens(found, target, shapes[0], given)
    import torch

    dtype = next((p.dtype for p in found.model.parameters() if p.is_floating_point()), torch.float32)
    check_runs(found.model, [torch.zeros(1, *shape, dtype=dtype) for shape in shapes], target)
    if len(shapes) > 1:
        return _several(shapes, given, dtype)
    (shape,) = shapes
    mean, std = per_channel(given.mean, "--mean", shape), per_channel(given.std, "--std", shape)
    inputs = None
    if given.data is not None:
        inputs = standardized(data_of(given.data, shape, given.root).to(dtype), mean, std)
    if inputs is None:
        moments = gaussian(shape, mean, std, dtype, given.positions)
    else:
        moments = vp.input_moments(inputs, "element" if given.positions else "channel")
    check = None if not given.check else "gaussian" if inputs is None else inputs
    available = given.samples if inputs is None else min(given.samples, len(inputs))
    return Inputs(moments, torch.zeros(_batch(available, given), *shape, dtype=dtype), check)


def _batch(available: int, given: Given) -> int:
    return max(1, min(BATCH, available // RUNS)) if given.check else 1


def _several(shapes: list[tuple[int, ...]], given: Given, dtype: Any) -> Inputs:
    """Independent inputs, all with the mean and std given."""
    import torch

    if given.data is not None:
        raise vp.VarpropError("--data is for one input, and several shapes were given: leave it out.")
    batch = _batch(given.samples, given)
    values = [(per_channel(given.mean, "--mean", shape), per_channel(given.std, "--std", shape)) for shape in shapes]
    moments = tuple(gaussian(shape, *own, dtype, given.positions) for shape, own in zip(shapes, values, strict=True))
    examples = tuple(torch.zeros(batch, *shape, dtype=dtype) for shape in shapes)
    return Inputs(moments, examples, "gaussian" if given.check else None)


def _over_tokens(found: Target, target: str, shape: tuple[int, ...], given: Given) -> Inputs:
    import torch

    if given.data is not None or given.mean is not None or given.std is not None:
        raise vp.VarpropError(f"{target} takes tokens, all equally likely: leave out --data, --mean and --std.")
    if given.positions:
        raise vp.VarpropError(f"{target} takes tokens, and --positions is for images: leave it out.")
    example = torch.zeros(1, *shape, dtype=torch.long)
    check_runs(found.model, [example], target)
    return Inputs(vp.Tokens.uniform(found.tokens or 1), example, "gaussian" if given.check else None)
