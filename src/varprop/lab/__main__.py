"""`python -m varprop.lab mnist --out results`: the experiments with nothing but torch and scipy installed."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import varprop as vp

from .execution.run import reproduce
from .protocol.experiments import EXPERIMENTS, SEARCHES


def main(arguments: list[str] | None = None) -> None:
    """Run experiments by name."""
    parser = argparse.ArgumentParser(prog="python -m varprop.lab", description="Run experiments and keep the results.")
    parser.add_argument("names", nargs="+", choices=list(EXPERIMENTS), metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--root", type=Path, help="where data sets are looked for first")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr-max", type=float, nargs="+", help="upper bounds of the search")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--starts", nargs="+")
    parser.add_argument("--search", choices=list(SEARCHES), help="for the learning rate; grid+brent by default")
    parser.add_argument("--own-weights", choices=("original", "converted"), help="of BN from bn and AP2 from ap2")
    parser.add_argument("--compile", action="store_true", default=None, dest="compiled", help="use torch.compile")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop at the next piece after this time")
    parser.add_argument("--jobs", type=int, default=1, help="cells at once, where they are not trained together anyway")
    parser.add_argument("--ray", metavar="ADDRESS", help="run on Ray: the address of a cluster, or `local`")
    parser.add_argument("--tensorboard", type=Path, help="a folder for event files")
    options = vars(parser.parse_args(arguments))
    for name in ("lr_max", "methods", "starts"):
        options[name] = None if options[name] is None else tuple(options[name])
    try:
        found = reproduce(options.pop("names"), options.pop("out"), **options)
    except (vp.VarpropError, ValueError, ImportError) as error:
        print(f"varprop: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for name, outcomes in found.items():
        print(name)
        for outcome in outcomes:
            loss = outcome.curves["train_loss"][-1] if outcome.curves else math.inf
            facts = f"lr {outcome.search.lr:8.2g}  loss {loss:8.4f}  test {outcome.test_accuracy:.4f}"
            print(f"  {outcome.cell.key:44} {facts}")


if __name__ == "__main__":
    main()
