"""The entry point: runs the command line and turns errors into one sentence."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import varprop as vp

from .errors import Stopped

DEBUG = "--debug"
FAILED = 2


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``varprop`` with the given arguments, those of the process by default, and exit.

    ``--debug`` may stand anywhere; with it errors come with their traceback. The status is 0, or 2 if the command
    failed, whatever the reason, 130 after Ctrl-C; with `inspect` 1 says that the model has errors.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in given
    try:
        from .app import app

        app(args=[argument for argument in given if argument != DEBUG], prog_name="varprop")
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(sentence(error), file=sys.stderr)
        sys.exit(130 if isinstance(error, Stopped) else FAILED)
    sys.exit(0)


def sentence(error: Exception) -> str:
    """What to print of an error: its own words if it was raised on purpose."""
    if isinstance(error, vp.VarpropError):
        return f"varprop: {error}"
    if isinstance(error, ImportError) and not (error.name or "varprop").startswith("varprop"):
        return f"varprop: {error.name} is missing: pip install 'varprop[lab]'."
    if isinstance(error, OSError) and error.strerror:
        return f"varprop: {error.filename or 'the system'}: {error.strerror}."
    return f"varprop: unexpected {type(error).__name__}: {error}. Run it again with {DEBUG} for the traceback."
