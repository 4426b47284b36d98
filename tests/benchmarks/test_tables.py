"""Tables of deep networks: rates are tried on held-out data, the best of each method is looked at on the test data."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.deep.tables import GPT, HELD_OUT, TABLES, TEST, VIT, Row, Study, draw_losses, main

from tests.lab.data.test_datasets import write_cifar10

ROOT = Path(__file__).parents[2]
ACCURACIES = {0.2: 0.7, 0.1: 0.9, 0.4: 0.8}


class Pretended(Study):
    """Runs that take no time, and remember what was asked for."""

    failing: str = ""

    def _trained(self, row: Row, seed: int, judged: str) -> dict[str, Any]:
        self.asked = [*getattr(self, "asked", ()), (row.name, row.rate, seed, judged)]
        if row.name == self.failing:
            return {"error": "no memory"}
        value = ACCURACIES[row.rate] if row.judged_by == "accuracy" else row.rate
        return {judged: value, "peak MiB": None, "history": [{"loss": 1.0, "seconds": 1.0}], "steps an epoch": 2}


def study(file: Path, table: str = "resnet18", **options: Any) -> Pretended:
    only = options.pop("only", ["batch norm", "group norm"])
    made = Pretended(table, file, **{"seeds": 2, "say": lambda line: None, **options})
    made.rows = [row for row in made.rows if row.name in only]
    return made


def test_only_the_best_rate_sees_the_test_data(tmp_path: Path) -> None:
    made = study(tmp_path / "deep.json")
    made.make()
    tested = [asked for asked in made.asked if asked[3] == TEST]
    assert tested == [(name, 0.1, seed, TEST) for seed in range(2) for name in ("batch norm", "group norm")]
    assert "| batch norm | 0.1 | 2 | 0.9000 | 0.9000 | 0.9000 | 1.0000 | None |" in made.shown(TEST)


def test_the_lowest_loss_is_the_best(tmp_path: Path) -> None:
    made = study(tmp_path / "deep.json", "gpt", only=["layer norm"])
    made.make()
    assert [row.rate for row in made.best()] == [1e-3]


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    study(tmp_path / "deep.json").make()
    again = study(tmp_path / "deep.json", seeds=3)
    again.make()
    assert [asked[2:] for asked in again.asked] == [(2, TEST), (2, TEST)]


def test_a_run_that_failed_is_told_and_made_again(tmp_path: Path) -> None:
    said: list[str] = []
    failing = study(tmp_path / "deep.json", say=said.append)
    failing.failing = "group norm"
    failing.make()
    assert sum(line.endswith(": no memory") for line in said) == 3
    assert [row.name for row in failing.best()] == ["batch norm"]
    again = study(tmp_path / "deep.json")
    again.make()
    assert {asked[0] for asked in again.asked} == {"group norm"}


def test_nothing_begins_after_the_deadline(tmp_path: Path) -> None:
    late = study(tmp_path / "deep.json", deadline=time.monotonic())
    late.make()
    assert not hasattr(late, "asked") and not late.has(HELD_OUT)


def test_the_command_goes_on_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "docs/results/deep.json", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables", "--only", "clip", "--max-seconds", "-1", "--out", str(tmp_path)])
    main()
    assert capsys.readouterr().out.startswith("\nclip, held out\n| method | rate |")


def test_a_figure_of_what_was_tested(tmp_path: Path) -> None:
    made = study(tmp_path / "deep.json")
    assert not draw_losses([made], tmp_path / "deep")
    made.make()
    assert draw_losses([made], tmp_path / "deep")
    assert (tmp_path / "deep.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "deep.svg").exists()


def test_rows_have_names_and_rates_of_their_own() -> None:
    for table, rows in TABLES.items():
        made = [(row.name, row.rate) for row in rows]
        assert len(set(made)) == len(made), table


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    small = ["--model", "tiny", "--width", "4", "--batch", "4", "--epochs", "1", "--images", "8"]
    real = Study("long", tmp_path / "deep.json", 1, data=tmp_path)
    real.rows = [row._replace(options=[*row.options, *small, "--held-out", "4"]) for row in real.rows[:1]]
    real.make()
    kept = json.loads((tmp_path / "deep.json").read_text())
    assert list(kept["runs"]) == [real.key(real.rows[0], 0, TEST)]  # a rate without another is not tried first
    assert kept["hardware"] and kept["versions"]["torch"]


def documentation() -> str:
    """The page on deep networks with the page of all its runs."""
    return "".join((ROOT / "docs" / name).read_text() for name in ("deep.md", "results/deep_tables.md"))


@pytest.mark.parametrize("table", ["resnet18", "resnet34", "finetuning", "gpt", "vit"])
def test_the_documentation_says_what_its_records_say(table: str) -> None:
    page = documentation()
    documented = Study(table, ROOT / "docs/results/deep.json")
    for row in documented.best():
        found = [run[TEST] for run in documented.found(row, TEST)]
        if found:
            numbers = f"{statistics.mean(found):.4f}", f"({min(found):.4f} to {max(found):.4f}) | {len(found)} "
            assert all(number in page for number in numbers), row.name
        else:
            best = documented.found(row, HELD_OUT)[0][HELD_OUT]
            assert f"| {best:.4f} | {row.rate:g} (" in page, row.name


def test_so_does_the_choice_of_the_bound_of_gradients() -> None:
    runs = json.loads((ROOT / "docs/results/deep.json").read_text())["runs"]
    found = [run[HELD_OUT] for key, run in runs.items() if " | clip | " in key]
    assert len(found) == 2 and all(f"{value:.4f}" in documentation() for value in found)


@pytest.mark.parametrize("table", ["long", "batches", "resnet102"])
def test_so_do_short_and_long_runs(table: str) -> None:
    page = documentation()
    documented = Study(table, ROOT / "docs/results/deep.json")
    found = [run[TEST] for row in documented.best() for run in documented.found(row, TEST)]
    assert len(found) >= 2 and all(f"{value:.4f}" in page for value in found)


def test_so_does_what_is_said_of_the_plain_network() -> None:
    runs = json.loads((ROOT / "docs/results/deep.json").read_text())["runs"]
    page = documentation()
    found = [run.get(HELD_OUT, run.get(TEST)) for key, run in runs.items() if " | plain50 | " in key]
    assert len(found) == 14 and all(f"{value:.4f}" in page for value in found)


def test_so_does_the_table_of_costs() -> None:
    page = documentation()
    for cost in json.loads((ROOT / "docs/results/cost.json").read_text())["steps"]["resnet18"].values():
        assert f"| {cost['ms']:.2f} | {cost['of batch norm']:.2f} | {cost['MiB']} MiB |" in page


def test_so_does_the_table_of_true_deviations() -> None:
    page = documentation()
    for states in json.loads((ROOT / "docs/results/truth_resnet.json").read_text()).values():
        for trained in (0, 1, 3, 15):
            values = sorted(states[trained]["ratios"].values())
            assert f"{values[len(values) // 2]:.2f} ({values[0]:.2f} to {values[-1]:.2f})" in page


def test_so_does_that_of_the_gpt() -> None:
    runs = json.loads((ROOT / "docs/results/deep.json").read_text())["runs"]
    page = documentation()
    found = [run[HELD_OUT] for key, run in runs.items() if key.startswith(f"{HELD_OUT} | gpt")]
    assert len(found) == 22 and all(f"{value:.4f}" in page for value in found)


def test_networks_are_compiled_if_asked_and_only_images_need_a_folder(tmp_path: Path) -> None:
    plain = Study("vit", tmp_path / "deep.json", data=tmp_path)
    compiled = Study("gpt", tmp_path / "deep.json", data=tmp_path, compiled=True)
    assert plain._place(VIT)[:2] == ["--data", str(tmp_path)] and "--compile" not in plain._place(VIT)
    assert compiled._place(GPT)[-1] == "--compile" and "--data" not in compiled._place(GPT)


def test_a_table_tells_of_seeds_that_diverged() -> None:
    shown = Study("vit", ROOT / "docs/results/deep.json").shown(TEST)
    assert "| analytic, fast scales | 0.001 | 2 of 3 |" in shown and "| layer norm | 0.001 | 3 |" in shown
