"""One file over HTTP into a ``.part`` file that a later attempt continues."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import varprop as vp

from . import progress

_CHUNK = 1 << 18
_RESUMES = 5  # continuations of one transfer from one source, as long as each brings something


class TransferError(vp.VarpropError):
    """A transfer failed; the message names the host and the reason in a few words. What came so far is kept."""


def fetch(url: str, part: Path, timeout: float = 30.0) -> None:
    """Bring the whole file into `part`, continuing what is there.

    Args:
        url: Of the file.
        part: The file to write; complete when this returns, kept as far as it came when this raises.
        timeout: Seconds without a byte after which the source is given up.

    Raises:
        TransferError: If the source does not answer, refuses, or breaks off again and again.
    """
    for attempt in range(_RESUMES + 1):
        before = _size(part)
        try:
            return _continue(url, part, timeout)
        except TransferError:
            if attempt == _RESUMES or _size(part) <= before:
                raise


def _continue(url: str, part: Path, timeout: float) -> None:
    have = _size(part)
    try:
        response = urllib.request.urlopen(_request(url, have), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing beyond what is there: it is whole, or not a part of this file
            return _accept_or_restart(url, part, error.headers.get("Content-Range"), timeout)
        raise _failed(url, f"HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _failed(url, _reason(error)) from error
    with response:
        _receive(response, url, part, _start(response, have))


def _request(url: str, have: int) -> urllib.request.Request:
    headers = {"User-Agent": "varprop", "Accept-Encoding": "identity"}
    return urllib.request.Request(url, headers={**headers, "Range": f"bytes={have}-"} if have else headers)


def _accept_or_restart(url: str, part: Path, content_range: str | None, timeout: float) -> None:
    if content_range != f"bytes */{_size(part)}":
        part.unlink()
        _continue(url, part, timeout)


def _start(response: Any, have: int) -> int:
    """From which byte the answer begins: a server that knows no ranges sends the whole file again."""
    began = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    return have if response.status == 206 and began and int(began[1]) == have else 0


def _receive(response: Any, url: str, part: Path, start: int) -> None:
    length = response.headers.get("Content-Length")
    total = start + int(length) if length else None
    with (
        _opened(part, "ab" if start else "wb") as file,
        progress.show((total or 0) // 1000, f"{part.stem}, kB", start // 1000) as bar,
    ):
        _copy(response, url, file, bar)
    if total is not None and _size(part) < total:
        raise _failed(url, f"the connection ended after {_size(part)} of {total} bytes")


def _copy(response: Any, url: str, file: IO[bytes], bar: progress.Progress) -> None:
    received = 0
    while chunk := _read(response, url):
        _write(file, chunk)
        bar.advance((received + len(chunk)) // 1000 - received // 1000)
        received += len(chunk)


def _read(response: Any, url: str) -> bytes:
    try:
        chunk: bytes = response.read1(_CHUNK)
        return chunk
    except (OSError, http.client.HTTPException) as error:
        raise _failed(url, _reason(error)) from error


def _write(file: IO[bytes], chunk: bytes) -> None:
    left = memoryview(chunk)
    try:
        while left:  # unbuffered, so that a full disk shows here and not when the file is closed
            left = left[file.write(left) :]
    except OSError as error:
        raise vp.VarpropError(f"{file.name} could not be written: {error.strerror or error}.") from error


def _opened(part: Path, mode: str) -> IO[bytes]:
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        return part.open(mode, buffering=0)
    except OSError as error:
        raise vp.VarpropError(f"{part} could not be written: {error.strerror or error}.") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _failed(url: str, why: str) -> TransferError:
    return TransferError(f"{urlsplit(url).netloc}: {why}")


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    if isinstance(inner, OSError) and inner.strerror:
        return f"no connection ({inner.strerror})"
    return str(inner) or type(inner).__name__
