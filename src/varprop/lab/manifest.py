"""How a run was made: command, settings, versions, hardware and the state of the sources."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .protocol import Experiment

_PACKAGES = ("varprop", "torch", "numpy", "scipy", "scikit-learn", "triton")


def command_line(module: str = "varprop.lab") -> str:
    """What was called, without the folder of the interpreter or script; a module if one was run."""
    program = Path(sys.argv[0]).name
    called = ["python", "-m", module] if program == "__main__.py" else [program]
    return shlex.join([*called, *sys.argv[1:]])


def describe(experiment: Experiment, device: torch.device, command: str | None) -> dict[str, Any]:
    """Everything that a result depends on, as plain values."""
    sitting = {
        "command": command or command_line(),
        "git": git_state(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {
        "experiment": experiment.name,
        **sitting,
        "sittings": [sitting],
        "configuration": experiment.configuration(),
        "seeds": list(experiment.seeds),
        "lr_max": list(experiment.lr_max),
        "versions": versions(),
        "hardware": hardware(device),
        "seconds": 0.0,
        "finished": False,
    }


def resumed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The description of a run that goes on: it began with the first sitting, and its cells come from all of them."""
    earlier = before.get("sittings") or [{name: before.get(name) for name in ("command", "git", "started")}]
    commands = dict.fromkeys([before["command"], now["command"]])
    return {
        **now,
        "command": " && ".join(commands),
        "started": before["started"],
        "seconds": before["seconds"],
        "sittings": [*earlier, *now["sittings"]],
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter, where they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine."""
    found: dict[str, Any] = {
        "device": device.type,
        "machine": platform.machine(),
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
    return found


def git_state() -> dict[str, Any]:
    """The commit of the sources and whether they differ from it; empty outside a repository."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
