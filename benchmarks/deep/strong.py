"""At full strength: ResNet-18 on CIFAR-10 for 60 epochs with smoothed labels and cutout, three normalizations.

    python -m benchmarks.deep.strong run RECORDS --data DIR [--max-seconds 540] [--compile]
    python -m benchmarks.deep.strong show RECORDS     # the tables, RECORDS.md

As `benchmarks.deep.alternatives`: rates, without and with clipping, in short runs judged by held-out images, then the
best setting for all epochs with three seeds on all training images, judged once by the test images. The analytic
normalization is tried with clipping alone, since it diverges without.
"""

from __future__ import annotations

import argparse
from typing import Any

from .alternatives import (
    CLIP,
    Alternative,
    TableGrid,
    TableWorker,
    cell_of,
    runs_of,
    searched,
    searches,
    table,
    table_parser,
)
from .grid import TEST, GridCell, best_of, read, serve

RATES = (0.1, 0.2)
CUTOUT, SMOOTHING = 8, 0.1
ROWS = {
    "batch": Alternative("batch norm", 3),
    "analytic": Alternative("analytic, deep form", 3, ((CLIP, 0.0),)),
    "group-ws": Alternative("group norm + weight standardization", 3),
}


def ready(records: dict[str, Any]) -> list[GridCell]:
    """Cells that are missing and can be made now: searches first, then seed by seed."""
    order: list[tuple[int, GridCell]] = []
    for norm, row in ROWS.items():
        tried = searches(norm, records, RATES, row)
        order += [(-1, cell) for cell in tried]
        best = best_of(runs_of(norm, records))
        if best is not None and all(cell.key in records for cell in tried):
            bounds = best["clip"], 0.0
            order += [(seed, cell_of(TEST, norm, best["rate"], bounds, seed)) for seed in range(row.seeds)]
    return [cell for _, cell in sorted(order, key=lambda pair: pair[0]) if cell.key not in records]


class StrongWorker(TableWorker):
    """Trains with cutout and smoothed labels."""

    cutout, smoothing = CUTOUT, SMOOTHING

    def about(self, cell: GridCell) -> dict[str, Any]:
        """The first fields of a record."""
        return {**super().about(cell), "cutout": CUTOUT, "smoothing": SMOOTHING}


class StrongGrid(TableGrid):
    """Every row has a process."""

    module = "benchmarks.deep.strong"

    def ready(self) -> list[GridCell]:
        """Cells that can be made now."""
        return ready(self.records)


def page(records: dict[str, Any]) -> str:
    """All tables."""
    first = next(iter(records.values()))
    parts = [
        "# Full strength",
        "`python -m benchmarks.deep.strong show docs/results/strong.jsonl` writes this page.",
        f"## Test accuracy after {first['epochs']} epochs, cutout of {CUTOUT} pixels, labels smoothed by {SMOOTHING}",
        table(records).markdown(),
        f"## Held-out accuracy after {first['search_epochs']} epochs by peak rate",
        searched(records).markdown(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def show(options: argparse.Namespace) -> None:
    """Print the tables and write them beside the records."""
    text = page(read(options.records))
    print(text)
    options.records.with_suffix(".md").write_text(text)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    options = table_parser(__doc__, ["run", "show"], 60, 10).parse_args(arguments)
    options.records.parent.mkdir(parents=True, exist_ok=True)
    if options.action == "run":
        StrongGrid(options).run()
    elif options.action == "serve":
        serve(StrongWorker(options))
    else:
        show(options)


if __name__ == "__main__":
    main()
