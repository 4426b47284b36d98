"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import varprop as vp

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

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

    Raises:
        StoreError: If it cannot be written; what was there before stays. On a full disk it says what to do `then`.
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
        raise StoreError(_why_not_written(path, error, then)) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process can enter this for the same folder, which is made if it is not there.

    The lock is the system's and ends with the process, however it ends. Systems that have none (Windows) let all enter.

    Raises:
        StoreError: If another process is inside.
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


def _why_not_written(path: Path, error: OSError, then: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"There is no space left on the disk to write {path}: free some and {then}."
    return f"{path} could not be written: {error.strerror or error}."
