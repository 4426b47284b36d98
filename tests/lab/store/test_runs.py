import json

import pytest

from varprop_lab.store import read_run, read_runs

from .. import synthetic

OUTCOMES = synthetic.grid("mnist", seeds=(0, 1), starts=("bn", "ap2"))


def test_reading_names_what_it_cannot_read_and_keeps_the_rest(tmp_path):
    synthetic.write(tmp_path, OUTCOMES)
    cells = sorted((tmp_path / "mnist" / "cells").iterdir())
    cells[0].write_text("{ not json")
    cells[1].write_text(json.dumps({**json.loads(cells[2].read_text()), "curves": {"train_loss": ["low"]}}))
    (tmp_path / "mnist" / "manifest.json").write_text("[]")
    run = read_run(tmp_path / "mnist")
    assert len(run.outcomes) == len(OUTCOMES) - 2
    assert run.manifest == {}
    assert [sum(name in problem for problem in run.problems) for name in (cells[0].name, cells[1].name)] == [1, 1]
    assert any("manifest.json" in problem for problem in run.problems)


def test_reading_shows_the_missing_and_skips_what_is_no_experiment(tmp_path):
    synthetic.write(tmp_path, OUTCOMES)
    (tmp_path / "notes").mkdir()
    runs = read_runs(tmp_path, ["relu", "noisy-mnist", "claims"])
    assert [run.experiment for run in runs] == ["mnist", "noisy-mnist", "relu"]
    assert runs[1].problems == ["no finished cells"]
    missing = [f"no finished cell of {method} from none" for method in ("standard", "weight", "batch", "analytic")]
    assert [problem.split(" (")[0] for problem in runs[0].problems] == missing
    assert read_runs(tmp_path / "nowhere") == []


def test_reading_names_the_seeds_that_are_missing(tmp_path):
    outcomes = [o for o in synthetic.grid("mnist") if o.cell.method != "weight" or o.cell.seed == 0]
    lost = next(o for o in outcomes if (o.cell.method, o.cell.start, o.cell.seed) == ("batch", "ap2", 2))
    synthetic.write(tmp_path, [o for o in outcomes if o is not lost])
    assert read_run(tmp_path / "mnist").problems == [
        "no finished cell of weight with seed 1, 2 from none, bn, ap2 (batch 128, lr at most 0.01)",
        "no finished cell of batch with seed 2 from ap2 (batch 128, lr at most 0.01)",
    ]


def test_a_seed_asked_for_and_never_finished_is_missing(tmp_path):
    synthetic.write(tmp_path, synthetic.grid("mine", seeds=(0,), starts=("bn",), methods=("batch",)))
    manifest = tmp_path / "mine" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "seeds": [0, 1]}))
    (problem,) = read_run(tmp_path / "mine").problems
    assert problem.startswith("no finished cell of batch with seed 1 from bn")


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": "many"},
        {"seeds": ["a"]},
        {"seconds": "long"},
        {"git": "abc"},
        {"configuration": {"methods": 5}},
        {"sittings": [1]},
        {"sittings": [{"seconds": "long"}]},
        {"sittings": [{"git": "abc"}]},
    ],
)
def test_a_manifest_of_the_wrong_kind_is_named_and_left_aside(tmp_path, wrong):
    synthetic.write(tmp_path, synthetic.grid("mine", seeds=(0,), starts=("bn",), methods=("batch",)))
    (tmp_path / "mine" / "manifest.json").write_text(json.dumps({**synthetic.manifest("mine"), **wrong}))
    run = read_run(tmp_path / "mine")
    assert run.manifest == {} and len(run.outcomes) == 1
    (problem,) = run.problems
    assert problem.startswith("How this was run is unknown") and "manifest.json is damaged" in problem
