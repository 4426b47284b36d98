"""``varprop inspect``: see inside a network without data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import varprop as vp

from .errors import stoppable
from .inspect_inputs import data_of, gaussian, numbers, per_channel, standardized
from .inspect_targets import Target, check_runs, check_single_input, load, load_weights
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


def inspect(
    target: Annotated[
        str,
        typer.Argument(
            help="package.module:callable, file.py:factory, torchvision:NAME, timm:NAME or hf:NAME (or hf:FOLDER "
            "with a config.json)."
        ),
    ],
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of one input without the batch axis, such as 3,224,224; 128 tokens: 128.")
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
    json: Annotated[str | None, typer.Option(help="Write everything as JSON; - for standard output.")] = None,
    root: RootOption = None,
) -> None:
    """Statistics, gradients and problems of every layer, from the weights alone.

    Ends with exit code 1 if a finding of severity error exists.
    """
    with stoppable("Nothing was written."), _quiet_output(json == "-"):
        found = load(target)
        if weights is not None:
            load_weights(found.model, weights)
        given = Given(mean, std, data, check, samples, root)
        report = _inspected(found, target, _shape(input_shape, found, target), given)
    _give(report, json)
    if report.errors:
        raise typer.Exit(1)


def _give(report: vp.Report, json: str | None) -> None:
    if json == "-":
        print(report.to_json())
        return
    report.show()
    if json is not None:
        report.to_json(json)


@contextlib.contextmanager
def _quiet_output(wanted: bool) -> Iterator[None]:
    """Whatever a model prints does not end up among the JSON."""
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield


def _shape(text: str | None, found: Target, target: str) -> tuple[int, ...]:
    if text is None and found.shape is None:
        raise vp.VarpropError(f"The shape of the input of {target} is not known: give it by --input-shape 3,224,224.")
    shape = tuple(numbers(text, "--input-shape", int)) if text is not None else found.shape
    assert shape is not None
    if any(extent < 1 for extent in shape):
        raise vp.VarpropError(f"--input-shape takes extents of 1 and more, not {text!r}.")
    return shape


def _inspected(found: Target, target: str, shape: tuple[int, ...], given: Given) -> vp.Report:
    check_single_input(found.model, target)
    if found.tokens is not None:
        return _over_tokens(found, target, shape, given)
    import torch

    dtype = next((p.dtype for p in found.model.parameters() if p.is_floating_point()), torch.float32)
    check_runs(found.model, torch.zeros(1, *shape, dtype=dtype), target)
    mean, std = per_channel(given.mean, "--mean", shape), per_channel(given.std, "--std", shape)
    inputs = None
    if given.data is not None:
        inputs = standardized(data_of(given.data, shape, given.root).to(dtype), mean, std)
    moments = gaussian(shape, mean, std, dtype) if inputs is None else vp.input_moments(inputs)
    check = None if not given.check else "gaussian" if inputs is None else inputs
    available = given.samples if inputs is None else min(given.samples, len(inputs))
    batch = max(1, min(BATCH, available // RUNS)) if given.check else 1
    example = torch.zeros(batch, *shape, dtype=dtype)
    return vp.inspect(found.model, moments, example=example, check=check, samples=given.samples)


def _over_tokens(found: Target, target: str, shape: tuple[int, ...], given: Given) -> vp.Report:
    import torch

    if given.data is not None or given.mean is not None or given.std is not None:
        raise vp.VarpropError(f"{target} takes tokens, all equally likely: leave out --data, --mean and --std.")
    example = torch.zeros(1, *shape, dtype=torch.long)
    check_runs(found.model, example, target)
    tokens = vp.Tokens.uniform(found.tokens or 1)
    return vp.inspect(
        found.model, tokens, example=example, check="gaussian" if given.check else None, samples=given.samples
    )
