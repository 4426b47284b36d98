"""One file over HTTP into a ``.part`` file that a later attempt continues."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import varprop as vp

from .. import progress

_CHUNK = 1 << 18
_RESUMES = 5  # continuations of one transfer from one source, as long as each brings something


class TransferError(vp.VarpropError):
    """A transfer failed; the message names the host and the reason in a few words. What came so far is kept."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"{urlsplit(url).netloc}: {why}")


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
    headers = {"User-Agent": "varprop", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**headers, "Range": f"bytes={have}-"} if have else headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            _receive(response, url, part, have)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 416 or not have:
            raise TransferError(url, f"HTTP {error.code} {error.reason}") from error
        if error.headers.get("Content-Range") != f"bytes */{have}":  # not whole, so not a part of this file
            part.unlink()
            _continue(url, part, timeout)
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(url, _reason(error)) from error


def _receive(response: Any, url: str, part: Path, have: int) -> None:
    # A server that knows no ranges sends the whole file again.
    began = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    start = have if response.status == 206 and began and int(began[1]) == have else 0
    length = response.headers.get("Content-Length")
    total = start + int(length) if length else None
    if not start:
        _write(part, b"", "wb")
    with progress.show((total or 0) // 1000, f"{part.stem}, kB", start // 1000) as bar:
        received = 0
        while chunk := response.read1(_CHUNK):
            _write(part, chunk, "ab")
            bar.advance((received + len(chunk)) // 1000 - received // 1000)
            received += len(chunk)
    if total is not None and _size(part) < total:
        raise TransferError(url, f"the connection ended after {_size(part)} of {total} bytes")


def _write(part: Path, content: bytes, mode: str) -> None:
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open(mode) as file:
            file.write(content)
    except OSError as error:
        raise vp.VarpropError(f"{part} could not be written: {error.strerror or error}.") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: Exception) -> str:
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    if isinstance(inner, OSError) and inner.strerror:
        return f"no connection ({inner.strerror})"
    return str(inner) or type(inner).__name__
