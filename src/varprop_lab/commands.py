"""The lab's commands of ``varprop``: demo, reproduce, compare, bench, data get; all of it can be called from Python.

`varprop.cli` finds this module by its name, if it is installed. What a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import varprop as vp
from varprop.cli.models import unknown
from varprop.cli.options import add_command, add_device, add_out, add_resume, add_root, listed, number, stoppable

from .protocol import ALL_METHODS, ALL_STARTS, METHODS, STARTS

DATASETS = ("mnist", "cifar10", "digits")
CONTINUE = "What is finished is kept: run the command again with --resume."
UNTRAINED = ("relu", "claims")  # made by the report from nothing, and from what lies in the folder
MOVED = {"search": "benchmarks.search_study", "deep": "benchmarks.deep.tables", "questions": "benchmarks.questions"}
SMALL = "digits"  # for tests and first tries, no part of `all`
COMPARED_STARTS = (*STARTS, "orthogonal")  # weight norm's own start is for the paper's naive comparison


def add_commands(commands: Any) -> None:
    """Add all commands of the lab."""
    _add_demo(commands)
    _add_reproduce(commands)
    _add_compare(commands)
    _add_bench(commands)
    _add_data(commands)


def load_inputs(name: str, root: Path | None) -> Any:
    """The training images of a data set as a network takes them."""
    from . import batches, datasets

    return batches.scaled(datasets.load(name, root).train_x)


def data_lines() -> list[str]:
    """Where data sets are looked for, and which are there."""
    from . import datasets

    looked = f"looked for in {', '.join(map(str, datasets.places()))}"
    digits = (
        "there, with scikit-learn" if find_spec("sklearn") else "missing: pip install '.[lab]' in a checkout of varprop"
    )
    fetched = (
        f"{name}: {datasets.find_folder(name) or f'missing: varprop data get {name}'}" for name in ("mnist", "cifar10")
    )
    return [looked, *fetched, f"digits: {digits}"]


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of all that trains cells of an experiment."""
    add_device(parser)
    text = "Number of runs of each cell, with seeds 0, 1, ...; one by default."
    parser.add_argument("--seeds", type=number(int, 1), help=text)
    parser.add_argument("--epochs", type=number(int, 1), help="Epochs of training, instead of the experiment's own.")
    text = (
        "Upper bound of the learning rate search, instead of 1e-2. Repeat for several bounds. By default "
        "`compare` moves it up as long as the best rate lies there."
    )
    parser.add_argument("--lr-max", type=number(float, 1e-5, 10.0), action="append", metavar="RATE", help=text)
    add_root(parser)
    add_out(parser, "runs")
    add_resume(parser)
    text = "Delete the run in the folder of the results and start again."
    parser.add_argument("--overwrite", action="store_true", help=text)
    text = "Write event files to OUT/tensorboard as well (extra `tracking`)."
    parser.add_argument("--tensorboard", action="store_true", help=text)
    text = "Stop at the next finished piece after this time; --resume continues from there."
    parser.add_argument("--max-seconds", type=number(float, 0.0), default=math.inf, metavar="SECONDS", help=text)
    text = (
        "Number of networks to train at once, each in its own process, on a CPU with one thread each; one by default. "
        "Results do not depend on it."
    )
    parser.add_argument("--jobs", type=number(int, 1), default=1, help=text)
    text = "Run on Ray: the address of a cluster, `auto` for the cluster of this machine, or `local` (extra `ray`)."
    parser.add_argument("--ray", metavar="ADDRESS", help=text)


def _run_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `_add_run_options` by their names in `execution.RunOptions`."""
    names = ("device", "root", "resume", "overwrite", "max_seconds", "jobs", "ray")
    tensorboard = options.out / "tensorboard" if options.tensorboard else None
    return {**{name: getattr(options, name) for name in names}, "tensorboard": tensorboard}


# --- demo ---


def _add_demo(commands: Any) -> None:
    text = "Batch norm, group norm and the analytic normalization by batch size, on scikit-learn's digits, in a minute."
    add_out(add_command(commands, "demo", demo, text), "runs/demo")


def demo(options: argparse.Namespace) -> None:
    """Run the demonstration in a new folder, and print its report."""
    from .demo import run

    folder = unused(options.out)
    with stoppable("Nothing is kept: run the command again."):
        run(folder)
        print(f"Figure: {(folder / 'demo.png').resolve()}")


def unused(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, ... that does not exist: an earlier demo is not overwritten."""
    numbered = (folder.with_name(f"{folder.name}-{index}") for index in itertools.count(2))
    return next(candidate for candidate in itertools.chain([folder], numbered) if not candidate.exists())


# --- reproduce ---

NAMES = (
    "mnist, noisy-mnist, noisy-cifar10, naive; small-batches, recurrent, orthogonal, decay, momentum, "
    "overfitting, still-mnist, reparametrized; relu (a figure, without training); claims (the verdicts on the runs "
    "in the folder of the results); all."
)


def _add_reproduce(commands: Any) -> None:
    text = "Run experiments of the paper and write their tables, figures, verdicts and an HTML report."
    parser = add_command(commands, "reproduce", reproduce, text)
    parser.add_argument("names", nargs="+", metavar="NAMES", help=NAMES).known = known_names  # type: ignore[attr-defined]
    _add_run_options(parser)
    parser.add_argument("--methods", metavar="NAMES", help=f"Only these of {','.join(METHODS)}.")
    parser.add_argument("--starts", metavar="NAMES", help=f"Only these of {','.join(ALL_STARTS)}.")
    text = (
        "Search of the learning rate: brent is the paper's; grid+brent evaluates grids first; grid+brent+bound, the "
        "default, also tries the bound where the best rate lies next to it."
    )
    parser.add_argument("--search", choices=("brent", "grid+brent", "grid+brent+bound"), help=text)
    text = "Weights of BN from bn and AP2 from ap2: original, as in the paper, or converted, as for all other methods."
    parser.add_argument("--own-weights", choices=("original", "converted"), help=text)
    text = "How AP2 treats zeros around images: pooled over positions, or plain, by the paper's sums."
    parser.add_argument("--borders", choices=("pooled", "plain"), help=text)
    text = "Compile networks on a GPU (noisy-cifar10)."
    parser.add_argument("--compile", action="store_const", const=True, dest="compiled", help=text)


def known_names() -> list[str]:
    """Everything that `reproduce` can be asked for."""
    from .paper.experiments import EXPERIMENTS

    return [*EXPERIMENTS, *UNTRAINED, "all"]


def expanded(names: Sequence[str]) -> list[str]:
    """The names, each once, with `all` written out. Raises a VarpropError if one of them does not exist."""
    available = known_names()
    for name in names:
        if name in MOVED:
            raise vp.VarpropError(f"`{name}` is run in a checkout of varprop: python -m {MOVED[name]} --help.")
        if name not in available:
            raise vp.VarpropError(unknown("experiment", name, available))
    everything = [name for name in available if name not in (SMALL, "all")]
    return list(dict.fromkeys(entry for name in names for entry in (everything if name == "all" else [name])))


def reproduce(options: argparse.Namespace) -> None:
    """Run what was asked for, and write the report on all that lies in the folder of the results."""
    from .paper import experiments, report
    from .report import result_table

    wanted, out = expanded(options.names), options.out
    settings = {
        **{
            name: getattr(options, name) for name in ("seeds", "epochs", "compiled", "search", "own_weights", "borders")
        },
        "lr_max": tuple(options.lr_max or ()) or None,
        "methods": listed(options.methods, METHODS, "--methods") if options.methods else None,
        "starts": listed(options.starts, ALL_STARTS, "--starts") if options.starts else None,
    }
    with stoppable(CONTINUE):
        trained = [name for name in wanted if name not in UNTRAINED]
        results = experiments.reproduce(trained, out, settings, **_run_options(options))
        if outcomes := [outcome for of_experiment in results.values() for outcome in of_experiment]:
            print(result_table(outcomes))
        if not find_spec("matplotlib"):  # a bare machine only makes runs
            print(f"The report needs matplotlib: varprop reproduce claims --out {out} makes it of what is there.")
            return
        page = report.write(out, wanted)
        if "claims" in wanted:  # the numbers are in the report
            for claim in json.loads((out / "claims.json").read_text("utf-8"))["claims"]:
                print(f"{claim['verdict']:<14}  {claim['claim']}")
        print(f"Report: {page.resolve()}")


# --- compare ---


def _add_compare(commands: Any) -> None:
    text = "Compare normalizations of your own model, from equal starts and with a learning rate searched for each."
    parser = add_command(commands, "compare", compare, text)
    text = (
        "mnist, cifar10, digits; a folder of pictures with a folder for each class, optionally in folders train and "
        "test; an .npz file with train_x, train_y, test_x and test_y; or path.py:function, which returns training "
        "inputs, training targets, test inputs and test targets as tensors or NumPy arrays, or one or two torch "
        "Datasets. Inputs are images (N, C, H, W), other floats (N, ...) or tokens (integers), targets classes."
    )
    parser.add_argument("--dataset", required=True, help=text)
    text = "path.py:function, which returns the plain model, an nn.Module; its batch norms are removed."
    parser.add_argument("--model", required=True, help=text)
    text = "Normalizations, separated by commas; also layer, group."
    parser.add_argument("--methods", metavar="NAMES", default=",".join(METHODS), help=text)
    text = "Starting points, separated by commas; also orthogonal."
    parser.add_argument("--starts", metavar="NAMES", default=",".join(STARTS), help=text)
    text = "path.py:function of outputs and targets, instead of cross-entropy."
    parser.add_argument("--loss", metavar="FUNCTION", help=text)
    text = "A class of torch.optim, or path.py:function of parameter groups and lr, instead of Adam."
    parser.add_argument("--optimizer", help=text)
    text = "Random offsets of the images, in pixels."
    parser.add_argument("--shift", type=number(int, 0), default=0, help=text)
    parser.add_argument("--flip", action="store_true", help="Mirror half of the images.")
    text = "Variance of the noise on pixels in [0, 1]."
    parser.add_argument("--noise", type=number(float, 0.0), default=0.0, metavar="VARIANCE", help=text)
    parser.add_argument("--batch-size", type=number(int, 2), default=128, help="Samples per step.")
    _add_run_options(parser)


def compare(options: argparse.Namespace) -> None:
    """Compare the normalizations, print the answer and write the page."""
    from . import comparison
    from .batches import Augmentation

    settings = {
        **{name: getattr(options, name) for name in ("loss", "optimizer", "out", "batch_size")},
        **{name: value for name in ("seeds", "epochs", "lr_max") if (value := getattr(options, name)) is not None},
        "methods": listed(options.methods, ALL_METHODS, "--methods"),
        "starts": listed(options.starts, COMPARED_STARTS, "--starts"),
        "augmentation": Augmentation(options.shift, options.flip, options.noise),
        **_run_options(options),
    }
    with stoppable(CONTINUE):
        result = comparison.compare(options.model, options.dataset, **settings)
        print(result)
        print(f"Report: {result.report().resolve()}")


# --- bench ---


def _add_bench(commands: Any) -> None:
    text = "Measure training steps with each normalization side by side: time, memory, kernels."
    parser = add_command(commands, "bench", bench, text)
    text = "cifar, mlp, resnet50, unet; separated by commas. By default all, on a CPU the first two."
    parser.add_argument("--cases", metavar="NAMES", help=text)
    text = "eager, compiled, captured; separated by commas. By default all, on a CPU the first."
    parser.add_argument("--modes", metavar="NAMES", help=text)
    text = (
        "none, none-no-bias, weight, batch, group, layer, analytic; separated by commas. By default all, except where "
        "compiling them would take too long."
    )
    parser.add_argument("--variants", metavar="NAMES", help=text)
    parser.add_argument("--rounds", type=number(int, 1), help="Number of turns of every variant.")
    parser.add_argument("--seconds", type=number(float, 1e-3), default=0.5, help="Time for all turns of one cell.")
    parser.add_argument(
        "--max-seconds", type=number(float, 1.0), metavar="SECONDS", help="Start no new measurement after this time."
    )
    add_device(parser)
    add_out(parser, "runs/bench")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)


def bench(options: argparse.Namespace) -> None:
    """Run the benchmark and print its tables."""
    from .bench.cases import CASES, MODES, VARIANTS
    from .bench.run import Options, measure

    names: dict[str, Any] = {
        name: listed(getattr(options, name), allowed, f"--{name}") if getattr(options, name) else None
        for name, allowed in (("cases", CASES), ("modes", MODES), ("variants", tuple(VARIANTS)))
    }
    others = {name: getattr(options, name) for name in ("device", "rounds", "seconds", "max_seconds", "out", "tiny")}
    with stoppable("What was measured is kept in the folder of the results."):
        measure(Options(**names, **others))


# --- data ---


def _add_data(commands: Any) -> None:
    group = commands.add_parser("data", help="Fetch data sets.", description="Fetch data sets.")
    group.set_defaults(run=None, parser=group)
    text = """Fetch data sets from their official sources, check them, and store them in their official layout.

Existing data sets are left alone."""
    parser = add_command(group.add_subparsers(metavar="COMMAND"), "get", get_data, text)
    parser.add_argument("names", nargs="+", metavar="NAMES", help="mnist, cifar10")
    add_root(parser)


def get_data(options: argparse.Namespace) -> None:
    """Fetch the data sets named."""
    from . import datasets

    with stoppable("Run the command again: what is finished is kept."):
        for name in dict.fromkeys(options.names):
            print(f"{name} is in {datasets.get(name, options.root, say=print)}")
