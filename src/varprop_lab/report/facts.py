"""How a run was made, in words: its manifest as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def facts(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values of all that is known."""
    if not manifest:
        return []
    versions = manifest.get("versions", {})
    known = {
        "Command": manifest.get("command"),
        "Hardware": _machine(manifest.get("hardware", {})),
        "Versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None),
        "Git": git_text(manifest.get("git", {})),
        "Started": manifest.get("started"),
        "Time": duration(manifest.get("seconds")),
        "Data": manifest.get("fingerprints", {}).get("data"),
        "Configuration": ", ".join(_flat(manifest.get("configuration", {}))),
    }
    return [(name, str(value)) for name, value in known.items() if value not in (None, "")]


def git_text(git: dict[str, Any]) -> str:
    """The commit, and whether the sources differed from it."""
    if not git:
        return "unknown"
    changes = f" (SHA-256 {str(git['diff'])[:12]})" if git.get("diff") else ""
    return f"{git.get('commit', 'unknown')}{f', with local changes{changes}' if git.get('dirty') else ''}"


def _machine(hardware: dict[str, Any]) -> str:
    names = {"gpu": "", "cuda": "CUDA ", "machine": "", "cpu_threads": ""}
    parts = [f"{prefix}{hardware[name]}" for name, prefix in names.items() if hardware.get(name)]
    return ", ".join(parts) + (" threads" if hardware.get("cpu_threads") else "")


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """``name = value``, with a dot for what lies inside."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {value}"


def duration(seconds: float | None) -> str | None:
    """Seconds in words; None where they are not known."""
    if seconds is None:
        return None
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes} min {rest} s"
