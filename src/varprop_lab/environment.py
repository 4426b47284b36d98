"""What a run depends on (device, packages, versions, machine, sources), and files written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.metadata
import os
import platform
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import varprop as vp

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

_PACKAGES = ("varprop", "torch", "numpy", "scipy", "scikit-learn", "triton")


def chosen_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is the GPU if there is one.

    Raises a VarpropError if the name is unknown, or there is no GPU where one was asked for.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise vp.VarpropError(f"The device must be auto, cpu or cuda, not {name!r}.")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise vp.VarpropError(f"torch {torch.__version__} sees no CUDA device; use --device cpu.")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def require(package: str, purpose: str, extra: str = "lab") -> Any:
    """Import an optional package, which an extra of varprop brings.

    Raises a VarpropError if it is not installed; the sentence begins with the `purpose`.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        raise vp.VarpropError(f"{purpose} needs {name}: pip install '.[{extra}]' in a checkout of varprop.") from error


@contextlib.contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """One thread, for results depend on their number; on a GPU deterministic algorithms."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(1)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def provenance(device: torch.device) -> dict[str, Any]:
    """How something came about that is made now on a device: command, sources, versions, machine, time."""
    return {
        "command": command_line(),
        "git": git_state(),
        "versions": versions(),
        "hardware": hardware(device),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """The command that was called, without the folder of the interpreter or script; the module if one was run."""
    program = Path(sys.argv[0]).name
    called = ["python", "-m", "varprop"] if program == "__main__.py" else [program]
    return shlex.join([*called, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where they are installed."""
    numbers = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers[name] = importlib.metadata.version(name)
    return {**numbers, "torch": torch.__version__, "varprop": vp.__version__}  # installed or not


def hardware(device: torch.device) -> dict[str, Any]:
    """The machine."""
    machine = {"device": device.type, "machine": platform.machine(), "cpu_threads": torch.get_num_threads()}
    gpu = device.type == "cuda"
    return {**machine, "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda} if gpu else machine


def git_state() -> dict[str, Any]:
    """The commit, whether the sources in src differ from it, and the hash of how; empty outside a repository."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    changes = _git("diff", "--full-index", "HEAD", "--", ":/src")  # abbreviated names grow with the repository
    difference = {"diff": hashlib.sha256(changes.encode()).hexdigest()} if changes else {}
    return {"commit": commit, "dirty": bool(changes), **difference}


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_AGAIN = "run the command again with --resume; what is finished is kept"
_UNFINISHED = ".tmp"


class StoreError(vp.VarpropError):
    """A file of a run could not be written or read; the message says which and what to do."""


class Files:
    """Where a store keeps its files: the disk here."""

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, whole or not at all."""
        write_atomically(path, content)

    def read(self, path: Path) -> bytes | None:
        """Its content; None if there is no such file."""
        try:
            return path.read_bytes() if path.is_file() else None
        except OSError as error:
            raise StoreError(f"{path} could not be read: {error.strerror or error}.") from error

    def remove(self, path: Path) -> None:
        """Delete it; nothing happens if there is none."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path} could not be removed: {error.strerror or error}.") from error


def write_atomically(path: Path, content: bytes, then: str = _AGAIN) -> None:
    """Write a file so that it is either there whole or not there, whenever the process or the machine stops.

    Raises a StoreError if it cannot be written; what was there before stays. On a full disk it says what to do
    `then`.
    """
    # a name of its own, so that two processes that write the same file do not write into each other's
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_through(temporary, content)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):  # the error that led here is the one to report
            temporary.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"There is no space left on the disk to write {path}: free some and {then}.") from error
        raise StoreError(f"{path} could not be written: {error.strerror or error}.") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process can enter this for the same folder (a StoreError), which is made if it is not there.

    The lock is the system's and ends with the process, however it ends. Systems that have none (Windows) let all enter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = folder.is_dir() and os.fstat(handle).st_ino == folder.stat().st_ino  # nobody has just removed it
        except BlockingIOError:
            free = False
        if not free:
            raise StoreError(f"Another process is writing to {folder}: wait for it, or choose another --out.")
        yield
    finally:
        os.close(handle)


def remove_unfinished(folder: Path) -> None:
    """Delete what processes that were killed while they wrote a file have left in a folder and those in it."""
    for path in folder.rglob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)


def _write_through(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The new name itself must reach the disk; Windows cannot open a folder and does not need it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
