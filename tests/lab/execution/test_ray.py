"""Sweeps on Ray: the numbers and files of a run without it, whatever is killed."""

import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import varprop as vp
from varprop_lab import execution as ray_cluster
from varprop_lab.execution import RunError, RunOptions
from varprop_lab.execution import run as run_experiment
from varprop_lab.store import Store

from .. import tiny
from .test_run import numbers, quiet

needs_ray = pytest.mark.ray
ROOT = Path(__file__).parents[3]
EPOCHS = 40  # long enough to be killed in


def recorded_network(folder):
    """The network, and a file named after the process that made it."""
    (folder / str(os.getpid())).touch()
    return tiny.network()


def broken_network():
    raise vp.VarpropError("This network cannot be made.")


def run(out, ray=None, factory=tiny.network, resume=False, max_seconds=math.inf, **changes):
    protocol = replace(tiny.experiment().protocol, epochs=EPOCHS)
    chosen = {"methods": ("standard", "weight"), "starts": ("none",), "protocol": protocol}
    experiment = tiny.experiment(**{**chosen, **changes})
    options = RunOptions("cpu", resume, ray=ray, show=quiet, max_seconds=max_seconds)
    return run_experiment(experiment, out, options, dataset=tiny.dataset(), factory=factory)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def wait_for(condition, seconds=400.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.005)


def is_running(pid):
    """Whether the process is there and no zombie."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same without Ray."""
    out = tmp_path_factory.mktemp("alone")
    return out, run(out)


@needs_ray
@pytest.mark.timeout(900)
def test_ray_finds_the_same_numbers_and_leaves_the_same_files(alone, tmp_path):
    out, outcomes = alone
    assert numbers(run(tmp_path, "local")) == numbers(outcomes)
    assert files(tmp_path) == files(out)
    kept = [Store(folder / "tiny").manifest() for folder in (tmp_path, out)]
    assert kept[0]["finished"] and kept[0].keys() == kept[1].keys()


def is_training(out):
    """Whether a checkpoint of a final training is there."""
    with contextlib.suppress(FileNotFoundError):  # of a job that is finished meanwhile
        return any(torch.load(file, weights_only=True)["final"] for file in out.rglob("partial/*.pt"))
    return False


@needs_ray
@pytest.mark.timeout(900)
def test_a_worker_that_is_killed_costs_nothing_but_time(alone, tmp_path):
    pids, out, killed = tmp_path / "pids", tmp_path / "out", []
    pids.mkdir()

    def kill():
        wait_for(lambda: is_training(out))  # there is something to go on from
        workers = {int(path.name) for path in pids.iterdir()} - {os.getpid()}  # the driver has looked at the model
        killed.extend(pid for pid in workers if is_running(pid))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(out, "local", functools.partial(recorded_network, pids))
    killer.join()
    assert killed and {int(path.name) for path in pids.iterdir()} - {os.getpid()} > set(killed)  # others went on
    assert numbers(found) == numbers(alone[1])
    assert files(out) == files(alone[0])


DRIVER = """
import functools, sys
from pathlib import Path
from tests.lab.execution.test_ray import recorded_network, run
run(Path(sys.argv[1]), "local", functools.partial(recorded_network, Path(sys.argv[2])))
"""


@needs_ray
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_takes_its_workers_along_and_resumes(alone, tmp_path):
    pids, out = tmp_path / "pids", tmp_path / "out"
    pids.mkdir()
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", DRIVER, str(out), str(pids)]
    driver = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, cwd=ROOT)
    wait_for(lambda: is_training(out) or driver.poll() is not None)
    driver.kill()
    assert driver.wait(60) == -signal.SIGKILL  # not finished before
    wait_for(lambda: not any(is_running(int(path.name)) for path in pids.iterdir()))
    assert not Store(out / "tiny").manifest()["finished"]
    again = functools.partial(recorded_network, pids)  # the same model, or it would be refused
    assert numbers(run(out, "local", again, resume=True)) == numbers(alone[1])
    assert files(out) == files(alone[0])


@needs_ray
@pytest.mark.timeout(900)
def test_a_cluster_by_its_address(alone, tmp_path):
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        assert numbers(run(tmp_path, cluster.address)) == numbers(alone[1])
        with pytest.raises(vp.VarpropError, match="This network cannot be made"):
            run(tmp_path / "broken", cluster.address, broken_network)
    finally:
        cluster.shutdown()
    with pytest.raises(RunError, match="There is no Ray cluster at"):
        run(tmp_path / "nowhere", "127.0.0.1:1")


def test_resources_that_are_not_there_are_named():
    with pytest.raises(RunError, match="A cell needs 1 GPU of Ray, which has 0"):
        ray_cluster._require_resources({"CPU": 4.0}, {"num_cpus": 1, "num_gpus": 1.0})


def test_without_ray_one_sentence_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(vp.VarpropError, match=r"--ray needs ray: pip install '\.\[ray\]'"):
        run(tmp_path, "local")


def test_event_files_are_written_here_only(tmp_path):
    with pytest.raises(RunError, match="one process only"):
        RunOptions("cpu", ray="local", tensorboard=tmp_path)
