"""Exports that reports and comparisons have in common: JSON, and a page."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from ...errors import VarpropError
from .format import finite_json
from .page import Page, render


class Exports(ABC):
    """What follows from the plain values, the text and the page of something."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, ready for JSON."""

    @abstractmethod
    def text(self) -> str:
        """As text for a terminal."""

    @abstractmethod
    def _page(self) -> Page: ...

    def to_json(self, path: str | Path | None = None) -> str:
        """The dict as JSON text, also written to a file if a path is given; what is not finite becomes null.

        Raises:
            VarpropError: If the file cannot be written.
        """
        text = finite_json(self.to_dict())
        if path is not None:
            _write(text + "\n", Path(path))
        return text

    def to_html(self, path: str | Path | None = None) -> str:
        """One HTML page with nothing outside it, also written to a file if a path is given.

        Raises:
            VarpropError: If the file cannot be written.
        """
        text = render(self._page())
        if path is not None:
            _write(text, Path(path))
        return text

    def __repr__(self) -> str:
        return self.text()


def _write(text: str, file: Path) -> None:
    """Write a file so that it is there whole or not at all."""
    special = file.exists() and not file.is_file()  # such as /dev/stdout, which must not be replaced
    draft = file if special else file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, "utf-8")
        if not special:
            draft.replace(file)
    except OSError as error:
        if not special:
            with contextlib.suppress(OSError):
                draft.unlink()
        raise VarpropError(f"{file} cannot be written: {error.strerror or error}.") from error
