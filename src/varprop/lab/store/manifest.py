"""How a run was made: command, settings, versions, hardware and the state of the sources."""

from __future__ import annotations

from typing import Any

import torch

from ..environment import provenance
from ..protocol.experiments import Experiment


def describe(experiment: Experiment, device: torch.device, fingerprints: dict[str, str]) -> dict[str, Any]:
    """Everything that a result depends on, as plain values."""
    source = provenance(device)
    return {
        "experiment": experiment.name,
        **source,
        "sittings": [{name: source[name] for name in ("command", "git", "started")}],
        "configuration": experiment.configuration(),
        "fingerprints": fingerprints,
        "seeds": list(experiment.seeds),
        "lr_max": list(experiment.lr_max),
        "seconds": 0.0,
        "finished": False,
    }


def ended(described: dict[str, Any], seconds: float, finished: bool) -> dict[str, Any]:
    """The description of a run after a sitting of so many seconds."""
    *earlier, last = described["sittings"]
    sittings = [*earlier, {**last, "seconds": seconds}]
    return {**described, "sittings": sittings, "seconds": described["seconds"] + seconds, "finished": finished}


def resumed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The description of a run that goes on: it began with the first sitting, and its cells come from all of them."""
    commands = dict.fromkeys([before["command"], now["command"]])
    return {
        **now,
        "command": " && ".join(commands),
        "started": before["started"],
        "seconds": before["seconds"],
        "sittings": [*before["sittings"], *now["sittings"]],
    }


def part(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of the manifest, empty where it is missing."""
    value = manifest.get(name)
    return value if isinstance(value, dict) else {}


def sittings(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The commands of a run that was resumed, each with its git state where that was kept."""
    kept = manifest.get("sittings")
    if isinstance(kept, list):
        return [sitting for sitting in kept if isinstance(sitting, dict)]
    command = manifest.get("command")
    return [{"command": one} for one in command.split(" && ")] if isinstance(command, str) and command else []
