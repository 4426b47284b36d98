"""The sweep over public models: its records, its table, and what becomes of models that fail."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import zoo

pytestmark = pytest.mark.zoo
SMALL = "torchvision/squeezenet1_1"


def options(out: Path, *models: str, **more: Any) -> argparse.Namespace:
    settings = {"models": list(models), "list": None, "out": out, "samples": 4, "limit": 200.0, "again": False}
    return argparse.Namespace(**settings | more)


def test_a_small_model_is_measured(tmp_path: Path) -> None:
    zoo.sweep(options(tmp_path, SMALL))
    (record,) = [json.loads(line) for line in (tmp_path / "zoo.jsonl").read_text().splitlines()]
    assert record["status"] == "done" and record["missing"] == {} and record["exact"] > 0
    assert record["layers"] > 50  # of 70 modules
    assert 0 < record["median_error"] < 0.1  # 0.044 measured
    assert f"| {SMALL} |" in (tmp_path / "zoo.md").read_text()


def test_optical_flow_has_a_rule_for_every_operation() -> None:
    model, inputs = zoo.from_torchvision("raft_small")
    counted = zoo.vp.coverage(model.eval(), zoo.per_leaf(inputs, zoo.drawn))
    assert counted.complete and len(counted.exact) > 900


def test_models_already_measured_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(zoo, "run", lambda name, _: asked.append(name) or {"model": name, "status": "crash"})
    zoo.sweep(options(tmp_path, SMALL))
    zoo.sweep(options(tmp_path, SMALL, "torchvision/alexnet"))
    zoo.sweep(options(tmp_path, SMALL, again=True))
    assert asked == [SMALL, "torchvision/alexnet", SMALL]
    assert "0 of 2 models" in (tmp_path / "zoo.md").read_text()


def test_a_crash_and_a_hang_are_results(tmp_path: Path) -> None:
    crashed = zoo.run("torchvision/no_such_model", options(tmp_path))
    assert crashed["status"] == "crash" and "no_such_model" in crashed["error"]
    stuck = zoo.run(SMALL, options(tmp_path, limit=0.1))
    assert stuck["status"] == "too long" and "0.1 s" in stuck["error"]


def test_groups_without_their_package_get_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zoo.PACKAGES, "timm", "no_such_package")
    assert zoo.present([SMALL, "timm/vit", "own/net"]) == [SMALL]
    assert capsys.readouterr().out.splitlines() == [
        "timm: left out, no_such_package is not installed.",
        "own: left out, there is no builder for it here.",
    ]
