"""What the committed page says of the records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.zoo import table
from benchmarks.zoo.causes import cause, said
from benchmarks.zoo.table import golden, page

LAYERS = [("", "Net", 0.5), ("a", "Linear", 1.01), ("pool", "AvgPool2d", 0.7), ("b", "Linear", 0.6)]


def record(**more: Any) -> dict[str, Any]:
    done = {
        "model": "basic/net",
        "status": "done",
        "parameters": 2_000_000,
        "input": "3x8x8",
        "exact": 4,
        "missing": {},
    }
    measured = {"approximate": 0, "capture_s": 1.234, "propagate_s": 0.5, "samples": 8, "layers": 4, "good_layers": 1}
    return done | measured | {"median_error": 0.35123, "cause": found(), "ratios": LAYERS} | more


def found() -> dict[str, Any] | None:
    entries = [("a", "aten.linear.default"), ("pool", "aten.avg_pool2d.default"), ("b", "aten.linear.default")]
    return cause(SimpleNamespace(entries=[SimpleNamespace(module=m, op=op) for m, op in entries]), LAYERS)


def test_the_cause_is_what_came_between_the_last_good_and_the_first_bad_layer() -> None:
    assert found() == {"layer": "pool", "ratio": 0.7, "ops": ["avg_pool2d"]}
    assert said(found()) == "average over values that are correlated (from pool on)"
    assert said({"layer": "b", "ratio": 0.8, "ops": ["conv2d", "add", "relu"]}).startswith("rectifier over a skip")
    assert said({"layer": "b", "ratio": 0.8, "ops": ["relu", "conv2d"]}).startswith("inputs of linear layers")
    assert said({"layer": "b", "ratio": 2.0, "ops": ["frobnicate"]}) == "frobnicate (from b on)"


def test_the_golden_record_holds_no_times_and_the_reason_only_where_it_is_needed() -> None:
    (kept,) = golden([record()])
    assert kept["median_error"] == 0.351 and "pool" in kept["why"]
    assert not {"capture_s", "propagate_s", "ratios", "cause"} & kept.keys()
    assert "why" not in golden([record(median_error=0.05)])[0]


def test_counting_anew_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOLDEN", "TIMES", "PAGE"):
        monkeypatch.setattr(table, name, tmp_path / name)
    table.GOLDEN.write_text("[]")
    table.TIMES.write_text("{}")
    table.write(["basic/net"], {"basic/net": record()}, [], 8)
    (before,), times = json.loads(table.GOLDEN.read_text()), table.TIMES.read_text()
    counted = {
        "model": "basic/net",
        "status": "counted",
        "exact": 0,
        "approximate": 4,
        "capture_s": 9.0,
        "torch": "3.0",
    }
    table.write(["basic/net"], {"basic/net": counted}, [], 8)
    (after,) = json.loads(table.GOLDEN.read_text())
    assert after.pop("approximate") == 4 and after.pop("torch") == "3.0" and before.pop("exact") == 4
    assert after == before and table.TIMES.read_text() == times


def test_the_page_counts_and_names_failures() -> None:
    bad = {
        "model": "basic/other",
        "status": "missing",
        "exact": 1,
        "approximate": 0,
        "missing": {"aten.foo.default": 2},
    }
    text = page(golden([record(), bad]), {"basic/net": [1.2, 0.5]}, [], 8)
    assert "| basic | 2 | 1 (50%) | 0 (0%) | 0 (0%) | 35.1% | 0.5 |" in text
    assert "| basic/other | missing | aten.foo.default x2 |" in text
    assert "| basic/net | 35% | average over values that are correlated (from pool on) |" in text
    assert "| basic/net | 3x8x8 | 2.0 | 4 |  |  | 1.2, 0.5 | 4 | 35.1% |" in text


def test_positions_apart_count_where_they_were_measured() -> None:
    both = record(apart={"propagate_s": 2.0, "median_error": 0.02, "good_layers": 4, "cause": None})
    (kept,) = golden([both])
    assert kept["median_error"] == 0.351 and kept["apart_error"] == 0.02 and "why" not in kept
    text = page([kept], {"basic/net": [1.2, 0.5, 2.0]}, [], 8)
    assert "| basic | 1 | 1 (100%) | 0 (0%) | 1 (100%) | 2.0% | 0.5 |" in text
    assert "| basic/net | 35.1% | 2.0% |" in text and "| 1.2, 0.5, 2.0 | 4 | 2.0% |" in text


def test_positions_apart_that_failed_are_said() -> None:
    (kept,) = golden([record(apart={"error": "not finished within 5 s"})])
    assert kept["why"].endswith("(from pool on); positions apart: not finished within 5 s")


def test_the_page_tells_what_the_normalization_changed() -> None:
    done = {"model": "basic/a", "status": "done", "dtype": "float64", "tolerance": 1e-8, "preserve": 2e-15, "fold": 0.0}
    distances = {"preserve": 12.0, "preserve, fold": 1e-15, "fold": 1e-3, "step, fold": 0.0}
    wrong = done | {"model": "basic/b", "status": "differs"} | distances
    refused = {"model": "basic/c", "status": "ValueError", "dtype": "float64", "error": "There is no layer."}
    crashed = {"model": "basic/d", "status": "crash", "error": "KeyError: p"}
    slow = {"model": "basic/e", "status": "too long", "error": "not finished within 5 s of CPU time"}
    text = page(golden([record()]), {"basic/net": [1.2, 0.5]}, [done, wrong, refused, crashed, slow], 8)
    assert "| basic | 3 | 1 | 1 | 1 | 0 | 2e-15 | 0e+00 | float64 |" in text
    assert "| basic | 2 | 0 | 0 | 1 | 1 |  |  |  |" in text
    assert "| all | 5 | 1 | 1 | 2 | 1 |  |  |  |" in text
    assert "| basic/b | differs | preserve 1e+01, fold 1e-03 |" in text
    assert "| basic/c | ValueError | There is no layer. |" in text and "| basic/d | crash | KeyError: p |" in text
