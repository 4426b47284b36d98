import contextlib
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import varprop as vp
from varprop.cli import progress
from varprop_lab.environment import chosen_device, locked
from varprop_lab.execution import RunError, RunOptions
from varprop_lab.execution import run as run_experiment
from varprop_lab.paper.experiments import EXPERIMENTS, reproduce
from varprop_lab.protocol import PAPER_LR_MAX, TRAIN_EVAL_LOSS, TRAIN_LOSS, VALID_BATCH_LOSS, Protocol
from varprop_lab.store import Store, fingerprints

from .. import tiny

QUICK = ("standard", "batch")


def quiet(total, title):
    return contextlib.nullcontext(progress.Progress(total, title))


def run(out, resume=False, factory=tiny.network, data=None, **changes):
    given = {name: changes.pop(name) for name in ("max_seconds", "tensorboard", "overwrite") if name in changes}
    experiment = tiny.experiment(**{"methods": QUICK, "starts": ("bn",), **changes})
    options = RunOptions("cpu", resume, show=quiet, **given)
    return run_experiment(experiment, out, options, dataset=data or tiny.dataset(), factory=factory)


def numbers(outcomes):
    """Everything but the time."""
    return [asdict(replace(outcome, seconds=0.0)) for outcome in outcomes]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    return out, run(out, starts=("none", "bn"))


def test_a_run_leaves_an_outcome_for_every_cell(finished):
    out, outcomes = finished
    assert len(outcomes) == 4
    for outcome in outcomes:
        assert len(outcome.curves[TRAIN_LOSS]) == 3
        assert len(outcome.curves[TRAIN_EVAL_LOSS]) == 3
        assert (VALID_BATCH_LOSS in outcome.curves) == (outcome.cell.method == "batch")
        assert len(outcome.search.trace) == 3
        assert outcome.search.loss == min(loss for _, loss in outcome.search.trace)
        assert 0 <= outcome.start_gap < 1e-4 and outcome.seconds > 0
    assert list((out / "tiny" / "partial").iterdir()) == []


def test_the_manifest_says_how(finished):
    manifest = Store(finished[0] / "tiny").manifest()
    assert manifest["finished"] and manifest["seconds"] > 0
    assert manifest["configuration"]["protocol"]["epochs"] == 3
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["hardware"]["device"] == "cpu"
    assert manifest["versions"]["varprop"] == vp.__version__
    assert manifest["fingerprints"] == fingerprints(tiny.network, tiny.dataset(), {"loss": None, "optimizer": None})
    assert [sitting["seconds"] for sitting in manifest["sittings"]] == [manifest["seconds"]]
    assert {"command", "git", "started", "seeds", "lr_max"} <= manifest.keys()


def test_the_same_again_is_the_same_to_the_last_bit(finished, tmp_path):
    assert numbers(run(tmp_path, starts=("none", "bn"))) == numbers(finished[1])


@pytest.mark.slow
def test_the_manifest_of_a_resumed_run_knows_every_sitting(tmp_path):
    run(tmp_path, seeds=(0,))
    run(tmp_path, resume=True, seeds=(0, 1))
    manifest = Store(tmp_path / "tiny").manifest()
    first, second = manifest["sittings"]
    assert first["started"] == manifest["started"] and {"command", "git", "started", "seconds"} == second.keys()
    assert first["seconds"] + second["seconds"] == pytest.approx(manifest["seconds"])


def test_a_folder_with_results_is_refused_without_resume(finished):
    with pytest.raises(RunError, match="go on with --resume"):
        run(finished[0])


def test_other_settings_are_refused(finished):
    with pytest.raises(RunError, match=r"other settings \(protocol\)"):
        run(finished[0], resume=True, protocol=Protocol(epochs=9))


def test_another_model_or_other_data_are_refused(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)  # resuming writes into the manifest, which others read
    wider = replace(tiny.dataset(), train_x=tiny.dataset().train_x.flip(0))
    for other, name in (({"data": wider}, "data"), ({"factory": lambda: tiny.network().append(nn.Tanh())}, "model")):
        with pytest.raises(RunError, match=rf"The {name} of .*tiny changed since .*--overwrite"):
            run(tmp_path, resume=True, starts=("none", "bn"), **other)
    assert numbers(run(tmp_path, resume=True, starts=("none", "bn"))) == numbers(finished[1])


EDITED = """
from torch import nn

class Own(nn.Sequential):
    def forward(self, x):
        return {factor} * super().forward(x)

def make():
    return Own(nn.Flatten(), nn.Linear(36, 3))
"""


def test_a_model_whose_source_was_edited_is_another_one(tmp_path):
    found = []
    for factor in (1, 2):  # the same layers and the same names, but not the same function
        (tmp_path / "mine.py").write_text(EDITED.format(factor=factor))
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.append(fingerprints(module.make, tiny.dataset()))
    assert [name for name, digest in found[0].items() if found[1][name] != digest] == ["model"]


def test_overwriting_starts_anew_and_leaves_other_files_alone(tmp_path):
    few = {"methods": ("standard",), "search": False}
    run(tmp_path, **few)
    (tmp_path / "tiny" / "notes.txt").write_text("mine")
    again = run(tmp_path, overwrite=True, **few, protocol=Protocol(epochs=1))
    assert len(again) == 1 and len(again[0].curves[TRAIN_LOSS]) == 1
    assert (tmp_path / "tiny" / "notes.txt").read_text() == "mine"
    with pytest.raises(RunError, match="give one of them"):
        run(tmp_path, resume=True, overwrite=True)


def test_what_cannot_be_trained_leaves_no_folder(tmp_path):
    with pytest.raises(Exception, match=r"shape|size"):
        run(tmp_path / "out", factory=lambda: nn.Sequential(nn.Flatten(), nn.Linear(7, 3)), methods=("standard",))
    assert not (tmp_path / "out" / "tiny").exists()


def test_a_sitting_that_fails_keeps_its_time(tmp_path, monkeypatch):
    def out_of_memory(context):
        raise torch.OutOfMemoryError("CUDA out of memory")

    first = run(tmp_path, methods=("standard",))
    monkeypatch.setattr("varprop_lab.execution._run_all", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, resume=True, methods=("standard",), seeds=(0, 1))
    manifest = Store(tmp_path / "tiny").manifest()
    assert [sitting["seconds"] > 0 for sitting in manifest["sittings"]] == [True, True]
    assert not manifest["finished"] and numbers(Store(tmp_path / "tiny").outcomes()) == numbers(first)


def test_a_run_grows_by_more_seeds(tmp_path):
    first = run(tmp_path, methods=("standard",))
    both = run(tmp_path, resume=True, methods=("standard",), seeds=(0, 1))
    assert [outcome.cell.seed for outcome in both] == [0, 1]
    assert numbers(both[:1]) == numbers(first)


def test_a_folder_of_a_version_that_trained_networks_as_one_batch_is_gone_on_with(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    store = Store(tmp_path / "tiny")
    manifest = store.manifest()
    store.write_manifest({**manifest, "configuration": {**manifest["configuration"], "together": True}})
    lost = finished[1][0].cell
    store._cell_file(lost).unlink()
    store.save_partial(lost.key, {"cells": [asdict(lost)], "traces": {lost.key: [(1.0, 1.0)]}, "final": None})
    assert numbers(run(tmp_path, resume=True, starts=("none", "bn"))) == numbers(finished[1])


@pytest.mark.slow
def test_time_that_is_over_stops_at_a_piece_and_resumes_to_the_same_numbers(tmp_path):
    whole = run(tmp_path / "whole")
    found, rounds = [], 0
    while len(found) < len(whole):
        found = run(tmp_path / "pieces", resume=True, max_seconds=0.0)
        rounds += 1
        assert rounds <= 12  # three evaluations and three epochs of two cells
    assert rounds >= 5
    assert numbers(found) == numbers(whole)


def test_a_cell_that_diverges_is_a_result(tmp_path):
    outcomes = run(tmp_path, methods=("standard", "weight"), search=False, lr_max=(1e30,))
    assert [outcome.diverged for outcome in outcomes] == [True, True]
    for outcome in outcomes:
        assert math.isinf(outcome.test_loss) and outcome.test_accuracy == 0
        assert len(outcome.curves.get(TRAIN_LOSS, [])) < 3


def test_event_files_are_written_when_asked(tmp_path):
    pytest.importorskip("tensorboard")
    experiment = tiny.experiment(methods=("standard",), search=False)
    options = RunOptions("cpu", tensorboard=tmp_path / "events", show=quiet)
    run_experiment(experiment, tmp_path / "out", options, dataset=tiny.dataset(), factory=tiny.network)
    assert list((tmp_path / "events" / "tiny").glob("events.out.tfevents.*"))


KILLED = """
import sys
from pathlib import Path
from tests.lab.execution.test_run import run
run(Path(sys.argv[1]), resume=True, starts=("none", "bn"))
"""


@pytest.mark.slow
def test_a_run_that_is_killed_resumes_and_ends_with_the_same_numbers(finished, tmp_path):
    root = Path(__file__).parents[3]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    wait, kills, code = 3.0, 0, None
    while code != 0:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}, cwd=root
        )
        store, known = tmp_path / "tiny", _files(tmp_path / "tiny")
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until and _files(store) == known:
            time.sleep(0.005)  # until there is something new to be resumed from
        if kills < 4:
            process.send_signal(signal.SIGKILL)
            kills += 1
        code = process.wait(wait + 120)
        assert code in (0, -signal.SIGKILL)
    assert kills == 4
    found = Store(tmp_path / "tiny").outcomes()
    assert numbers(found) == numbers(finished[1])


def _files(folder):
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*.pt")} if folder.exists() else set()


# --- the table of experiments ---


def test_the_mnist_figure_has_twelve_cells():
    cells = EXPERIMENTS["mnist"].cells()
    assert len({cell.key for cell in cells}) == len(cells) == 12
    assert {cell.lr_max for cell in cells} == {PAPER_LR_MAX}


@pytest.mark.parametrize("pair", [(0.006, 0.0064), (0.01, 0.010000000000000002), (1e-5, 9.9e-6)])
def test_bounds_that_are_close_are_cells_of_their_own(tmp_path, pair):
    keys = [cell.key for cell in tiny.experiment(methods=("standard",), lr_max=pair).cells()]
    assert len(set(keys)) == 2


def test_a_bound_close_to_that_of_an_earlier_run_is_searched_anew(tmp_path):
    one = {"methods": ("standard",), "starts": ("none",)}
    (first,) = run(tmp_path, lr_max=(0.006,), **one)
    (second,) = run(tmp_path, True, lr_max=(0.0064,), **one)
    assert (first.cell.lr_max, second.cell.lr_max) == (0.006, 0.0064) and first.search.lr != second.search.lr
    assert len(Store(tmp_path / "tiny").outcomes()) == 2
    assert EXPERIMENTS["mnist"].cells()[0].key == "standard.none.s0.b128.lr1e-02"  # as files have always been called


def test_a_folder_that_another_process_writes_to_is_left_alone(tmp_path):
    with locked(tmp_path / "tiny"), pytest.raises(vp.VarpropError, match=r"Another process is writing to .*tiny"):
        run(tmp_path, overwrite=True)
    assert not list((tmp_path / "tiny").iterdir())


RACE = """
import sys
from pathlib import Path

import varprop as vp
from tests.lab.execution.test_run import run

try:
    print(len(run(Path(sys.argv[1]), resume=True)), "outcomes")
except vp.VarpropError as error:
    print(error)
"""


@pytest.mark.slow
def test_two_processes_on_one_folder_write_what_one_would(tmp_path):
    command = [sys.executable, "-c", RACE, tmp_path / "both"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate()[0].strip() for process in both)
    assert said[0] == "2 outcomes"
    assert said[1] == "2 outcomes" or said[1].startswith("Another process is writing to")
    assert numbers(Store(tmp_path / "both" / "tiny").outcomes()) == numbers(run(tmp_path / "alone"))
    assert not list((tmp_path / "both").rglob(".*"))  # nothing unfinished


def test_nothing_is_left_behind_where_something_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("VARPROP_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(vp.VarpropError, match="mnist was not found"):
        reproduce(["mnist"], tmp_path / "out", device="cpu", show=quiet)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RunError, match="Event files need tensorboard"):
        run(tmp_path / "out", tensorboard=tmp_path / "out" / "events")
    assert not (tmp_path / "out").exists()


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(RunError, match="There is no experiment 'nothing'"):
        reproduce(["nothing"], tmp_path)
    with pytest.raises(vp.VarpropError, match="auto, cpu or cuda"):
        chosen_device("tpu")


@pytest.mark.slow
def test_several_processes_find_the_same_numbers(tmp_path):
    chosen = {"methods": ("standard", "analytic"), "starts": ("none", "bn")}
    alone = run(tmp_path / "alone", **chosen)
    experiment = tiny.experiment(**chosen)
    counted = []

    class Counter:
        def advance(self, steps=1, text=""):
            counted.append(steps)

    options = RunOptions("cpu", jobs=2, show=lambda total, title: contextlib.nullcontext(Counter()))
    apart = run_experiment(experiment, tmp_path / "apart", options, dataset=tiny.dataset(), factory=tiny.network)
    assert numbers(apart) == numbers(alone)
    assert sum(counted) == 4 * (3 + 3) * 6  # cells, epochs of searches and of the final training, steps


@pytest.mark.slow
def test_several_processes_stop_in_time_and_go_on(tmp_path):
    experiment = tiny.experiment(methods=QUICK, starts=("bn",))
    data, options = {"dataset": tiny.dataset(), "factory": tiny.network}, RunOptions("cpu", jobs=2, show=quiet)
    assert run_experiment(experiment, tmp_path, replace(options, max_seconds=0.0), **data) == []
    later = run_experiment(experiment, tmp_path, replace(options, resume=True), **data)
    assert numbers(later) == numbers(run(tmp_path / "alone"))


def test_what_other_processes_cannot_import_is_refused(tmp_path):
    options = RunOptions("cpu", jobs=2, show=quiet)
    data = {"dataset": tiny.dataset(), "factory": lambda: tiny.network()}
    with pytest.raises(RunError, match=r"other processes must import the model, and cannot import .*leave out jobs"):
        run_experiment(tiny.experiment(), tmp_path / "out", options, **data)
    assert not (tmp_path / "out").exists()
