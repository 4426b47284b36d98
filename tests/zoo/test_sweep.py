"""The sweep over public models: its journal, and what becomes of models that fail."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.zoo import alarms, damage, measure, models, sweep
from benchmarks.zoo.sweep import Settings, journal, run

SMALL, OTHER = "basic/paper_mnist_mlp", "basic/nn_mha"


def settings(folder: Path, samples: int = 4, **more: Any) -> Settings:
    study = partial(measure.study, samples=samples)
    return Settings(**{"journal": folder / "zoo.jsonl", "study": study, "said": measure.said} | more)


def test_a_small_model_is_measured(tmp_path: Path) -> None:
    (record,) = sweep.sweep([SMALL], settings(tmp_path, samples=16))
    assert record["status"] == "done" and record["missing"] == {} and record["exact"] == 14
    assert record["layers"] == 15 and record["input"] == "784"
    assert 0 < record["median_error"] < 0.1  # 0.035 measured
    assert journal(tmp_path / "zoo.jsonl")[SMALL]["median_error"] == record["median_error"]


def test_models_already_measured_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(sweep, "run", lambda name, *_: asked.append(name) or {"model": name, "status": "crash"})
    sweep.sweep([SMALL], settings(tmp_path))
    assert [record["model"] for record in sweep.sweep([SMALL, OTHER], settings(tmp_path))] == [SMALL, OTHER]
    sweep.sweep([SMALL], settings(tmp_path, again=True))
    assert asked == [SMALL, OTHER, SMALL]


def test_failures_are_results(tmp_path: Path) -> None:
    crashed = run("basic/no_such_model", settings(tmp_path))
    assert crashed["status"] == "crash" and "no_such_model" in crashed["error"]
    stuck = run(SMALL, settings(tmp_path, limit=0.01))
    assert stuck["status"] == "too long" and "0.01 s" in stuck["error"]


def test_several_at_a_time_and_an_end(tmp_path: Path) -> None:
    def waits(name: str) -> Iterator[dict[str, Any]]:
        time.sleep({SMALL: 1.0, OTHER: 1.2}.get(name, 60.0))
        yield {"model": name, "status": "done", "alarms": []}

    names = [SMALL, OTHER, "basic/nn_lstm", "basic/nn_gru"]
    start = time.perf_counter()
    records = sweep.sweep(names, settings(tmp_path, study=waits, said=alarms.said, workers=3, max_seconds=2.5))
    assert [record["model"] for record in records] == [SMALL, OTHER]
    assert list(journal(tmp_path / "zoo.jsonl")) == [SMALL, OTHER]
    assert time.perf_counter() - start < 30


def test_a_second_half_that_fails_does_not_cost_the_first(tmp_path: Path) -> None:
    done = {"model": SMALL, "status": "done", "median_error": 0.3}

    def fails(*_: Any) -> Iterator[dict[str, Any]]:
        yield done
        raise ValueError("too large")

    def hangs(*_: Any) -> Iterator[dict[str, Any]]:
        yield done
        time.sleep(60)

    assert (
        run(SMALL, settings(tmp_path, study=fails)).items()
        >= (done | {"apart": {"error": "ValueError: too large"}}).items()
    )
    late = {"error": "not finished within 0.1 s of CPU time"}
    assert run(SMALL, settings(tmp_path, study=hangs, limit=0.1)).items() >= (done | {"apart": late}).items()


def test_a_model_that_takes_too_much_memory_ends_alone(tmp_path: Path) -> None:
    import torch

    too_much = settings(tmp_path, study=lambda _: torch.zeros(2**32), memory=1.0)
    assert run(SMALL, too_much)["status"] == "crash"


def test_operations_alone_are_counted_without_samples(tmp_path: Path) -> None:
    record = run(SMALL, settings(tmp_path, samples=0))
    assert record["status"] == "counted" and "median_error" not in record


def test_groups_without_their_package_get_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.GROUPS, "timm", ("no_such_package", models.GROUPS["timm"][1]))
    assert models.present([SMALL, "timm/vit", "own/net"]) == [SMALL]
    assert capsys.readouterr().out.splitlines() == [
        "timm: left out, no_such_package is not installed.",
        "own: left out, there is no builder for it here.",
    ]


@pytest.mark.zoo
def test_optical_flow_has_a_rule_for_every_operation(tmp_path: Path) -> None:
    record = run("torchvision/raft_small", settings(tmp_path, samples=0))
    assert record["missing"] == {} and record["exact"] > 900


def test_alarms_are_written_down() -> None:
    (record,) = alarms.study(OTHER)
    assert record["status"] == "done" and record["alarms"] == [] and alarms.said(record) == "nothing"
    (record,) = alarms.study(SMALL)  # PyTorch's own initialization of a deep logistic network
    assert {kind for _, kind, *_ in record["alarms"]} >= {"decay", "vanish"}


def test_a_record_says_by_which_judge_and_when_and_another_judge_judges_again(tmp_path: Path) -> None:
    stamp = alarms.stamp()

    def nothing(name: str) -> Iterator[dict[str, Any]]:
        yield {"model": name, "status": "done", "alarms": []}

    (first,) = sweep.sweep([OTHER], settings(tmp_path, study=nothing, said=alarms.said, stamp=stamp))
    assert first["judge"] == stamp["judge"] and re.fullmatch(r"\d{4}-\d\d-\d\d", first["judged"])

    def never(name: str) -> Iterator[dict[str, Any]]:
        yield {"model": name, "status": "done", "alarms": [["error", "growth", "1", "said by another judge"]]}

    same = settings(tmp_path, study=never, said=alarms.said, stamp=stamp)
    assert sweep.sweep([OTHER], same) == [first]
    (second,) = sweep.sweep([OTHER], replace(same, stamp=stamp | {"judge": "another"}))
    assert second["alarms"] and second["judge"] == "another"


def test_a_model_that_was_not_finished_keeps_its_record() -> None:
    done, late = {"model": "timm/a", "status": "done"}, {"model": "timm/a", "status": "too long"}
    assert alarms.newest({"timm/a": done}, {"timm/a": late}) == {"timm/a": done}
    assert alarms.newest({"timm/a": late}, {"timm/a": done}) == {"timm/a": done}
    assert alarms.newest({}, {"timm/a": late}) == {"timm/a": late}
    crash = {"model": "timm/a", "status": "crash"}
    assert alarms.newest({"timm/a": crash}, {"timm/a": late}) == {"timm/a": late}


def test_damage_that_is_not_found_is_said() -> None:
    (record,) = damage.study("basic/nn_lstm")
    assert record["damages"] == {"saturated gates": ["constant"]}
    record["damages"]["saturated gates"] = []
    assert damage.said(record) == "saturated gates: NOT FOUND"


def test_the_tables_count_alarms_and_damages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alarms, "RESULTS", tmp_path / "findings.json")
    alarm = ["error", "growth", "3", "std has grown"]
    good = [
        {"model": "timm/a", "status": "done", "alarms": []},
        {"model": "timm/b", "status": "done", "alarms": [alarm]},
    ]
    late = {"model": "timm/c", "status": "too long", "error": "not finished"}
    broken = {"model": "timm/a", "status": "done", "damages": {"zeros": ["constant"], "noise": []}}
    alarms.write([*good, late], [broken])
    told = capsys.readouterr().out
    assert "| timm | 2 | 1 | 1 | b: error growth at 3 |" in told and "| all | 2 | 1 | 1 |  |" in told
    assert "0 of 2 by the present judge" in told and "By an earlier one: timm/a, timm/b." in told
    assert "| zeros | timm/a (constant) |" in told and "| noise | timm/a (not found) |" in told
    assert len(json.loads((tmp_path / "findings.json").read_text())) == 4
