"""The C sources compiled once for this machine and kept in the user's cache directory.

The name of the library holds a hash of sources, flags, compiler and processor: a change of any of them makes another
one. It is written beside its place and then renamed, so that processes that compile at the same time do no harm.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c99", "-O3", "-fopenmp-simd", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
PATIENCE = 120  # seconds for the compiler
_lock = threading.Lock()


class Unavailable(Exception):
    """Why there is no compiled code, in words."""


@dataclass(frozen=True)
class Compiled:
    """The compiled code, or why there is none.

    Attributes:
        library: None where there is none.
        status: The library's place, or the reason.
    """

    library: ctypes.CDLL | None
    status: str


def compiled() -> Compiled:
    """The compiled code for this machine; compiled when first asked for. Never raises."""
    if os.environ.get("VARPROP_NATIVE", "1") == "0":
        return Compiled(None, "switched off by VARPROP_NATIVE=0")
    with _lock:
        return _compiled()


@functools.cache
def _compiled() -> Compiled:
    try:
        place = _place(_compiler())
        return Compiled(_loaded(place), str(place))
    except (Unavailable, OSError, RuntimeError, subprocess.SubprocessError) as error:  # no home is a RuntimeError
        return Compiled(None, " ".join(str(error).split()) or type(error).__name__)


def describe_native() -> str:
    """One line on who folds small networks on the CPU, and why; compiles if nothing was compiled yet."""
    found = compiled()
    if found.library is not None:
        return f"small networks on the CPU are folded by compiled code: {found.status}"
    return f"small networks on the CPU are folded by torch operations, which is slower: {found.status}"


def cache_directory() -> Path:
    """``$VARPROP_CACHE``, ``$XDG_CACHE_HOME/varprop`` or ``~/.cache/varprop``."""
    own, base = os.environ.get("VARPROP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(base) if base else Path.home() / ".cache") / "varprop"


def _compiler() -> str:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found is None:
        raise Unavailable("no C compiler (cc, gcc or clang) on PATH")
    return found


def _place(compiler: str) -> Path:
    """Where the library is or will be."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=PATIENCE).stdout
    parts = [*(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))), version, " ".join(_flags()).encode()]
    parts += [platform.machine().encode(), platform.system().encode(), _processor()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]
    return cache_directory() / "native" / f"fold-{digest}.so"


def _flags() -> tuple[str, ...]:
    """Code for this very processor only where its name is known and goes into the library's."""
    return (*FLAGS, "-march=native") if _processor() and platform.machine() in ("x86_64", "AMD64") else FLAGS


@functools.cache
def _processor() -> bytes:
    """The processor's model and abilities; empty where they are not told."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    wanted = (b"model name", b"flags")
    return b"\n".join(next((line for line in lines if line.startswith(name)), b"") for name in wanted).strip()


def _loaded(place: Path) -> ctypes.CDLL:
    """The library, compiled if it is not there or cannot be loaded."""
    if place.exists():
        try:
            return ctypes.CDLL(str(place))
        except OSError:  # a damaged file is replaced
            pass
    _compile(_compiler(), place)
    return ctypes.CDLL(str(place))


def _compile(compiler: str, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".tmp", dir=place.parent)
    os.close(handle)
    try:
        command = [compiler, *_flags(), "-o", name, str(SOURCES / "fold.c"), "-lm"]
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE, cwd=place.parent)
        if done.returncode:
            raise Unavailable(f"{compiler} failed: {done.stderr.decode(errors='replace')[:300]}")
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)
