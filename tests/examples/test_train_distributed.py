"""The example goes on from its checkpoints: after a killed worker, and with other numbers of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def run(launch: list[str], folder: Path, *arguments: str, **variables: str) -> str:
    script = [str(ROOT / "examples" / "train_distributed.py"), "--checkpoints", str(folder), *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **variables}
    command = [sys.executable, *launch, *script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def torchrun(processes: int, folder: Path, *arguments: str, restarts: int = 0) -> str:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return run([*launch, f"--max-restarts={restarts}"], folder, *arguments)


def alone(folder: Path, *arguments: str) -> None:
    """One process, without the second one that torchrun is: every start takes seconds."""
    run([], folder, *arguments, RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")


def final(folder: Path, step: int) -> dict[str, Any]:
    dcp_to_torch_save(folder / f"{step:08}", folder / "final.pt")
    found = torch.load(folder / "final.pt", weights_only=False)
    return {**found["model"], **{name: state["momentum_buffer"] for name, state in found["optimizer"]["state"].items()}}


def test_a_killed_worker_and_other_numbers_of_processes_change_nothing(tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    alone(whole, "--engine", "ddp", "--steps", "6")
    alone(pieces, "--engine", "fsdp", "--steps", "2")
    killed = torchrun(2, pieces, "--engine", "fsdp", "--steps", "5", "--save-every", "1", "--kill-at", "4", restarts=1)
    assert "exitcode: -9" in killed
    alone(pieces, "--engine", "fsdp", "--steps", "6")
    expected, found = final(whole, 6), final(pieces, 6)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12)
