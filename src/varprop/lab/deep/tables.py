"""What is compared: the rows of every table, each with the rates that are tried and the options of the example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

CIFAR, FINETUNE, VIT, GPT = "train_cifar.py", "finetune_cifar.py", "train_vit.py", "train_gpt.py"
METHODS = {
    "batch norm": ["--norm", "batch"],
    "batch norm, clipped": ["--norm", "batch", "--clip", "2"],
    "analytic, deep form": ["--norm", "analytic"],
    "analytic, paper's form": ["--norm", "analytic", "--form", "paper"],
    "group norm": ["--norm", "group"],
    "layer norm": ["--norm", "layer"],
    "weight norm": ["--norm", "weight"],
    "none": ["--norm", "none"],
}
RATES = {"weight norm": (0.2, 0.05, 0.1), "none": (0.05, 0.02, 0.1)}  # peaks that are tried
USUAL_RATES = (0.2, 0.1, 0.4)
TWO = ("batch norm", "analytic, deep form")
SIZES = (2, 4, 8, 32, 256)
SHORT = ["--epochs", "5"]  # batches of 2 take a hundred times as many steps
CLIPPED, UNSCALED = "analytic, deep form, clip scaled", ["--clip", "2"]
START = ["--norm", "batch", "--classes", "0", "4"]  # of fine-tuning, by the first example

FAST = ["--scale-rate", "10"]  # scales and shifts learn ten times as fast as weights
TRANSFORMERS = {
    "layer norm": (["--norm", "layer"], (1e-3, 3e-3, 6e-3)),
    "layer norm, QK norm": (["--norm", "layer", "--qk-norm"], (1e-3, 2e-3, 3e-3)),
    "RMS norm": (["--norm", "rms"], (1e-3, 3e-3)),
    "DyT": (["--norm", "dyt"], (1e-3, 3e-3)),
    "none": (["--norm", "none"], (1e-3, 3e-4)),
    "analytic, fast scales, QK norm": (["--norm", "analytic", *FAST, "--qk-norm"], (2e-3, 1e-3, 3e-3)),
    "analytic": (["--norm", "analytic"], (1e-3, 2e-3)),
}
VISION = {
    "layer norm": (["--norm", "layer"], (1e-3, 2e-3)),
    "RMS norm": (["--norm", "rms"], (1e-3, 2e-3)),
    "DyT": (["--norm", "dyt"], (1e-3, 2e-3)),
    "none": (["--norm", "none"], (1e-3, 5e-4)),
    "analytic": (["--norm", "analytic"], (1e-3, 2e-3)),
    "analytic, fast scales": (["--norm", "analytic", *FAST], (1e-3, 2e-3)),
    "layer norm, QK norm": (["--norm", "layer", "--qk-norm"], (1e-3, 2e-3)),
    "analytic, fast scales, QK norm": (["--norm", "analytic", *FAST, "--qk-norm"], (1e-3, 2e-3)),
}
CANDIDATES = {  # what may bring the analytic normalization closer to layer norm
    "fast scales": (FAST, (1e-3, 2e-3)),
    "large weights, fast scales": (["--weights", "0.06", *FAST], (2e-3, 1e-3)),
    "fast scales, QK norm": ([*FAST, "--qk-norm"], (2e-3, 1e-3)),
    "fast scales, tanh before branches": ([*FAST, "--squash", "--residual", "0.29"], (1e-3, 2e-3)),
    "QK norm": (["--qk-norm"], (1e-3, 2e-3)),
    "branches from 0.29": (["--residual", "0.29"], (1e-3, 2e-3)),
    "paper's form": (["--form", "paper"], (1e-3, 2e-3)),
}


class Row(NamedTuple):
    """A method at one of the rates that are tried for it, and the example with its options that trains it."""

    name: str
    rate: float
    script: str
    options: list[str]

    @property
    def judged_by(self) -> str:
        """What the example's result is."""
        return "loss" if self.script == GPT else "accuracy"


def _resnets(model: str, methods: dict[str, list[str]], *options: str, rates: tuple[float, ...] = ()) -> Iterator[Row]:
    for method, own in methods.items():
        for rate in rates or RATES.get(method, USUAL_RATES):
            yield Row(method, rate, CIFAR, ["--model", model, *options, *own])


def _deeper(model: str, *rates: float) -> Iterator[Row]:
    two = {method: METHODS[method] for method in TWO}
    return _resnets(model, two, "--width", "32", rates=rates)


def _batches() -> Iterator[Row]:
    for size in SIZES:
        yield from _of_batches(size, "batch norm", "analytic, deep form", *[CLIPPED] * (size != 256))


def _of_batches(size: int, *methods: str) -> Iterator[Row]:
    """The rate grows with the batch; the bound of the gradient is the same for all, or falls with the batch's root."""
    deep = METHODS["analytic, deep form"]
    own = METHODS | {"analytic, deep form": [*deep, *UNSCALED], CLIPPED: deep}
    for method in methods:
        yield Row(f"{method}, batch {size}", 0.2 * size / 256, CIFAR, ["--batch", str(size), *SHORT, *own[method]])


def _long() -> Iterator[Row]:
    for method in TWO:
        yield Row(method, 0.2, CIFAR, ["--epochs", "60", *METHODS[method]])


def _finetuning() -> Iterator[Row]:
    short = ["--batch", "8", "--epochs", "3", "--clip", "2"]
    for name, how in {"live": "batch norm", "frozen": "frozen batch norm", "analytic": "analytic, preserved"}.items():
        for rate in (0.006, 0.002, 0.02):
            yield Row(how, rate, FINETUNE, [*short, "--how", name])


def _vit() -> Iterator[Row]:
    for method, (options, rates) in VISION.items():
        for rate in rates:
            yield Row(method, rate, VIT, options)


def _gpt() -> Iterator[Row]:
    for method, (options, rates) in TRANSFORMERS.items():
        for rate in rates:
            yield Row(method, rate, GPT, options)


def _gpt_candidates() -> Iterator[Row]:
    for method in ("layer norm", "DyT", "analytic"):  # to compare with
        options, rates = TRANSFORMERS[method]
        for rate in rates if method == "analytic" else rates[:1]:
            yield Row(method, rate, GPT, [*options, "--steps", "1000"])
    for name, (options, rates) in CANDIDATES.items():
        for rate in rates:
            yield Row(f"analytic, {name}", rate, GPT, ["--norm", "analytic", *options, "--steps", "1000"])


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "resnet18": lambda: _resnets("resnet18", METHODS),
    "resnet34": lambda: _resnets("resnet34", METHODS, rates=(0.2, 0.1, 0.05)),
    "resnet102": lambda: _deeper("resnet102", 0.1),
    "plain50": lambda: _deeper("plain50", 0.1, 0.05, 0.02, 0.01, 0.2),
    "batches": _batches,
    "clip": lambda: _of_batches(8, "analytic, deep form", CLIPPED),
    "long": _long,
    "finetuning": _finetuning,
    "vit": _vit,
    "gpt": _gpt,
    "gpt-candidates": _gpt_candidates,
}
ONLY_HELD_OUT = ("gpt-candidates", "clip")  # to choose from: nothing for the test data
