"""The entry point: finds the commands, runs one, and turns errors into one sentence."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import varprop as vp

from . import doctor, inspect
from .options import Parser, Stopped, lab

ABOUT = "Inspect models without data, compare normalizations fairly, and repeat the experiments of the paper."
DEBUG = "--debug"
FAILED = 2
LAB_COMMANDS = ("demo", "reproduce", "compare", "bench", "data")  # come with the lab
INSTALL_LAB = "pip install '.[lab]' in a checkout of varprop"
COMPLETE = "_VARPROP_COMPLETE"  # the variable by which the shell asks for completions of its words
# for bash, and for zsh after `autoload bashcompinit; bashcompinit`
SHELL_SCRIPT = f"""_varprop() {{
    COMPREPLY=($({COMPLETE}=1 varprop "${{COMP_WORDS[@]:1:COMP_CWORD}}"))
}}
complete -o default -F _varprop varprop"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``varprop`` with the given arguments, those of the process by default, and exit.

    ``--debug`` may stand anywhere; with it errors come with their traceback. The status is 0, or 2 if the command
    failed, whatever the reason, 130 after Ctrl-C; with `inspect` 1 says that the model has errors.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = DEBUG in words
    try:
        parser = make_parser()
        if COMPLETE in os.environ:
            print(*completions(parser, words), sep="\n")
            sys.exit(0)
        options, unknown = parser.parse_known_args([word for word in words if word != DEBUG])
        options.parser.refuse_unknown(unknown)
        if options.run is None:  # no command, or a group of commands without one of them
            options.parser.print_help(sys.stderr)
            sys.exit(FAILED)
        status = options.run(options)
    except Exception as error:
        if debug:
            traceback.print_exc()
        else:
            print(sentence(error), file=sys.stderr)
        sys.exit(130 if isinstance(error, Stopped) else FAILED)
    sys.exit(status or 0)


def make_parser() -> Parser:
    """The parser of all commands: the library's own, and those of the lab or what says that it is missing."""
    parser = Parser("varprop", description=ABOUT)
    parser.set_defaults(run=None, parser=parser)
    parser.add_argument("--version", action="version", version=doctor.own_version(), help="Print the version and exit.")
    parser.add_argument(DEBUG, action="store_true", help="Show the traceback of an error; accepted anywhere.")
    text = 'Print the script for completion in bash; use it by eval "$(varprop --show-completion)".'
    parser.add_argument("--show-completion", action="version", version=SHELL_SCRIPT, help=text)
    commands = parser.add_subparsers(metavar="COMMAND")
    if lab() is not None:
        lab().add_commands(commands)
    else:
        for name in LAB_COMMANDS:
            # without characters that begin an option, so that whatever follows is a plain word
            missing = commands.add_parser(name, help=f"Needs {INSTALL_LAB}.", prefix_chars="\0", add_help=False)
            missing.add_argument("words", nargs="*")
            missing.set_defaults(run=_refuse, command=name, parser=missing)
    inspect.add_to(commands)
    doctor.add_to(commands)
    return parser


def completions(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Commands, options and names that the last word may be the beginning of."""
    *before, last = words or [""]
    for word in before:
        commands = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})
        parser = commands.get(word, parser)
    candidates: list[str] = []
    for action in parser._actions:
        if action.help is not argparse.SUPPRESS:
            values = [] if action.option_strings else action.choices or getattr(action, "known", list)()
            candidates += [*action.option_strings, *values]
    return [candidate for candidate in candidates if candidate.startswith(last)]


def _refuse(options: argparse.Namespace) -> NoReturn:
    raise vp.VarpropError(f"{options.command} needs the lab: {INSTALL_LAB}.")


def sentence(error: Exception) -> str:
    """The line to print of an error: its own words if it was raised on purpose."""
    if isinstance(error, vp.VarpropError):
        return f"varprop: {error}"
    if isinstance(error, ImportError) and not (error.name or "varprop").startswith("varprop"):
        return f"varprop: {error.name} is missing: {INSTALL_LAB}."
    if isinstance(error, OSError) and error.strerror:
        return f"varprop: {error.filename or 'the system'}: {error.strerror}."
    return f"varprop: unexpected {type(error).__name__}: {error}. Run it again with {DEBUG} for the traceback."
