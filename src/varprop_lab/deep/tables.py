"""What is compared: the rows of every table, each with the rates that are tried and the options of the example."""

from __future__ import annotations

from typing import NamedTuple

Tried = dict[str, tuple[list[str], tuple[float, ...]]]  # options and rates of every method
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

FINETUNING: Tried = {
    "batch norm": (["--how", "live"], (0.006, 0.002, 0.02)),
    "frozen batch norm": (["--how", "frozen"], (0.006, 0.002, 0.02)),
    "analytic, preserved": (["--how", "analytic"], (0.006, 0.002, 0.02)),
}
FAST = ["--scale-rate", "10"]  # scales and shifts learn ten times as fast as weights
ALPHAS = ("0.25", "0.5", "1", "2")  # first values that are tried
PATCHES, LARGE = "torch's patches", ["--patches", "torch"]
TRANSFORMERS: Tried = {
    "layer norm": (["--norm", "layer"], (1e-3, 3e-3, 6e-3)),
    "layer norm, QK norm": (["--norm", "layer", "--qk-norm"], (1e-3, 2e-3, 3e-3)),
    "RMS norm": (["--norm", "rms"], (1e-3, 3e-3)),
    "DyT": (["--norm", "dyt"], (1e-3, 3e-3)),
    "none": (["--norm", "none"], (1e-3, 3e-4)),
    "analytic, fast scales, QK norm": (["--norm", "analytic", *FAST, "--qk-norm"], (2e-3, 1e-3, 3e-3)),
    "analytic": (["--norm", "analytic"], (1e-3, 2e-3)),
    "layer norm, fast scales": (["--norm", "layer", *FAST], (1e-3, 2e-3, 3e-3)),
    "layer norm, fast scales, QK norm": (["--norm", "layer", *FAST, "--qk-norm"], (1e-3, 2e-3, 3e-3)),
    **{f"DyT, alpha {a}": (["--norm", "dyt", "--alpha", a], (1e-3, 3e-3, 6e-3)) for a in ALPHAS if a != "1"},
    "Derf": (["--norm", "derf"], (1e-3, 3e-3, 6e-3)),
}
VISION: Tried = {
    "layer norm": (["--norm", "layer"], (1e-3, 2e-3, 5e-4)),
    "RMS norm": (["--norm", "rms"], (1e-3, 2e-3, 5e-4)),
    "DyT": (["--norm", "dyt"], (1e-3, 2e-3, 5e-4)),
    "none": (["--norm", "none"], (1e-3, 5e-4, 2.5e-4)),
    "analytic": (["--norm", "analytic"], (1e-3, 2e-3, 5e-4)),
    "analytic, fast scales": (["--norm", "analytic", *FAST], (1e-3, 2e-3, 5e-4)),
    "layer norm, QK norm": (["--norm", "layer", "--qk-norm"], (1e-3, 2e-3, 5e-4)),
    "analytic, fast scales, QK norm": (["--norm", "analytic", *FAST, "--qk-norm"], (1e-3, 2e-3, 5e-4)),
    "layer norm, fast scales": (["--norm", "layer", *FAST], (1e-3, 2e-3, 5e-4)),
    "layer norm, fast scales, QK norm": (["--norm", "layer", *FAST, "--qk-norm"], (1e-3, 2e-3, 5e-4)),
    **{f"DyT, alpha {a}, {PATCHES}": (["--norm", "dyt", "--alpha", a, *LARGE], (1e-3, 2e-3, 5e-4)) for a in ALPHAS},
    f"Derf, {PATCHES}": (["--norm", "derf", *LARGE], (1e-3, 2e-3, 5e-4)),
    f"none, {PATCHES}": (["--norm", "none", *LARGE], (1e-3, 5e-4, 2.5e-4)),
}
CANDIDATES: Tried = {  # what may bring the analytic normalization closer to layer norm
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
        """The number by which runs of the example are judged."""
        return "loss" if self.script == GPT else "accuracy"


def _rows(script: str, methods: Tried, *options: str) -> list[Row]:
    return [Row(name, rate, script, [*options, *own]) for name, (own, rates) in methods.items() for rate in rates]


def _resnets(model: str, *rates: float) -> list[Row]:
    methods = {name: (own, rates or RATES.get(name, USUAL_RATES)) for name, own in METHODS.items()}
    return _rows(CIFAR, methods, "--model", model)


def _two(*options: str, rates: tuple[float, ...]) -> list[Row]:
    return _rows(CIFAR, {name: (METHODS[name], rates) for name in TWO}, *options)


def _of_batches(size: int, *methods: str) -> list[Row]:
    """The rate grows with the batch; the bound of the gradient is the same for all, or falls with the batch's root."""
    deep = METHODS["analytic, deep form"]
    own = METHODS | {"analytic, deep form": [*deep, *UNSCALED], CLIPPED: deep}
    tried: Tried = {f"{name}, batch {size}": (own[name], (0.2 * size / 256,)) for name in methods}
    return _rows(CIFAR, tried, "--batch", str(size), *SHORT)


_COMPARED: Tried = {name: (TRANSFORMERS[name][0], TRANSFORMERS[name][1][:1]) for name in ("layer norm", "DyT")}
_CANDIDATES: Tried = {
    f"analytic, {name}": (["--norm", "analytic", *own], rates) for name, (own, rates) in CANDIDATES.items()
}
TABLES: dict[str, list[Row]] = {
    "resnet18": _resnets("resnet18"),
    "resnet34": _resnets("resnet34", 0.2, 0.1, 0.05),
    "resnet102": _two("--model", "resnet102", "--width", "32", rates=(0.1,)),
    "plain50": _two("--model", "plain50", "--width", "32", rates=(0.1, 0.05, 0.02, 0.01, 0.2)),
    "batches": [row for size in SIZES for row in _of_batches(size, *TWO, *[CLIPPED] * (size != 256))],
    "clip": _of_batches(8, "analytic, deep form", CLIPPED),
    "long": _two("--epochs", "60", rates=(0.2,)),
    "finetuning": _rows(FINETUNE, FINETUNING, "--batch", "8", "--epochs", "3", "--clip", "2"),
    "vit": _rows(VIT, VISION),
    "gpt": _rows(GPT, TRANSFORMERS),
    "gpt-candidates": _rows(GPT, {**_COMPARED, "analytic": TRANSFORMERS["analytic"], **_CANDIDATES}, "--steps", "1000"),
}
ONLY_HELD_OUT = ("gpt-candidates", "clip")  # to choose from: nothing for the test data
