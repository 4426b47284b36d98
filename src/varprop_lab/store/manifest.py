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
