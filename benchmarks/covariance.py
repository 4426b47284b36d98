"""What the covariance of all units buys: means of random deep networks, standard deviations of trained ones.

    python -m benchmarks.covariance [--json FILE] [--data DIR] [--draws N] [--cases "width 256|digits"]

Random: final-layer means of ReLU networks with He weights under a standard normal input; mean squared errors over the
units against Monte Carlo, whose own error is subtracted and shown. Trained: predicted over measured std of the units
before every activation, medians of every layer, for units taken as independent, for the covariance of the data, and for
one Gaussian a class. Times are seconds of CPU time of one thread, without the capture.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varprop as vp
from varprop.text_table import Table
from varprop_lab.datasets import DataError, load
from varprop_lab.environment import provenance

RANDOM = {"width 256, depth 8": (256, 8, 3, 1.0), "width 1024, depth 16": (1024, 16, 1, 0.5)}  # seeds, share of draws
TRAINED = {  # data, widths of the hidden layers, epochs
    "digits, 2 x 64": ("digits", (64, 64), 15),
    "digits, 3 x 256": ("digits", (256, 256, 256), 15),
    "digits, 4 x 64": ("digits", (64, 64, 64, 64), 15),
    "mnist, 3 x 256": ("mnist", (256, 256, 256), 2),
}
CHUNK = 4000  # draws at a time


def random_network(width: int, depth: int, seed: int) -> nn.Sequential:
    """Linear layers without bias, He weights, and a ReLU behind each."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width, bias=False), nn.ReLU())])
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=math.sqrt(2 / width))
    return model.requires_grad_(False)


def drawn_mean(model: nn.Module, width: int, draws: int) -> tuple[Tensor, float]:
    """Means over draws of the input, and their mean squared error over the units."""
    total, squares = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for _ in range(draws // CHUNK):
        values = model(torch.randn(CHUNK, width)).double()
        total, squares = total + values.sum(0), squares + values.square().sum(0)
    count = draws // CHUNK * CHUNK
    mean = total / count
    return mean, float((squares / count - mean.square()).mean()) / count


def of_random(width: int, depth: int, seeds: int, draws: int) -> dict[str, float]:
    """Mean squared errors of final means, averaged over seeds, and seconds of CPU time."""
    records = []
    for seed in range(seeds):
        model = random_network(width, depth, seed)
        program, moments = vp.capture(model, (1, width)), vp.Moments(0.0, 1.0)
        record: dict[str, float] = {}
        truth, error = drawn_mean(model, width, draws)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for name, covariance in (("independent", None), ("full", "full")):
            seconds = []
            for _ in range(3):
                start = time.process_time()
                output = vp.propagate(program, moments, covariance=covariance).output  # type: ignore[arg-type]
                seconds.append(time.process_time() - start)
            record[name] = float((output.mean.flatten().double() - truth).square().mean()) - error
            record[f"seconds {name}"] = min(seconds)
        torch.set_num_threads(threads)
        records.append({**record, "error of the draws": error})
    return {name: sum(record[name] for record in records) / seeds for name in records[0]}


def trained_network(x: Tensor, labels: Tensor, widths: tuple[int, ...], epochs: int) -> nn.Sequential:
    """A multilayer perceptron with ReLU, trained by Adam."""
    torch.manual_seed(0)
    sizes = [x.shape[1], *widths]
    hidden = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), labels[index]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


def of_trained(name: str, widths: tuple[int, ...], epochs: int, root: str | None) -> dict[str, Any]:
    """Predicted over measured std, the median of every linear layer, by what is propagated."""
    data = load(name, root)
    x, labels = data.train_x.flatten(1).float(), data.train_y
    x = (x - x.mean()) / x.std()
    model = trained_network(x, labels, widths, epochs)
    linear = [str(index) for index, layer in enumerate(model) if isinstance(layer, nn.Linear)]
    program, whole = vp.capture(model, (1, x.shape[1])), vp.input_moments(x, covariance=True)
    cases: dict[str, tuple[vp.Moments, Literal["full"] | None]] = {
        "independent": (vp.Moments(whole.mean, whole.var), None),
        "full": (whole, "full"),
        "one a class": (vp.input_moments(x, labels=labels, covariance=True), "full"),
    }
    results = {case: vp.propagate(program, m, covariance=c) for case, (m, c) in cases.items()}
    ratios: dict[str, list[float]] = {case: [] for case in cases}
    values = x
    for index, layer in enumerate(model):
        values = layer(values)
        path = str(index)
        if path not in linear:
            continue
        measured = values.std(0, correction=0)
        for case, result in results.items():
            ratios[case].append(float((result[path].std.flatten() / measured).nanmedian()))  # of units that vary
    alarms = {
        case: [f.kind for f in vp.inspect(program, m, check=x[:512], covariance=c).findings if f.severity != "note"]
        for case, (m, c) in cases.items()
    }
    accuracy = float((model(x).argmax(1) == labels).float().mean())
    return {"accuracy": accuracy, "ratios": ratios, "warnings of the inspector": alarms}


def tables(results: dict[str, Any]) -> list[Table]:
    """The results for people."""
    columns = ("network", "independent units", "full covariance", "error of the draws", "CPU seconds, one thread")
    rows = [
        (
            name,
            *(f"{record[key]:.1e}" for key in ("independent", "full", "error of the draws")),
            f"{record['seconds full']:.2f}",
        )
        for name, record in results["random"].items()
    ]
    found = [Table("Mean squared error of final means", columns, rows, ("network",))]
    columns = ("trained network", "independent units", "full covariance", "one Gaussian a class", "warnings")
    rows = []
    for name, record in results["trained"].items():
        cells = [" ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in record["ratios"].values()]
        counts = " -> ".join(str(len(kinds)) for kinds in record["warnings of the inspector"].values())
        rows.append((name, *cells, counts))
    return [*found, Table("Predicted over measured std, layer by layer", columns, rows, ("trained network",))]


def main() -> None:
    """Measure what was asked for, print the tables, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write or to complete")
    parser.add_argument("--data", help="folder of the data sets")
    parser.add_argument("--draws", type=int, default=400_000)
    parser.add_argument("--cases", default="", help="beginnings of names, separated by |")
    options = parser.parse_args()
    wanted = tuple(options.cases.split("|")) if options.cases else ("",)
    results: dict[str, Any] = {"random": {}, "trained": {}}
    commands: list[str] = []
    if options.json is not None and options.json.exists():
        before = json.loads(options.json.read_text())
        results |= {key: before[key] for key in ("random", "trained")}
        commands = before["commands"]
    for name, (width, depth, seeds, share) in RANDOM.items():
        if name.startswith(wanted):
            results["random"][name] = of_random(width, depth, seeds, int(share * options.draws))
    for name, (data, widths, epochs) in TRAINED.items():
        if name.startswith(wanted):
            try:
                results["trained"][name] = of_trained(data, widths, epochs, options.data)
            except DataError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
    for table in tables(results):
        print(f"{table.heading}\n\n{table.markdown()}\n")
    if options.json is not None:
        about = provenance(torch.device("cpu"))
        del about["command"]
        commands.append(shlex.join(["python", "-m", "benchmarks.covariance", *sys.argv[1:]]))
        options.json.write_text(json.dumps({"commands": commands, **about, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
