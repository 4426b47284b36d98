"""The grid of batch sizes: what is made in which order, what is recorded, and what happens to cells that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.deep import grid as grids
from benchmarks.deep import small_batches
from benchmarks.deep.grid import SEARCH, TEST, GridCell, best_of, read
from benchmarks.deep.small_batches import BATCHES, METHODS, BatchGrid, main, norm_of, ready, shown

import varprop as vp


def options(records: Path, *words: str) -> Any:
    """Options of a small grid."""
    kept: list[Any] = []
    original = small_batches.BatchGrid
    small_batches.BatchGrid = lambda parsed: kept.append(parsed) or _Nothing()  # type: ignore[assignment, misc, func-returns-value]
    try:
        main(["run", str(records), "--device", "cpu", "--model", "tiny", "--jobs", "2", *words])
    finally:
        small_batches.BatchGrid = original  # type: ignore[misc]
    return kept[0]


class _Nothing:
    def run(self) -> None: ...


def record(cell: GridCell, accuracies: list[float | None]) -> dict[str, Any]:
    runs = [
        {"rate": member.rate, "clip": member.clip, "seed": member.seed, "accuracy": accuracy, "losses": [1.0]}
        for member, accuracy in zip(cell.members, accuracies, strict=True)
    ]
    settings = {"model": "tiny", "width": 32, "epochs": 4, "images": 0}
    about = {"cell": cell.key, "kind": cell.kind, "norm": cell.norm, "batch": cell.batch}
    return {**about, **settings, "seconds": 1.0, "runs": runs}


class Pretended(BatchGrid):
    """Cells that take no time; the second setting is the best, sixteen channels a group are better than 32 groups."""

    failing = ""

    def _started(self, name: str) -> Any:
        class Process:
            def kill(self) -> None: ...

        return Process()

    def _asked(self, process: Any, cell: GridCell, prepare: bool = False) -> dict[str, Any]:
        self.asked = [*getattr(self, "asked", ()), cell]
        if cell.key == self.failing:
            return {"error": "no memory"}
        if cell.key == "search batch 4":
            return record(cell, [None] * 6)
        good = 0.8 if "16" in cell.norm else 0.7
        return record(cell, [good, good + 0.1, 0.5, None, 0.6, 0.6] if cell.kind == SEARCH else [0.9, 0.8, None])


def test_searches_come_before_tests_and_the_best_setting_is_tested(tmp_path: Path) -> None:
    grid = Pretended(options(tmp_path / "records.jsonl", "--max-seconds", "100"))
    grid.run()
    keys = [cell.key for cell in grid.asked]
    assert len(keys) == len(set(keys)) == 25 + 2 + 24  # one search has nothing to test: all of it diverged
    assert {cell.norm for cell in grid.asked if cell.batch == 2 and "group" in cell.norm} == {"group16", "group16-ws"}
    assert "test batch 4" not in keys and keys.index("search analytic 2") < keys.index("test analytic 2")
    tested = next(cell for cell in grid.asked if cell.key == "test analytic 8")
    assert [(member.rate, member.clip, member.seed) for member in tested.members] == [
        (0.00625, 0.0, seed) for seed in (0, 1, 2)
    ]
    assert "| 2 | analytic, analytic | 0.0015625 | none | 0.8500 (0.8000 to 0.9000) | 2 of 3 |" in shown(grid.records)


def test_nothing_is_made_twice_and_a_line_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    first = Pretended(options(file, "--max-seconds", "100"))
    first.run()
    file.write_text(file.read_text()[:-40])
    again = Pretended(options(file, "--max-seconds", "100"))
    again.run()
    assert [cell.key for cell in again.asked] == [list(first.records)[-1]]


def test_a_cell_that_breaks_its_process_is_tried_twice_and_left(tmp_path: Path) -> None:
    grid = Pretended(options(tmp_path / "records.jsonl", "--max-seconds", "100"))
    grid.failing = "search renorm 2"
    grid.run()
    keys = [cell.key for cell in grid.asked]
    assert keys.count("search renorm 2") == 2 and "test renorm 4" in grid.records and "test renorm 2" not in keys


def test_the_limit_of_time(tmp_path: Path) -> None:
    grid = Pretended(options(tmp_path / "records.jsonl", "--max-seconds", "1"))
    grid.run()
    assert not hasattr(grid, "asked")


def test_records_of_other_settings_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record(ready({})[0], [0.5] * 6)) + "\n")
    with pytest.raises(vp.VarpropError, match="epochs 4"):
        BatchGrid(options(file, "--epochs", "5")).run()


def test_an_optimum_at_the_edge_is_said() -> None:
    search = small_batches.search_of("analytic", 2)
    records = {search.key: record(search, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])}
    assert best_of(records[search.key]["runs"]) == records[search.key]["runs"][5]
    assert "0.00390625 (at the edge) | 22.63" in shown(records)


SMALL = ["--device", "cpu", "--model", "tiny", "--width", "16", "--images", "64", "--held-out", "32", "--epochs", "1"]


@pytest.mark.slow
def test_in_processes_with_one_that_crashes_and_a_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(small_batches, "BATCHES", (16, 32))
    monkeypatch.setattr(grids, "LAST_START", 0.0)
    file = tmp_path / "records.jsonl"
    monkeypatch.setattr(small_batches, "METHODS", {"batch norm": ("batch",), "group norm": ("group", "group16")})
    main(["run", str(file), *SMALL, "--jobs", "2", "--max-seconds", "300", "--crash", "search batch 16"])
    records = read(file)
    assert {key for key in records if "batch" in key} == {"search batch 32", "test batch 32"}
    assert sum(key.startswith(TEST) for key in records) == 3
    main(["run", str(file), *SMALL, "--jobs", "1", "--max-seconds", "300"])
    assert {"search batch 16", "test batch 16"} <= read(file).keys()
    main(["show", str(file)])
    assert file.with_suffix(".png").exists()


def test_pages_say_what_small_batches_cost_in_the_records() -> None:
    docs = Path(__file__).parents[2] / "docs"
    records = read(docs / "results" / "batch_sizes.jsonl").values()
    accuracy = {
        (record["norm"], record["batch"]): sum(run["accuracy"] for run in record["runs"]) / len(record["runs"])
        for record in records
        if record["kind"] == TEST
    }
    batch, analytic = (f"{100 * (accuracy[norm, 32] - accuracy[norm, 2]):.1f}" for norm in ("batch", "analytic"))
    for page in ("index.md", "evidence.md", "deep.md"):
        text = " ".join((docs / page).read_text("utf-8").split())
        assert f"batch norm loses {batch}" in text and any(f"{w} {analytic}" in text for w in ("this", "normalization"))
    made = read(docs / "results" / "batch_sizes.jsonl")
    prices = {batch: [made[f"cost {norm_of(m, made)} {batch}"]["ms"] for m in METHODS] for batch in BATCHES}
    for batch, values in prices.items():
        assert f"| {batch} | {' | '.join(f'{value:.2f}' for value in values)} |" in (docs / "deep.md").read_text(
            "utf-8"
        )
    assert list(METHODS)[0::3] == ["batch norm", "group norm + WS"] and list(METHODS)[-1] == "analytic"
    for position, said in (
        (0, "takes 0.78 to 0.79 of batch norm's"),
        (3, "0.35 to 0.38 of that of group norm with weight"),
    ):
        ratios = [values[-1] / values[position] for values in prices.values()]
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in said and said in " ".join(
            (docs / "deep.md").read_text().split()
        )
