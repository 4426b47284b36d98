"""What commands share: how they are added, their common options, the values options take, and stopping by Ctrl-C."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import varprop as vp

from .models import did_you_mean

DEVICES = ("auto", "cpu", "cuda")
Command = Callable[[argparse.Namespace], int | None]  # the exit status, 0 for None


class Stopped(vp.VarpropError):
    """The user stopped it by Ctrl-C."""


@contextmanager
def stoppable(advice: str) -> Iterator[None]:
    """Within, Ctrl-C ends the command with a word on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"Stopped. {advice}") from None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = (action.help or "").replace("%", "%%")
        unset = action.default is None or isinstance(action.default, bool) or action.default in (math.inf, [])
        shown = action.option_strings and not unset and action.default != argparse.SUPPRESS
        return f"{text} [default: %(default)s]" if shown else text


class Parser(argparse.ArgumentParser):
    """A parser of whole option names, whose errors are one sentence with the command that lists all options."""

    def __init__(self, prog: str | None = None, **settings: Any) -> None:
        super().__init__(prog, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print the sentence and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists what it takes.\n")

    def refuse_unknown(self, words: list[str]) -> None:
        """Exit if there are words that the parser did not take."""
        if words:
            options = [name for action in self._actions for name in action.option_strings]
            near = difflib.get_close_matches(words[0], options, n=3, cutoff=0.5)
            self.error(f"there is no {words[0]}" + f", did you mean {' or '.join(near)}" * bool(near))


def add_command(commands: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    """Add a command to what `argparse.ArgumentParser.add_subparsers` returned.

    `run` is called with the parsed options and returns the exit status, None for 0. The first line of `text` is the
    summary in the list of commands.
    """
    parser: Parser = commands.add_parser(name, help=text.splitlines()[0], description=text)
    parser.set_defaults(run=run, parser=parser)
    return parser


def number(kind: type[Any], least: float = -math.inf, most: float = math.inf) -> Callable[[str], Any]:
    """A type for argparse: whole or other numbers between two bounds, which are allowed themselves."""

    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            bounds = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
            raise argparse.ArgumentTypeError(f"{text} must be {' and '.join(bounds)}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # in argparse's messages
    return read


def listed(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Names separated by commas, each once, in the order given.

    Raises a VarpropError if a name is not among those known, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        near = did_you_mean(unknown[0], allowed) if unknown else ""
        raise vp.VarpropError(f"{option} takes names out of {','.join(allowed)}, not {text!r}.{near}")
    return tuple(dict.fromkeys(names))


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add ``--root``, the folder of the data."""
    text = "Folder of the data; by default $VARPROP_DATA or the user's cache directory."
    parser.add_argument("--root", type=Path, metavar="FOLDER", help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    text = "Where to compute; auto takes a GPU if there is one."
    parser.add_argument("--device", choices=DEVICES, metavar="|".join(DEVICES), default="auto", help=text)


def add_out(parser: argparse.ArgumentParser, default: str) -> None:
    """Add ``--out``, the folder of the results."""
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path(default), help="Folder of the results.")


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume``."""
    text = "Continue the run in the folder of the results."
    parser.add_argument("--resume", action="store_true", help=text)


@functools.cache
def lab() -> Any:
    """The module with the commands of the lab, `varprop_lab.commands`; None where the lab is not installed."""
    try:
        found = importlib.util.find_spec("varprop_lab.commands")
    except (ModuleNotFoundError, ValueError):  # no such package, or None stands for it in sys.modules
        return None
    return importlib.import_module("varprop_lab.commands") if found else None
