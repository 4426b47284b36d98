"""`python -m varprop.lab.bench`: the benchmark with nothing but torch installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import varprop as vp

from . import chart, tables
from .cases import CASES, MODES, STEP
from .record import FILE
from .run import run
from .session import Options
from .variants import VARIANTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, measure, and print the tables."""
    try:
        measure(Options(**vars(parser().parse_args(arguments))))
    except vp.VarpropError as error:
        print(f"varprop: {error}", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    """The options, the same as those of ``varprop bench``."""
    made = argparse.ArgumentParser(
        prog="python -m varprop.lab.bench", description="Training steps with each normalization, side by side."
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    for name, known in (("cases", CASES), ("modes", MODES), ("variants", tuple(VARIANTS))):
        made.add_argument(f"--{name}", action=_Names, nargs="+", metavar="NAME", help=", ".join(known))
    made.add_argument("--rounds", type=_positive(int), help="turns of every variant")
    made.add_argument("--seconds", type=_positive(float), default=Options.seconds, help="for all turns of one cell")
    made.add_argument("--max-seconds", type=_positive(float), help="begin nothing new after that")
    made.add_argument("--out", type=Path, default=Options.out, help="folder of the results")
    made.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return made


class _Names(argparse.Action):
    """Names separated by spaces or commas."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, names(",".join(values)))


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        if not (number := kind(text)) > 0:
            raise ValueError
        return number

    return read


def names(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas; None if there are none."""
    found = tuple(name.strip() for name in (text or "").split(",") if name.strip())
    return found or None


def measure(options: Options) -> None:
    """Run the benchmark, print its tables, and say where the results are."""
    print(STEP, flush=True)
    record = run(options, say=lambda text: print(text, flush=True))
    print()
    print("\n\n".join(table.plain() for table in tables.tables(record)))
    page = tables.write_page(record, options.out)
    print(f"\nResults: {options.out / FILE}, {page}")
    drawn = chart.draw(record, options.out)
    print(f"Chart: {drawn}" if drawn else "No chart: it needs matplotlib (pip install 'varprop[lab]') and results.")


if __name__ == "__main__":
    main()
